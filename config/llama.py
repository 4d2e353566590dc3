# Llama's layer, which is also the default
norm = "rmsnorm"
position = "rope"
activation = "swiglu"
bias = False
tie_weights = False
