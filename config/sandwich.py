# norm before and after each sub-layer, inside the branch (Ding et al. 2021)
norm_position = "sandwich"
