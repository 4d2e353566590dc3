# ResFormer (Zhou et al. 2024): each layer's values are mixed with those of layer 0
residual_mode = "resformer"
