residual_mode = "method1"
recompute = True
