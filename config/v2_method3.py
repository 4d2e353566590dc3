# method 3 of the second version: learned weights for the MLP outputs, stored
residual_mode = "method3_2"
recompute = False
