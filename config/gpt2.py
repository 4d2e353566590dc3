# GPT-2's layer
norm = "layernorm"
position = "learned"
activation = "gelu_tanh"
bias = True
tie_weights = True
