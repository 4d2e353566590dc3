residual_mode = "method2"
recompute = True
