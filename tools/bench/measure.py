"""The measurements: each runs in a process of its own, so that its peak memory is its own."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from data.dataset import Windows
from lib.errors import refuse, run_main
from lib.machine import keep_freed_memory, peak_resident
from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parents[2]
TRAINING = {"weight_decay": 0.1, "learning_rate": 1e-4, "betas": (0.9, 0.95)}


def in_own_process(measurement, **arguments):
    """What a function of this module returns; the lines below the last function are the other side."""
    command = [sys.executable, "-m", "tools.bench.measure", measurement.__name__, json.dumps(arguments)]
    with tempfile.TemporaryDirectory() as empty:  # torch.compile starts from nothing
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": empty}
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    refuse(result.returncode, f"measure.{measurement.__name__} {arguments} failed: see above", status=1)
    return json.loads(result.stdout.splitlines()[-1])


def seconds_of(function):
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def in_turn(one, other, repeats):
    """The median seconds of both, and the ratios of one to the other in ascending order."""
    times = [(seconds_of(one), seconds_of(other)) for _ in range(repeats)]
    return *map(median, zip(*times, strict=True)), sorted(a / b for a, b in times)


def matmul_rate():
    """FLOP/s over half a second or more, since the speed of a shared machine changes from moment to moment."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    n, seconds = 0, 0.0
    while seconds < 0.5:
        n, seconds = n + 1, seconds + seconds_of(lambda: a @ b)
    return n * 2 * 2048**3 / seconds


def random_batch(config, batch, length):
    x = torch.randint(0, config.vocab_size, (batch, length))
    return x, x.roll(-1, dims=1)


def train_step(model, optimizer, x, y):
    model(x, y, return_logits=False)[1].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def cache_bytes(model, length):
    """Of what generation keeps of so many tokens; the cache allocates for its whole length at the first."""
    cache = model.new_cache(1, length)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    return cache.nbytes()


def new_step(config, what, batch, variant):
    """A model and a function: one training step with its optimizer, or one evaluation step, loss and accuracy."""
    model = GPT(GPTConfig(**config))
    model.checkpoint_recompute = variant == "checkpointed"
    if variant == "compiled":
        model.compile_layers()
    x, y = random_batch(model.config, batch, model.config.block_size)
    if what == "train":
        optimizer = model.configure_optimizers(**TRAINING)
        return model, lambda: train_step(model, optimizer, x, y)
    return model.eval(), lambda: model.score(x, y)


def step(config, what, repeats, batch=1, variant="eager"):
    """If checkpointed or compiled, also against the same without, step by step in turn."""
    model, step = new_step(config, what, batch, variant)
    first = seconds_of(step)
    step()  # the first makes the optimizer's state, the second needs it and the gradients at once
    peak, plain = peak_resident(), None
    if variant != "eager":
        _, plain = new_step(config, what, batch, "eager")
        plain()
    rates, times, ratios = [matmul_rate()], [], []
    for _ in range(repeats):
        times.append(seconds_of(step))
        rates.append(matmul_rate())
        if plain:
            ratios.append(times[-1] / seconds_of(plain))
    length = model.config.block_size
    flops = model.flops_per_token(length) * batch * length * (3 if what == "train" else 1)
    limits = [2 * flops / (before + after) for before, after in itertools.pairwise(rates)]  # of each step's own moment
    return {
        "first": first,
        "seconds": median(times),
        "fastest": min(times),
        "slowest": max(times),
        "times_plain": median(ratios) if plain else None,
        "tokens_per_second": batch * length / median(times),
        "gflops": median(rates) / 1e9,
        "limit": median(limits),
        "part": median(limit / seconds for limit, seconds in zip(limits, times, strict=True)),
        "peak_bytes": peak,
        "cache_bytes": cache_bytes(model, length) if what == "eval" else None,
    }


