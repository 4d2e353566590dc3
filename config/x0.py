# nanochat: before each layer the stream is scaled and gets some of the embedding again
residual_mode = "x0"
