residual_mode = "method3_2"
recompute = True
