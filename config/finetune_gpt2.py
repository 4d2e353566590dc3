# GPT-2's weights, trained on: python data/shakespeare/prepare.py --tokenizer gpt2 --out shakespeare_gpt2
init_from = "gpt2"
dataset = "shakespeare_gpt2"
block_size = 1024
dropout = 0.1
batch_tokens = 32768
micro_batch = 4
epochs = 3.0
learning_rate = 3e-5
eval_every = 10
checkpoint_every = 10
