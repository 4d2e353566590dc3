"""
Speed and memory on this machine's CPU, each figure beside its limit:

    python bench.py                   # everything
    python bench.py modes generate    # some sections

The limit of a step is its FLOPs (model.flops_per_token, three times that for training) at the rate of a 2048³ float32
matrix multiplication, measured between the steps. Every configuration runs in a process of its own, so that its peak
memory is its own. Prints tables and writes results/bench.json.
"""

import importlib.util
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from configurator import UserError, run_main
from model import GPT, GPTConfig, ResidualMode
from report import markdown_table
from train import ROOT, Blocks, code_hash, keep_freed_memory, peak_resident, write_json

# the model of the notes
NOTES = {
    "block_size": 2048,
    "vocab_size": 32000,
    "n_layer": 8,
    "n_head": 8,
    "n_kv_head": 4,
    "n_embd": 512,
    "ffn_hidden": 1024,
}
LLAMA_12 = {"block_size": 1024, "vocab_size": 8192, "n_layer": 12, "n_head": 6, "n_embd": 384}
REPEATS = 5


# --- measured in a process of its own ---------------------------------------------------------------------------------


def seconds_of(function):
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def matmul_rate():
    """FLOP/s over half a second or more, since the speed of a shared machine changes from moment to moment."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    n, seconds = 0, 0.0
    while seconds < 0.5:
        n, seconds = n + 1, seconds + seconds_of(lambda: a @ b)
    return n * 2 * 2048**3 / seconds


def train_step(model, optimizer, x, y):
    model(x, y, return_logits=False)[1].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def random_batch(config, batch, length):
    x = torch.randint(0, config.vocab_size, (batch, length))
    return x, x.roll(-1, dims=1)


def new_optimizer(model):
    return model.configure_optimizers(weight_decay=0.1, learning_rate=1e-4, betas=(0.9, 0.95))


def measure_step(config, what, batch=1, checkpoint=False, compile=False, repeats=REPEATS):
    """One training step with its optimizer, or one evaluation step: loss and accuracy."""
    torch.manual_seed(0)
    config = GPTConfig(**config)
    model = GPT(config)
    model.checkpoint_recompute = checkpoint
    if compile:
        model.compile_layers()
    x, y = random_batch(config, batch, config.block_size)
    if what == "train":
        optimizer = new_optimizer(model)
        step = lambda: train_step(model, optimizer, x, y)  # noqa: E731
    else:
        model.eval()
        step = lambda: model.score(x, y)  # noqa: E731
    first = seconds_of(step)
    rates, times = [matmul_rate()], []
    for _ in range(repeats):
        times.append(seconds_of(step))
        rates.append(matmul_rate())
    flops = model.flops_per_token(config.block_size) * batch * config.block_size * (3 if what == "train" else 1)
    limits = [2 * flops / (before + after) for before, after in itertools.pairwise(rates)]  # of each step's own moment
    parts = [limit / seconds for limit, seconds in zip(limits, times, strict=True)]
    return {
        "first": first,
        "seconds": statistics.median(times),
        "fastest": min(times),
        "slowest": max(times),
        "tokens_per_second": batch * config.block_size / statistics.median(times),
        "gflops": statistics.median(rates) / 1e9,
        "limit": statistics.median(limits),
        "part": statistics.median(parts),
        "peak_bytes": peak_resident(),
    }


def measure_gpt2(repeats=REPEATS):
    """Our GPT-2 form and the same model in stock torch modules, step by step in turn."""
    torch.manual_seed(0)
    form = {"norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "bias": True, "tie_weights": True}
    config = GPTConfig(block_size=512, vocab_size=8192, n_layer=12, n_head=6, n_embd=384, **form)
    ours, stock = GPT(config), StockGPT2(config)
    x, y = random_batch(config, 4, config.block_size)
    optimizers = [new_optimizer(ours), torch.optim.AdamW(stock.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)]
    steps = [lambda m=m, o=o: train_step(m, o, x, y) for m, o in zip((ours, stock), optimizers, strict=True)]
    times = [[seconds_of(step) for step in steps] for _ in range(repeats + 1)][1:]  # without the first
    return {
        "ours": statistics.median(ours for ours, _ in times),
        "stock": statistics.median(stock for _, stock in times),
        "ratio": statistics.median(ours / stock for ours, stock in times),
        "ratios": sorted(ours / stock for ours, stock in times),
    }


class StockGPT2(nn.Module):
    """What one would write without this repository."""

    def __init__(self, config):
        super().__init__()
        d = config.n_embd
        self.wte, self.wpe = nn.Embedding(config.vocab_size, d), nn.Embedding(config.block_size, d)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(d),
                    "qkv": nn.Linear(d, 3 * d),
                    "out": nn.Linear(d, d),
                    "norm2": nn.LayerNorm(d),
                    "mlp": nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d)),
                }
            )
            for _ in range(config.n_layer)
        )
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, config.vocab_size, bias=False)
        self.head.weight = self.wte.weight
        self.n_head = config.n_head

    def forward(self, idx, targets, return_logits):
        x = self.wte(idx) + self.wpe.weight[: idx.size(1)]
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm1"](x)).chunk(3, dim=-1)
            q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in (q, k, v))
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](a.transpose(1, 2).flatten(2))
            x = x + layer["mlp"](layer["norm2"](x))
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measure_generate(config, context, new=32, repeats=3):
    """Tokens per second behind a context, with and without the cache, and the cache's size."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**config)).eval()
    prompt, _ = random_batch(model.config, 1, context)

    def rates(tokens, use_cache):
        for _ in range(repeats):
            stream = model.stream(prompt, tokens + 1, temperature=0, use_cache=use_cache)
            next(stream)  # the first token pays for the context
            yield tokens / seconds_of(lambda stream=stream: list(stream))

    cached, uncached = sorted(rates(new, True)), statistics.median(rates(1, False))
    cache = model.new_cache(1, context)
    with torch.no_grad():
        model(prompt, cache=cache)
    return {
        "cached": statistics.median(cached),
        "slowest": cached[0],
        "fastest": cached[-1],
        "uncached": uncached,
        "ratio": statistics.median(cached) / uncached,
        "limit": matmul_rate() / model.flops_per_token(2 * context),  # this token sees the whole context
        "cache_bytes": cache.nbytes(),
        "peak_bytes": peak_resident(),
    }


