# MUDDFormer (Xiao et al. 2025): q, k, v and the residual each read a mix of all layers' outputs, made per token
residual_mode = "mudd"
