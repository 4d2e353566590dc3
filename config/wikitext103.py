# the notes' experiment: python data/wikitext103/prepare.py --tokenizer hf:FOLDER with a Llama tokenizer
dataset = "wikitext103"
n_layer = 8
n_head = 8
n_kv_head = 4
n_embd = 512
ffn_hidden = 1024
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
