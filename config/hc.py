# Hyper-Connections (Zhu et al. 2024): four streams, read, mixed and written with coefficients made per token
residual_mode = "hc"
