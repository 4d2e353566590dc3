# the larger model of the notes, whose learned weights they print; the rest as in wikitext103.py
dataset = "wikitext103"
n_layer = 12
n_head = 12
n_embd = 768
ffn_hidden = 2048
block_size = 2048
batch_tokens = 131072
micro_batch = 8
epochs = 5.0
learning_rate = 3e-4
warmup = 0.015
weight_decay = 0.1
eval_every = 500
eval_batch = 8
checkpoint_every = 500
