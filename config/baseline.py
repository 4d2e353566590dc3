residual_mode = "baseline"
recompute = True
