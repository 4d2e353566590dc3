"""
Speed and memory on this machine's CPU, each figure beside its limit:

    python -m tools.bench                                 # every section, some hours on 2 cores
    python -m tools.bench modes generate                  # some sections
    python -m tools.bench modes --rows=baseline,mudd      # some rows, which join those of the record
    python -m tools.bench tables --out_dir=results/bench  # nothing new: a record's tables again; --rows: a short one
    python -m tools.bench against ../other_clone          # the same steps by two clones of this project in turn

The limit of a step is its FLOPs (model.flops_per_token, three times that for training) at the rate of a 2048³ float32
matrix multiplication, measured between the steps. Every configuration runs in a process of its own, so that its peak
memory is its own. Prints tables, and writes them with bench.json and a picture into out_dir. The sections: modes (every
residual mode), depth, length, vocabulary, compiled, gpt2 (beside stock torch modules), generate, data.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from configurator import configure
from data.dataset import Windows
from lib.checkpoint import code_hash
from lib.errors import UserError, refuse, run_main, user_error_from_os
from lib.files import read_json, write_json, write_whole
from lib.machine import keep_freed_memory, peak_resident, processor_name
from lib.plots import markdown_table, plot_growth
from model import GPT, GPTConfig, ResidualMode
from tools.compare.rows import parse

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class BenchConfig:
    # what is measured
    rows: str | None = None  # of modes, compiled, generate, against: MODE, MODE-stored, MODE-1 (reruns=1) …; None: all
    repeats: int | None = None  # steps that are timed; None: each section's own number
    # where it goes
    out_dir: str = "out/bench"  # bench.json, README.md and depth.png


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
TRAINING = {"weight_decay": 0.1, "learning_rate": 1e-4, "betas": (0.9, 0.95)}
ALL_ROWS = [mode.value for mode in ResidualMode] + ["method3_2-1", "method3_3-stored"]
LEARNED = ("baseline", "method3_2", "method4_2")  # one mode of each site stands for the others
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
    return model.configure_optimizers(**TRAINING)


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
        "cache_bytes": cache_bytes(model, config.block_size) if what == "eval" else None,
    }


def cache_bytes(model, length):
    """Of what generation keeps of so many tokens; the cache allocates for its whole length at the first."""
    cache = model.new_cache(1, length)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    return cache.nbytes()


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
    return {
        "cached": statistics.median(cached),
        "slowest": cached[0],
        "fastest": cached[-1],
        "uncached": uncached,
        "ratio": statistics.median(cached) / uncached,
        "limit": matmul_rate() / model.flops_per_token(2 * context),  # this token sees the whole context
        "cache_bytes": cache_bytes(model, context),
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
        windows = Windows(np.memmap(file.name, dtype="<u2", mode="r"), block_size, 32000, seed=1)
        windows.shuffled(0, 1)  # the order of an epoch is made once
        batches = [
            seconds_of(lambda n=n: windows.batch(windows.shuffled(n, n + batch), batch, torch.device("cpu")))
            for n in range(0, 50 * batch, batch)
        ]
    return {"seconds": statistics.median(batches), "tokens": batch * block_size}


MEASUREMENTS = {
    function.__name__: function
    for function in (measure_step, measure_gpt2, measure_generate, measure_transformers, measure_data)
}


def in_own_process(measurement, **arguments):
    command = [sys.executable, "-m", "tools.bench", "--measure", json.dumps([measurement.__name__, arguments])]
    with tempfile.TemporaryDirectory() as empty:  # torch.compile starts from nothing
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": empty}
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    refuse(result.returncode, f"{measurement.__name__} {arguments} failed: see above", status=1)
    return json.loads(result.stdout.splitlines()[-1])


# --- sections: what is measured, and its table ------------------------------------------------------------------------


def measure_steps(cases):
    """cases: (row, shape, variant) -> arguments of measure_step besides the row's and the variant's own."""
    results = {}
    for case in tqdm(cases, unit="case", leave=False):
        row, _, variant = case
        arguments = cases[case] | {"checkpoint": variant == "checkpointed", "compile": variant == "compiled"}
        arguments["config"] = arguments["config"] | parse(row).model_changes()
        results[", ".join(case)] = in_own_process(measure_step, **arguments)
    return results


def relative_time(r, base):
    """How many times as long as base r takes, at the same matrix-multiply rate: a shared machine's own rate drifts."""
    return r["limit"] * r["gflops"] / r["part"] / (base["limit"] * base["gflops"] / base["part"])


