residual_mode = "method3_1"
recompute = True
