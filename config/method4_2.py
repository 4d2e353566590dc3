residual_mode = "method4_2"
recompute = True
