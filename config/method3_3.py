# method3_2 with raw weights that depend on the token
residual_mode = "method3_3"
recompute = True
