# the experiment of results/tuned/PLAN.md, 25 tokens per parameter (python data/shakespeare/prepare.py)
dataset = "shakespeare"
n_layer = 8
n_head = 4
n_kv_head = 2
n_embd = 48
ffn_hidden = 96
block_size = 128
batch_tokens = 4096
micro_batch = 32
epochs = 5.0
eval_every = 123  # ten in all
checkpoint_every = 123
log_every = 10
learning_rate = 8e-3  # the comparison finds one for each row: --learning_rates=4e-3,8e-3,1.6e-2
