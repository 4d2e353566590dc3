# DenseFormer (Pagliardini et al. 2024): after each layer a learned sum of all layers' outputs so far
residual_mode = "denseformer"
