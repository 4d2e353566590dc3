# method 1 of the second version: the mean of the MLP outputs, stored
residual_mode = "method3_1"
recompute = False