def step_table(results):
    """× baseline: the eager one of the same shape; × plain: neither checkpointed nor compiled."""
    header = ["", "s", "fastest–slowest", "× baseline", "× plain", "tokens/s", "limit s", "part of limit"]
    header += ["peak GB", "× baseline", "first s"]
    with_cache = any(r.get("cache_bytes") for r in results.values())  # older records have no such figure
    rows = []
    for name, r in results.items():
        row, shape, variant = name.split(", ")
        base = results[f"baseline, {shape}, eager"]
        rows.append(
            [
                f"{row}, {shape}{'' if variant == 'eager' else f', {variant}'}",
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
        if with_cache:
            rows[-1].append(f"{r['cache_bytes'] / 1e6:.1f}" if r.get("cache_bytes") else "")
    rates = sorted(r["gflops"] for r in results.values())
    rate = f"Matrix multiplication meanwhile: {rates[0]:.0f} to {rates[-1]:.0f} GFLOP/s."
    return f"{rate}\n\n{markdown_table(header + ['cache MB'] * with_cache, rows)}"


def modes_summary(results):
    """One line per row."""
    header = ["", "training step, s", "× baseline", "part of limit", "peak GB", "× baseline"]
    header += ["checkpointed: × time", "peak × baseline", "evaluation, s", "× baseline", "part of limit"]
    base_train, base_eval = results["baseline, train, eager"], results["baseline, eval, eager"]
    rows = []
    for row in dict.fromkeys(name.split(", ")[0] for name in results):  # what is newer than the record has no line
        train, evaluate = results[f"{row}, train, eager"], results[f"{row}, eval, eager"]
        checkpointed = results.get(f"{row}, train, checkpointed")
        rows.append(
            [
                row,
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


def readme_table(results, rows):
    """A few rows of `modes`: the baseline's figures, and the others' as multiples of them."""
    header = ["", "training step", "peak memory", "evaluation step", "checkpointed: training step", "peak memory"]
    base_train, base_eval = results["baseline, train, eager"], results["baseline, eval, eager"]
    figures = [f"{base_train['seconds']:.2f} s", f"{base_train['peak_bytes'] / 1e9:.2f} GB"]
    lines = [["baseline", *figures, f"{base_eval['seconds']:.2f} s", "", ""]]
    for row in rows:
        refuse(f"{row}, train, eager" not in results, f"the record holds no row {row!r}")
        train, evaluate = results[f"{row}, train, eager"], results[f"{row}, eval, eager"]
        checkpointed = results.get(f"{row}, train, checkpointed")
        time, memory = relative_time(train, base_train), train["peak_bytes"] / base_train["peak_bytes"]
        line = [row, f"× {time:.2f}", f"× {memory:.2f}", f"× {relative_time(evaluate, base_eval):.2f}", "", ""]
        if checkpointed:
            memory = checkpointed["peak_bytes"] / base_train["peak_bytes"]
            line[4:] = [f"× {time * checkpointed['times_plain']:.2f}", f"× {memory:.2f}"]
        lines.append(line)
    return markdown_table(header, lines)


def modes_table(results):
    return f"{modes_summary(results)}\n\n{step_table(results)}"


def modes(rows, repeats):
    cases = {}
    for row in rows:
        cases[row, "train", "eager"] = {"config": NOTES, "what": "train", "repeats": repeats or REPEATS}
        if GPTConfig(**NOTES | parse(row).model_changes()).n_reruns:
            cases[row, "train", "checkpointed"] = {"config": NOTES, "what": "train", "repeats": repeats or 3}
        cases[row, "eval", "eager"] = {"config": NOTES, "what": "eval", "repeats": repeats or REPEATS}
    return measure_steps(cases)


def depth(_, repeats):
    cases = {}
    for n_layer in (4, 8, 16):
        for row in (*LEARNED, "method3_2-1", "method3_2-2"):
            for what in ("train", "eval"):
                arguments = {"config": NOTES | {"n_layer": n_layer}, "what": what, "repeats": repeats or 2}
                cases[row, f"{n_layer} layers {what}", "eager"] = arguments
                if row in LEARNED and row != "baseline" and what == "train":
                    cases[row, f"{n_layer} layers {what}", "checkpointed"] = arguments
    return measure_steps(cases)


def length(_, repeats):
    cases = {}
    for block_size in (512, 1024, 2048):
        for row in LEARNED:
            for what in ("train", "eval"):
                config, batch = NOTES | {"block_size": block_size}, 2048 // block_size
                arguments = {"config": config, "what": what, "batch": batch, "repeats": repeats or 3}
                cases[row, f"length {block_size} {what}", "eager"] = arguments
    return measure_steps(cases)


def vocabulary(_, repeats):
    cases = {}
    for vocab_size in (8192, 32000, 50304):
        arguments = {"config": NOTES | {"vocab_size": vocab_size}, "what": "train", "repeats": repeats or REPEATS}
        cases["baseline", f"vocabulary {vocab_size:,}", "eager"] = arguments
    return measure_steps(cases)


def compiled(rows, repeats):
    arguments = {"config": LLAMA_12, "what": "train", "repeats": repeats or 3}
    return measure_steps({(row, "train", variant): arguments for row in rows for variant in ("eager", "compiled")})


def gpt2(_, repeats):
    return in_own_process(measure_gpt2, repeats=repeats or 9)


def gpt2_table(r):
    smallest, largest = r["ratios"][0], r["ratios"][-1]
    return markdown_table(
        ["this repository, s", "stock torch modules, s", "ratio", "smallest–largest"],
        [[f"{r['ours']:.3f}", f"{r['stock']:.3f}", f"{r['ratio']:.3f}", f"{smallest:.3f}–{largest:.3f}"]],
    )


def generate(rows, repeats):
    refuse(
        find_spec("transformers") is None,
        "the section generate compares with transformers: pip install -r requirements-dev.txt",
    )
    cases = [(row, 12, 512) for row in rows]
    for row in LEARNED:
        if row in rows:
            cases += [(row, n_layer, 512) for n_layer in (4, 8, 16)]
            cases += [(row, 12, context) for context in (128, 992)]
    results = {}
    for row, n_layer, context in tqdm(cases, unit="case", leave=False):
        config = LLAMA_12 | {"n_layer": n_layer} | parse(row).model_changes()
        name = f"{row}, {n_layer} layers, context {context}"
        results[name] = in_own_process(measure_generate, config=config, context=context, repeats=repeats or 3)
    return results | {"transformers": in_own_process(measure_transformers, repeats=repeats or 3)}


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


def data(_, repeats):
    batch = in_own_process(measure_data)
    step = in_own_process(measure_step, config=NOTES, what="train", repeats=repeats or 2)
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
WITH_ROWS = ("modes", "compiled", "generate")


# --- the record -------------------------------------------------------------------------------------------------------


def section_text(name, result):
    title, _, table = SECTIONS[name]
    about = ", ".join(f"{key} {value}" for key, value in result["about"].items() if key != "code")
    return f"## {title}\n\n`python -m tools.bench {name}`: {about}\n\n{table(result['measured'])}\n"


def plot_depth(results, path):
    """Seconds and peak memory of a training step and, if it was measured, the cache against the number of layers."""
    figures = [("training step, s", "train", "seconds", 1), ("peak memory, GB", "train", "peak_bytes", 1e9)]
    if any(r.get("cache_bytes") for r in results.values()):
        figures.append(("cache of 2048 tokens, MB", "eval", "cache_bytes", 1e6))
    panels = []
    for label, what, key, unit in figures:
        lines = {}
        for name, r in results.items():
            row, shape, variant = name.split(", ")
            if shape.endswith(what):
                x, y = lines.setdefault(row if variant == "eager" else f"{row}-{variant}", ([], []))
                x.append(int(shape.split()[0]))
                y.append(r[key] / unit)
        panels.append((label, lines))
    plot_growth(panels, "layers", path)


def write_record(folder, results):
    write_json(folder / "bench.json", results)
    texts = [section_text(name, results[name]) for name in SECTIONS if name in results]
    if "depth" in results:
        plot_depth(results["depth"]["measured"], folder / "depth.png")
        texts.append("![Seconds and peak memory of a training step at 4, 8 and 16 layers](depth.png)\n")
    write_whole(folder / "README.md", "\n".join(["# Speed and memory\n", *texts]).encode())


def check_same_machine(name, then, now):
    for key in ("machine", "threads", "torch"):
        different = f"the record's {name} was measured with {key} {then[key]}, not {now[key]}"
        refuse(then[key] != now[key], f"{different}: measure all of its rows, or choose another --out_dir")


def joined(before, now):
    """A section of the record with the rows that were measured now."""
    about = {key: ", ".join(dict.fromkeys([before["about"][key], now["about"][key]])) for key in ("date", "code")}
    measured = before["measured"] | now["measured"]
    order = {row: n for n, row in enumerate(ALL_ROWS)}
    names = sorted(measured, key=lambda case: order.get(case.split(", ")[0], len(order)))
    return {"about": now["about"] | about, "measured": {case: measured[case] for case in names}}


# --- two clones -------------------------------------------------------------------------------------------------------

CLONE = """
import json, resource, sys, time
import torch
from model import GPT, GPTConfig

config, training = json.loads(sys.argv[1])
torch.manual_seed(0)
try:
    model = GPT(GPTConfig(**config))
except (TypeError, ValueError) as error:  # a row or a setting that this clone does not know
    sys.exit(f"{type(error).__name__}: {error}")
optimizer = model.configure_optimizers(**training)
x = torch.randint(0, model.config.vocab_size, (1, model.config.block_size))

def train():
    model.train()(x, x, return_logits=False)[1].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

@torch.no_grad()
def evaluate():
    model.eval()(x, x, return_logits=False)

for step in (train, train, evaluate):
    step()
for line in sys.stdin:
    seconds = []
    for step in (train, evaluate):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps([*seconds, peak]), flush=True)
"""


class Clone:
    """A process of a clone that makes a training step and an evaluation when asked, and waits in between."""

    def __init__(self, folder, config):
        command = [sys.executable, "-c", CLONE, json.dumps([config, TRAINING])]
        keep = {"MALLOC_MMAP_THRESHOLD_": str(2**31 - 1), "MALLOC_TRIM_THRESHOLD_": str(2**62)}  # keep_freed_memory
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.folder, self.process = folder, subprocess.Popen(command, cwd=folder, env=os.environ | keep, **pipes)

    def ask(self):
        """Seconds of a training step and of an evaluation, and the largest resident set so far in bytes."""
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, ValueError):
            words = self.process.communicate()[1].strip().splitlines()
            raise UserError(f"{self.folder}: {words[-1] if words else 'no answer'}", status=1) from None

    def end(self):
        self.process.kill()
        self.process.communicate()


def compare_clones(other, rows, repeats):
    """Steps by this clone and by the other in turn; what a clone does not know is left out and named."""
    results = {}
    for row in tqdm(rows, unit="row", leave=False):
        clones = [Clone(folder, NOTES | parse(row).model_changes()) for folder in (ROOT, other)]
        try:
            for clone in clones:
                clone.ask()
            rounds = []
            for n in range(repeats):
                order = (0, 1) if n % 2 == 0 else (1, 0)  # neither is always the first
                answers = {i: clones[i].ask() for i in order}
                rounds.append((answers[0], answers[1]))
            results[row] = rounds
        except UserError as error:
            tqdm.write(f"{row} is left out: {error}", file=sys.stderr)
        finally:
            for clone in clones:
                clone.end()
    return results


def clones_table(results):
    """results: {row: [(here, there), …]}, each training and evaluation seconds and peak."""
    header = ["", "training here, s", "there, s", "ratio", "smallest–largest"]
    header += ["evaluation here, s", "there, s", "ratio", "smallest–largest", "peak here, MB", "there, MB", "ratio"]
    lines = []
    for row, rounds in results.items():
        line = [row]
        for i in (0, 1):
            ratios = sorted(here[i] / there[i] for here, there in rounds)
            line += [f"{statistics.median(answers[i] for answers in side):.3f}" for side in zip(*rounds, strict=True)]
            line += [f"{statistics.median(ratios):.3f}", f"{ratios[0]:.3f}–{ratios[-1]:.3f}"]
        here, there = (side[-1][2] for side in zip(*rounds, strict=True))
        lines.append([*line, f"{here / 1e6:,.0f}", f"{there / 1e6:,.0f}", f"{here / there:.3f}"])
    return markdown_table(header, lines)


# --- the command ------------------------------------------------------------------------------------------------------


def chosen_rows(text):
    """Rows as in tools/compare, of those with a step of their own."""
    rows = ALL_ROWS if text is None else list(dict.fromkeys(text.split(",")))
    for name in rows:
        row = parse(name)
        of_another = row.control or row.fast or row.length != 1
        refuse(of_another, f"row {name!r} is a baseline or has the step of another row: name that one")
    return rows


def main():
    if sys.argv[1:2] == ["--measure"]:
        name, values = json.loads(sys.argv[2])
        keep_freed_memory()  # as training does
        print(json.dumps(MEASUREMENTS[name](**values)))
        return
    s = configure(sys.argv[1:], BenchConfig, folders=True)
    rows, names = chosen_rows(s.rows), s.folders or list(SECTIONS)
    refuse(s.repeats is not None and s.repeats < 1, f"repeats must be at least 1, not {s.repeats}")
    if names[0] == "against":
        refuse(len(names) != 2, "name one other clone: python -m tools.bench against FOLDER")
        refuse(not Path(names[1], "model.py").is_file(), f"{names[1]} is no clone: there is no model.py in it")
        results = compare_clones(Path(names[1]).resolve(), rows, s.repeats or REPEATS)
        refuse(not results, "nothing could be measured: see above", status=1)
        print(clones_table(results))
        return
    folder = Path(s.out_dir)
    record = folder / "bench.json"
    if names == ["tables"]:
        results = read_json(record)
        write_record(folder, results)
        if s.rows:
            print(readme_table(results["modes"]["measured"], [row for row in rows if row != "baseline"]))
        return
    for name in names:
        known = f"{', '.join(SECTIONS)}, tables, or against FOLDER"
        refuse(name not in SECTIONS, f"unknown section {name!r}: choose from {known}")
        refuse(s.rows and name not in WITH_ROWS, f"--rows is for {', '.join(WITH_ROWS)} and against, not for {name}")
    results = read_json(record) if record.exists() else {}
    with user_error_from_os(f"make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {processor_name()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "code": code_hash(),
    }
    for name in names if s.rows else ():
        if name in results:
            check_same_machine(name, results[name]["about"], about)
    for name in names:
        before = results.get(name) if s.rows else None
        missing = [] if before or "baseline" in rows else ["baseline"]  # all else is relative to it
        now = {"about": about, "measured": SECTIONS[name][1](missing + rows, s.repeats)}
        results[name] = joined(before, now) if before else now
        write_record(folder, results)
        print(section_text(name, results[name]))


if __name__ == "__main__":
    run_main(main)