class StockGPT2(nn.Module):
    """What one would write without this repository."""

    def __init__(self, config):
        super().__init__()
        d, self.n_head = config.n_embd, config.n_head
        self.wte, self.wpe = nn.Embedding(config.vocab_size, d), nn.Embedding(config.block_size, d)
        self.layers = nn.ModuleList()
        for _ in range(config.n_layer):
            attention = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
            mlp = nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d)
            self.layers.append(nn.ModuleList([*attention, nn.Sequential(nn.LayerNorm(d), *mlp)]))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, config.vocab_size, bias=False)
        self.head.weight = self.wte.weight
        for p in self.parameters():  # torch's own start gives logits whose softmax is full of denormals, which are slow
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx, targets, return_logits):
        x = self.wte(idx) + self.wpe.weight[: idx.size(1)]
        for norm, qkv, out, mlp in self.layers:
            q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in qkv(norm(x)).chunk(3, dim=-1))
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(a.transpose(1, 2).flatten(2))
            x = x + mlp(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def beside_stock(config, batch, repeats):
    """Our GPT-2 form and the same model in stock torch modules, step by step in turn."""
    model, step = new_step(config, "train", batch, "eager")
    stock = StockGPT2(model.config)
    x, y = random_batch(model.config, batch, model.config.block_size)
    optimizer = torch.optim.AdamW(stock.parameters(), TRAINING["learning_rate"], TRAINING["betas"], fused=True)
    both = step, lambda: train_step(stock, optimizer, x, y)
    in_turn(*both, 1)  # makes the optimizers' state
    ours, theirs, ratios = in_turn(*both, repeats)
    return {"ours": ours, "stock": theirs, "ratio": median(ratios), "ratios": ratios}


def generation(config, context, repeats, new=32):
    """Tokens per second behind a context, with and without the cache, and the cache's size."""
    model = GPT(GPTConfig(**config)).eval()
    prompt, _ = random_batch(model.config, 1, context)

    def rates(tokens, use_cache):
        for _ in range(repeats):
            stream = model.stream(prompt, tokens + 1, temperature=0, use_cache=use_cache)
            next(stream)  # the first token pays for the context
            yield tokens / seconds_of(lambda stream=stream: list(stream))

    cached, uncached = sorted(rates(new, True)), median(rates(1, False))
    return {
        "cached": median(cached),
        "slowest": cached[0],
        "fastest": cached[-1],
        "uncached": uncached,
        "ratio": median(cached) / uncached,
        "limit": matmul_rate() / model.flops_per_token(2 * context),  # this token sees the whole context
        "cache_bytes": cache_bytes(model, context),
        "peak_bytes": peak_resident(),
    }


def beside_transformers(config, repeats, context=512, new=64):
    """Greedy generation of the same Llama by Hugging Face's transformers and by us, in turn, context included."""
    from transformers import LlamaForCausalLM

    model = GPT(GPTConfig(**config)).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/model")
        llama = LlamaForCausalLM.from_pretrained(f"{folder}/model").eval()
    prompt, _ = random_batch(model.config, 1, context)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    both = lambda: llama.generate(prompt, **options), lambda: model.generate(prompt, new, temperature=0)
    with torch.no_grad():
        same = torch.equal(*(generate() for generate in both))
        refuse(not same, "our greedy text and that of transformers differ", status=1)
        theirs, ours, ratios = in_turn(*both, repeats)
    return {"ours": new / ours, "transformers": new / theirs, "ratio": median(ratios)}


def batches(config, repeats, batch=8):
    """Seconds of a batch from a memory-mapped file of 100 million tokens, and its part of a step with as many."""
    length = config["block_size"]
    with tempfile.NamedTemporaryFile() as file:
        np.memmap(file, dtype="<u2", mode="w+", shape=(100_000_000,))[:] = 7
        windows = Windows(np.memmap(file.name, dtype="<u2", mode="r"), length, config["vocab_size"], seed=1)
        windows.shuffled(0, 1)  # the order of an epoch is made once
        seconds = median(
            seconds_of(lambda n=n: windows.batch(windows.shuffled(n, n + batch), batch, torch.device("cpu")))
            for n in range(0, 50 * batch, batch)
        )
    rate = step(config, "train", repeats)["tokens_per_second"]
    return {"seconds": seconds, "tokens": batch * length, "part": seconds / (batch * length) * rate}


if __name__ == "__main__":
    name, arguments = sys.argv[1:]
    keep_freed_memory()  # as training does
    torch.manual_seed(0)
    run_main(lambda: print(json.dumps(globals()[name](**json.loads(arguments)))))
