# norm after each add, as in the first Transformer (Vaswani et al. 2017)
norm_position = "post"
