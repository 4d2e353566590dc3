# mHC (DeepSeek 2025): Hyper-Connections whose streams are mixed by a doubly stochastic matrix
residual_mode = "mhc"
