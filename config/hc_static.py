# Hyper-Connections with coefficients that are the same for every token
residual_mode = "hc_static"
