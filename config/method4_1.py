residual_mode = "method4_1"
recompute = True
