# GPT-2's size on web pages: python data/fineweb_edu/prepare.py --tokenizer gpt2 --max-tokens 2600000000
dataset = "fineweb_edu"
vocab_size = 50304  # GPT-2's 50257, rounded up to a multiple of 64
n_layer = 12
n_head = 12
n_embd = 768
tie_weights = True
block_size = 1024
batch_tokens = 524288  # half a million
micro_batch = 16
max_steps = 4768  # 2.5 billion tokens, 20 per parameter
learning_rate = 6e-4
warmup = 0.02
eval_every = 250
eval_tokens = 1048576
checkpoint_every = 250
log_every = 10
