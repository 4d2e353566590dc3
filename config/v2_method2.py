# method 2 of the second version: the mean of the attention outputs, stored
residual_mode = "method4_1"
recompute = False