def measure_transformers(context=512, new=64, repeats=3):
    """Greedy generation of the same Llama by us and by Hugging Face's transformers, in turn, context included."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    ours = GPT(GPTConfig(**LLAMA_12)).eval()
    with tempfile.TemporaryDirectory() as folder:
        ours.save_pretrained(f"{folder}/model")
        theirs = LlamaForCausalLM.from_pretrained(f"{folder}/model").eval()
    prompt, _ = random_batch(ours.config, 1, context)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    with torch.no_grad():
        texts = ours.generate(prompt, new, temperature=0), theirs.generate(prompt, **options)
        if not torch.equal(*texts):
            raise UserError("our greedy text and that of transformers differ", status=1)
        times = [
            (
                seconds_of(lambda: ours.generate(prompt, new, temperature=0)),
                seconds_of(lambda: theirs.generate(prompt, **options)),
            )
            for _ in range(repeats)
        ]
    return {
        "ours": new / statistics.median(ours for ours, _ in times),
        "transformers": new / statistics.median(theirs for _, theirs in times),
        "ratio": statistics.median(theirs / ours for ours, theirs in times),
    }


def measure_data(batch=8, block_size=2048):
    """Seconds of a batch from a memory-mapped file of 100 million tokens."""
    import numpy as np

    with tempfile.NamedTemporaryFile() as file:
        np.memmap(file, dtype="<u2", mode="w+", shape=(100_000_000,))[:] = 7
        blocks = Blocks(np.memmap(file.name, dtype="<u2", mode="r"), block_size, 32000, seed=1)
        blocks.shuffled(0, 1)  # the order of an epoch is drawn once
        batches = [
            seconds_of(lambda n=n: blocks.batch(blocks.shuffled(n, n + batch), batch, torch.device("cpu")))
            for n in range(0, 50 * batch, batch)
        ]
    return {"seconds": statistics.median(batches), "tokens": batch * block_size}


MEASUREMENTS = {
    function.__name__: function
    for function in (measure_step, measure_gpt2, measure_generate, measure_transformers, measure_data)
}


def in_own_process(measurement, **arguments):
    command = [sys.executable, __file__, "--measure", json.dumps([measurement.__name__, arguments])]
    with tempfile.TemporaryDirectory() as empty:  # torch.compile starts from nothing
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": empty}
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if result.returncode:
        raise UserError(f"{measurement.__name__} {arguments} failed: see above", status=1)
    return json.loads(result.stdout.splitlines()[-1])


# --- sections: configurations and tables ------------------------------------------------------------------------------


STEP_HEADER = ["", "s", "fastest–slowest", "× baseline", "tokens/s", "limit s", "part of limit", "peak GB"]
STEP_HEADER += ["× baseline", "first s"]


def print_table(title, header, rows):
    print(f"\n{title}\n\n{markdown_table(header, rows)}")


def step_row(case, results):
    r, base = results[case], results["baseline", case[1], "eager"]
    return [
        f"{case[0]}, {case[1]}{'' if case[2] == 'eager' else f', {case[2]}'}",
        f"{r['seconds']:.2f}",
        f"{r['fastest']:.2f}–{r['slowest']:.2f}",
        f"{r['seconds'] / base['seconds']:.2f}",
        f"{r['tokens_per_second']:,.0f}",
        f"{r['limit']:.2f}",
        f"{r['part']:.2f}",
        f"{r['peak_bytes'] / 1e9:.2f}",
        f"{r['peak_bytes'] / base['peak_bytes']:.2f}",
        f"{r['first']:.1f}",
    ]


def step_table(title, cases):
    """
    cases: (mode, shape, variant) -> arguments of measure_step besides the variant's own. Relative figures are to the
    eager baseline of the same shape.
    """
    results = {}
    for case in tqdm(cases, unit="case", leave=False):
        mode, _, variant = case
        arguments = cases[case] | {"checkpoint": variant == "checkpointed", "compile": variant == "compiled"}
        arguments["config"] = arguments["config"] | {"residual_mode": mode}
        results[case] = in_own_process(measure_step, **arguments)
    print_table(title, STEP_HEADER, [step_row(case, results) for case in results])
    return {", ".join(case): result for case, result in results.items()}


LEARNED = ("baseline", "method3_2", "method4_2")  # one mode of each site stands for the others


def modes():
    cases = {}
    for mode in ResidualMode:
        cases[mode.value, "train", "eager"] = {"config": NOTES, "what": "train"}
        if mode.site:
            cases[mode.value, "train", "checkpointed"] = {"config": NOTES, "what": "train", "repeats": 3}
        cases[mode.value, "eval", "eager"] = {"config": NOTES, "what": "eval"}
    return step_table("8 layers × 512, FFN 1024, vocabulary 32,000, length 2048, batch 1, float32", cases)


def depth():
    cases = {}
    for n_layer in (4, 8, 16):
        for mode in LEARNED:
            for what in ("train", "eval"):
                arguments = {"config": NOTES | {"n_layer": n_layer}, "what": what, "repeats": 2}
                cases[mode, f"{n_layer} layers {what}", "eager"] = arguments
                if mode != "baseline" and what == "train":
                    cases[mode, f"{n_layer} layers {what}", "checkpointed"] = arguments
    return step_table("The same shape at 4, 8 and 16 layers", cases)


def length():
    cases = {}
    for block_size in (512, 1024, 2048):
        for mode in LEARNED:
            for what in ("train", "eval"):
                config, batch = NOTES | {"block_size": block_size}, 2048 // block_size
                arguments = {"config": config, "what": what, "batch": batch, "repeats": 3}
                cases[mode, f"length {block_size} {what}", "eager"] = arguments
    return step_table("The same shape, 2048 tokens as sequences of 512, 1024 and 2048", cases)


def vocabulary():
    cases = {
        ("baseline", f"vocabulary {vocab_size:,}", "eager"): {
            "config": NOTES | {"vocab_size": vocab_size},
            "what": "train",
        }
        for vocab_size in (8192, 32000, 50304)
    }
    return step_table("The same shape with other vocabularies, training step", cases)


def compiled():
    cases = {
        (mode.value, "train", variant): {"config": LLAMA_12, "what": "train", "repeats": 3}
        for mode in ResidualMode
        for variant in ("eager", "compiled")
    }
    return step_table("torch.compile: 12 layers × 384, length 1024, training step", cases)


def gpt2():
    result = in_own_process(measure_gpt2)
    print_table(
        "GPT-2 form, 12 layers × 384, length 512, vocabulary 8192, batch 4: seconds of a training step",
        ["this repository", "stock torch modules", "ratio", "smallest–largest"],
        [
            [
                f"{result['ours']:.3f}",
                f"{result['stock']:.3f}",
                f"{result['ratio']:.3f}",
                f"{result['ratios'][0]:.3f}–{result['ratios'][-1]:.3f}",
            ]
        ],
    )
    return result


def generate():
    if importlib.util.find_spec("transformers") is None:
        raise UserError("the section generate compares with transformers: pip install -r requirements-dev.txt")
    cases = {(mode.value, 12, 512): None for mode in ResidualMode}
    for mode in LEARNED:
        cases |= {(mode, n_layer, 512): None for n_layer in (4, 8, 16)}
        cases |= {(mode, 12, context): None for context in (128, 992)}
    for mode, n_layer, context in tqdm(cases, unit="case", leave=False):
        config = LLAMA_12 | {"n_layer": n_layer, "residual_mode": mode}
        cases[mode, n_layer, context] = in_own_process(measure_generate, config=config, context=context)
    print_table(
        "Generation: layers × 384, vocabulary 8192, behind a context, batch 1; tokens/s",
        ["", "layers", "context", "cached", "slowest–fastest", "limit", "uncached", "ratio", "cache MB", "peak GB"],
        [
            [
                *map(str, case),
                f"{r['cached']:.1f}",
                f"{r['slowest']:.1f}–{r['fastest']:.1f}",
                f"{r['limit']:,.0f}",
                f"{r['uncached']:.2f}",
                f"{r['ratio']:.0f}",
                f"{r['cache_bytes'] / 1e6:.1f}",
                f"{r['peak_bytes'] / 1e9:.2f}",
            ]
            for case, r in cases.items()
        ],
    )
    results = {f"{mode}, {n_layer} layers, context {context}": r for (mode, n_layer, context), r in cases.items()}
    r = results["transformers"] = in_own_process(measure_transformers)
    print_table(
        "The same Llama, 512 tokens and 64 new ones, greedy: tokens/s",
        ["this repository", "transformers", "ratio"],
        [[f"{r['ours']:.1f}", f"{r['transformers']:.1f}", f"{r['ratio']:.2f}"]],
    )
    return results


def data():
    batch = in_own_process(measure_data)
    step = in_own_process(measure_step, config=NOTES, what="train", repeats=2)
    part = batch["seconds"] / batch["tokens"] * step["tokens_per_second"]
    print(f"\nA batch of 8 × 2048 tokens takes {batch['seconds'] * 1e3:.2f} ms, {part:.3%} of the baseline's step")
    return batch | {"part": part}


def cpu_name():
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)", info.read_text() if info.exists() else "", re.M)
    return names[0] if names else platform.processor()


SECTIONS = {section.__name__: section for section in (modes, depth, length, vocabulary, compiled, gpt2, generate, data)}


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["--measure"]:
        name, values = json.loads(arguments[1])
        keep_freed_memory()  # as training does
        print(json.dumps(MEASUREMENTS[name](**values)))
        return
    for name in arguments:
        if name not in SECTIONS:
            raise UserError(f"unknown section {name!r}: choose from {', '.join(SECTIONS)}")
    path = ROOT / "results" / "bench.json"
    path.parent.mkdir(exist_ok=True)
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments or SECTIONS:
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{os.cpu_count()} cores, {cpu_name()}",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "code": code_hash(),
        }
        results[name] = {"about": about, "measured": SECTIONS[name]()}
        write_json(path, results)


if __name__ == "__main__":
    run_main(main)
