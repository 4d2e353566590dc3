# deep and narrow, on one megabyte of text (python data/shakespeare/prepare.py)
dataset = "shakespeare"
n_layer = 8
n_head = 4
n_embd = 96
block_size = 128
batch_tokens = 4096
micro_batch = 32
epochs = 1.5
eval_every = 75
learning_rate = 2.8e-3  # the best for the baseline, seed 0, of 1e-3, 2e-3, 2.8e-3 and 4e-3
