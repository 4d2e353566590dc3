"""
Speed and memory on this machine's CPU, each figure beside its limit:

    python bench.py                   # everything
    python bench.py modes generate    # some sections

The limit of a step is its FLOPs (model.flops_per_token, three times that for training) at the rate of a 2048³ float32
matrix multiplication, measured between the steps. Every configuration runs in a process of its own, so that its peak
memory is its own. Prints tables, and writes them with bench.json and a picture into out/bench (--out_dir=FOLDER).
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
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from compare import read_json
from configurator import UserError, run_main
from model import GPT, GPTConfig, ResidualMode
from report import draw_growth, markdown_table
from train import ROOT, Blocks, code_hash, keep_freed_memory, peak_resident, write_file_atomically, write_json

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


def new_step(config, what, batch, checkpoint, compile):
    """A model and a function: one training step with its optimizer, or one evaluation step, loss and accuracy."""
    torch.manual_seed(0)
    model = GPT(config)
    model.checkpoint_recompute = checkpoint
    if compile:
        model.compile_layers()
    x, y = random_batch(config, batch, config.block_size)
    if what == "train":
        optimizer = new_optimizer(model)
        return model, lambda: train_step(model, optimizer, x, y)
    return model.eval(), lambda: model.score(x, y)


def measure_step(config, what, batch=1, checkpoint=False, compile=False, repeats=REPEATS):
    """If checkpointed or compiled, also against the same without, step by step in turn."""
    config = GPTConfig(**config)
    model, step = new_step(config, what, batch, checkpoint, compile)
    first = seconds_of(step)
    step()  # the first makes the optimizer's state, the second needs it and the gradients at once
    peak, plain = peak_resident(), None
    if checkpoint or compile:
        _, plain = new_step(config, what, batch, False, False)
        plain()
    rates, times, ratios = [matmul_rate()], [], []
    for _ in range(repeats):
        times.append(seconds_of(step))
        rates.append(matmul_rate())
        if plain:
            ratios.append(times[-1] / seconds_of(plain))
    flops = model.flops_per_token(config.block_size) * batch * config.block_size * (3 if what == "train" else 1)
    limits = [2 * flops / (before + after) for before, after in itertools.pairwise(rates)]  # of each step's own moment
    parts = [limit / seconds for limit, seconds in zip(limits, times, strict=True)]
    return {
        "first": first,
        "seconds": statistics.median(times),
        "fastest": min(times),
        "slowest": max(times),
        "times_plain": statistics.median(ratios) if plain else None,
        "tokens_per_second": batch * config.block_size / statistics.median(times),
        "gflops": statistics.median(rates) / 1e9,
        "limit": statistics.median(limits),
        "part": statistics.median(parts),
        "peak_bytes": peak,
    }


def measure_gpt2(repeats=9):
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
        for p in self.parameters():  # torch's own start gives logits whose softmax is full of denormals, which are slow
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

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


# --- sections: what is measured, and its table ------------------------------------------------------------------------


def measure_steps(cases):
    """cases: (mode, shape, variant) -> arguments of measure_step besides the variant's own."""
    results = {}
    for case in tqdm(cases, unit="case", leave=False):
        mode, _, variant = case
        arguments = cases[case] | {"checkpoint": variant == "checkpointed", "compile": variant == "compiled"}
        arguments["config"] = arguments["config"] | {"residual_mode": mode}
        results[", ".join(case)] = in_own_process(measure_step, **arguments)
    return results


def relative_time(r, base):
    """How many times as long as base r takes, at the same matrix-multiply rate: a shared machine's own rate drifts."""
    return r["limit"] * r["gflops"] / r["part"] / (base["limit"] * base["gflops"] / base["part"])


def step_table(results):
    """× baseline: the eager one of the same shape; × plain: neither checkpointed nor compiled."""
    header = ["", "s", "fastest–slowest", "× baseline", "× plain", "tokens/s", "limit s", "part of limit"]
    header += ["peak GB", "× baseline", "first s"]
    rows = []
    for name, r in results.items():
        mode, shape, variant = name.split(", ")
        base = results[f"baseline, {shape}, eager"]
        rows.append(
            [
                f"{mode}, {shape}{'' if variant == 'eager' else f', {variant}'}",
                f"{r['seconds']:.2f}",
                f"{r['fastest']:.2f}–{r['slowest']:.2f}",
                f"{relative_time(r, base):.2f}",
                f"{r['times_plain']:.2f}" if r["times_plain"] else "",
                f"{r['tokens_per_second']:,.0f}",
                f"{r['limit']:.2f}",
                f"{r['part']:.2f}",
                f"{r['peak_bytes'] / 1e9:.2f}",
                f"{r['peak_bytes'] / base['peak_bytes']:.2f}",
                f"{r['first']:.1f}",
            ]
        )
    rates = sorted(r["gflops"] for r in results.values())
    rate = f"Matrix multiplication meanwhile: {rates[0]:.0f} to {rates[-1]:.0f} GFLOP/s."
    return f"{rate}\n\n{markdown_table(header, rows)}"


