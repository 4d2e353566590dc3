# Primer-EZ (So et al. 2021): squared ReLU, and a convolution of width 3 after the q, k and v projections
activation = "relu2"
dconv = True
