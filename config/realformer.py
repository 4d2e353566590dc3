# RealFormer (He et al. 2020): attention scores add up over the layers
residual_mode = "realformer"