def modes_summary(results):
    """One row a mode."""
    header = ["", "training step, s", "× baseline", "part of limit", "peak GB", "× baseline"]
    header += ["checkpointed: × time", "peak × baseline", "evaluation, s", "× baseline", "part of limit"]
    base_train, base_eval = results["baseline, train, eager"], results["baseline, eval, eager"]
    rows = []
    for mode in dict.fromkeys(name.split(", ")[0] for name in results):  # a mode newer than the record has no row
        train, evaluate = results[f"{mode}, train, eager"], results[f"{mode}, eval, eager"]
        checkpointed = results.get(f"{mode}, train, checkpointed")
        rows.append(
            [
                mode,
                f"{train['seconds']:.2f}",
                f"{relative_time(train, base_train):.2f}",
                f"{train['part']:.2f}",
                f"{train['peak_bytes'] / 1e9:.2f}",
                f"{train['peak_bytes'] / base_train['peak_bytes']:.2f}",
                f"{checkpointed['times_plain']:.2f}" if checkpointed else "",
                f"{checkpointed['peak_bytes'] / base_train['peak_bytes']:.2f}" if checkpointed else "",
                f"{evaluate['seconds']:.2f}",
                f"{relative_time(evaluate, base_eval):.2f}",
                f"{evaluate['part']:.2f}",
            ]
        )
    return markdown_table(header, rows)


def modes_table(results):
    return f"{modes_summary(results)}\n\n{step_table(results)}"


LEARNED = ("baseline", "method3_2", "method4_2")  # one mode of each site stands for the others


def modes():
    cases = {}
    for mode in ResidualMode:
        cases[mode.value, "train", "eager"] = {"config": NOTES, "what": "train"}
        if mode.site:
            cases[mode.value, "train", "checkpointed"] = {"config": NOTES, "what": "train", "repeats": 3}
        cases[mode.value, "eval", "eager"] = {"config": NOTES, "what": "eval"}
    return measure_steps(cases)


def depth():
    cases = {}
    for n_layer in (4, 8, 16):
        for mode in LEARNED:
            for what in ("train", "eval"):
                arguments = {"config": NOTES | {"n_layer": n_layer}, "what": what, "repeats": 2}
                cases[mode, f"{n_layer} layers {what}", "eager"] = arguments
                if mode != "baseline" and what == "train":
                    cases[mode, f"{n_layer} layers {what}", "checkpointed"] = arguments
    return measure_steps(cases)


def length():
    cases = {}
    for block_size in (512, 1024, 2048):
        for mode in LEARNED:
            for what in ("train", "eval"):
                config, batch = NOTES | {"block_size": block_size}, 2048 // block_size
                arguments = {"config": config, "what": what, "batch": batch, "repeats": 3}
                cases[mode, f"length {block_size} {what}", "eager"] = arguments
    return measure_steps(cases)


def vocabulary():
    return measure_steps(
        {
            ("baseline", f"vocabulary {vocab_size:,}", "eager"): {
                "config": NOTES | {"vocab_size": vocab_size},
                "what": "train",
            }
            for vocab_size in (8192, 32000, 50304)
        }
    )


def compiled():
    return measure_steps(
        {
            (mode.value, "train", variant): {"config": LLAMA_12, "what": "train", "repeats": 3}
            for mode in ResidualMode
            for variant in ("eager", "compiled")
        }
    )


def gpt2():
    return in_own_process(measure_gpt2)


def gpt2_table(r):
    smallest, *_, largest = r["ratios"]
    return markdown_table(
        ["this repository, s", "stock torch modules, s", "ratio", "smallest–largest"],
        [[f"{r['ours']:.3f}", f"{r['stock']:.3f}", f"{r['ratio']:.3f}", f"{smallest:.3f}–{largest:.3f}"]],
    )


def generate():
    if importlib.util.find_spec("transformers") is None:
        raise UserError("the section generate compares with transformers: pip install -r requirements-dev.txt")
    cases = [(mode.value, 12, 512) for mode in ResidualMode]
    for mode in LEARNED:
        cases += [(mode, n_layer, 512) for n_layer in (4, 8, 16)]
        cases += [(mode, 12, context) for context in (128, 992)]
    results = {}
    for mode, n_layer, context in tqdm(cases, unit="case", leave=False):
        config = LLAMA_12 | {"n_layer": n_layer, "residual_mode": mode}
        name = f"{mode}, {n_layer} layers, context {context}"
        results[name] = in_own_process(measure_generate, config=config, context=context)
    return results | {"transformers": in_own_process(measure_transformers)}


