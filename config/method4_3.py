# method4_2 with raw weights that depend on the token
residual_mode = "method4_3"
recompute = True