def generate_table(results):
    header = ["", "tokens/s", "slowest–fastest", "limit", "without the cache", "ratio", "cache MB", "peak GB"]
    rows = [
        [
            name,
            f"{r['cached']:.1f}",
            f"{r['slowest']:.1f}–{r['fastest']:.1f}",
            f"{r['limit']:,.0f}",
            f"{r['uncached']:.2f}",
            f"{r['ratio']:.0f}",
            f"{r['cache_bytes'] / 1e6:.1f}",
            f"{r['peak_bytes'] / 1e9:.2f}",
        ]
        for name, r in results.items()
        if name != "transformers"
    ]
    r = results["transformers"]
    return (
        f"{markdown_table(header, rows)}\n\nThe same Llama, 512 tokens and 64 new ones, greedy: "
        f"{r['ours']:.1f} tokens/s here, {r['transformers']:.1f} with transformers, ratio {r['ratio']:.2f}."
    )


def data():
    batch = in_own_process(measure_data)
    step = in_own_process(measure_step, config=NOTES, what="train", repeats=2)
    return batch | {"part": batch["seconds"] / batch["tokens"] * step["tokens_per_second"]}


def data_table(r):
    return f"{r['tokens']:,} tokens: {r['seconds'] * 1e3:.2f} ms, {r['part']:.4%} of the baseline's step with as many."


SHAPE = "8 layers × 512, FFN 1024, vocabulary 32,000, length 2048, batch 1, float32"
SECTIONS = {  # name: title, measurement, its table
    "modes": (SHAPE, modes, modes_table),
    "depth": ("The same shape at 4, 8 and 16 layers", depth, step_table),
    "length": ("The same shape, 2048 tokens as sequences of 512, 1024 and 2048", length, step_table),
    "vocabulary": ("The same shape with other vocabularies, training step", vocabulary, step_table),
    "compiled": ("torch.compile: 12 layers × 384, length 1024, training step", compiled, step_table),
    "gpt2": ("GPT-2's form: 12 layers × 384, length 512, vocabulary 8192, batch 4, training step", gpt2, gpt2_table),
    "generate": ("A new token: layers × 384, vocabulary 8192, behind a context, batch 1", generate, generate_table),
    "data": ("A batch from a memory-mapped file of 100 million tokens", data, data_table),
}


def section_text(name, result):
    title, _, table = SECTIONS[name]
    about = ", ".join(f"{key} {value}" for key, value in result["about"].items() if key != "code")
    return f"## {title}\n\n`python bench.py {name}`: {about}\n\n{table(result['measured'])}\n"


def cpu_name():
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)", info.read_text() if info.exists() else "", re.M)
    return names[0] if names else platform.processor()


def draw_depth(results, path):
    """Seconds and peak memory of a training step against the number of layers."""
    panels = []
    for label, key, unit in (("training step, s", "seconds", 1), ("peak memory, GB", "peak_bytes", 1e9)):
        lines = defaultdict(lambda: ([], []))
        for name, r in results.items():
            mode, shape, variant = name.split(", ")
            if shape.endswith("train"):
                x, y = lines[mode if variant == "eager" else f"{mode}-{variant}"]
                x.append(int(shape.split()[0]))
                y.append(r[key] / unit)
        panels.append((label, lines))
    draw_growth(panels, "layers", path)


def write_record(folder, results):
    write_json(folder / "bench.json", results)
    texts = [section_text(name, results[name]) for name in SECTIONS if name in results]
    if "depth" in results:
        draw_depth(results["depth"]["measured"], folder / "depth.png")
        texts.append("![Seconds and peak memory of a training step at 4, 8 and 16 layers](depth.png)\n")
    write_file_atomically(folder / "README.md", "\n".join(["# Speed and memory\n", *texts]).encode())


def main():
    if sys.argv[1:2] == ["--measure"]:
        name, values = json.loads(sys.argv[2])
        keep_freed_memory()  # as training does
        print(json.dumps(MEASUREMENTS[name](**values)))
        return
    folder, names = ROOT / "out" / "bench", []
    for argument in sys.argv[1:]:
        if argument.startswith("--out_dir="):
            folder = Path(argument.partition("=")[2])
        elif argument in SECTIONS:
            names.append(argument)
        else:
            raise UserError(f"unknown section {argument!r}: choose from {', '.join(SECTIONS)}, or set --out_dir=FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    results = read_json(folder / "bench.json")
    for name in names or SECTIONS:
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{os.cpu_count()} cores, {cpu_name()}",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "code": code_hash(),
        }
        results[name] = {"about": about, "measured": SECTIONS[name][1]()}
        write_record(folder, results)
        print(section_text(name, results[name]))


if __name__ == "__main__":
    run_main(main)
