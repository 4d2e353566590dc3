"""
What each section measures, and its table. A section's function gives cases: a name, a function of measure.py and its
arguments; None is the name of an only one.
"""

from tqdm import tqdm

from lib.errors import refuse
from lib.plots import markdown_table
from model import GPTConfig, ResidualMode
from tools.bench import measure
from tools.compare.rows import parse

# the model of the notes
NOTES = dict(block_size=2048, vocab_size=32000, n_layer=8, n_head=8, n_kv_head=4, n_embd=512, ffn_hidden=1024)
LLAMA_12 = dict(block_size=1024, vocab_size=8192, n_layer=12, n_head=6, n_embd=384)
GPT2_FORM = dict(norm="layernorm", position="learned", activation="gelu_tanh", bias=True, tie_weights=True)
ALL_ROWS = [mode.value for mode in ResidualMode] + ["method3_2-1", "method3_3-stored"]
LEARNED = ("baseline", "method3_2", "method4_2")  # one mode of each site stands for the others


def step(name, config, repeats, batch=1):
    """A case whose name says the rest: ROW, SHAPE, VARIANT; the shape of an evaluation ends in eval."""
    row, shape, variant = name.split(", ")
    arguments = {"config": config | parse(row).model_changes(), "repeats": repeats, "batch": batch, "variant": variant}
    return name, measure.step, arguments | {"what": "eval" if shape.endswith("eval") else "train"}


def modes(rows, repeats):
    for row in rows:
        yield step(f"{row}, train, eager", NOTES, repeats or 5)
        if GPTConfig(**NOTES | parse(row).model_changes()).n_reruns:
            yield step(f"{row}, train, checkpointed", NOTES, repeats or 3)
        yield step(f"{row}, eval, eager", NOTES, repeats or 5)


def depth(_, repeats):
    for n_layer in (4, 8, 16):
        for row in (*LEARNED, "method3_2-1", "method3_2-2"):
            checkpointed = ["train, checkpointed"] if row == "method3_2" else []  # one stands for all
            for what in ("train, eager", *checkpointed, "eval, eager"):
                yield step(f"{row}, {n_layer} layers {what}", NOTES | {"n_layer": n_layer}, repeats or 2)


def length(_, repeats):
    for n in (512, 1024, 2048):
        for row in LEARNED:
            for what in ("train", "eval"):
                yield step(f"{row}, length {n} {what}, eager", NOTES | {"block_size": n}, repeats or 3, 2048 // n)


def vocabulary(_, repeats):
    for n in (8192, 32000, 50304):
        yield step(f"baseline, vocabulary {n:,}, eager", NOTES | {"vocab_size": n}, repeats or 5)


def compiled(rows, repeats):
    for row in rows:
        for variant in ("eager", "compiled"):
            yield step(f"{row}, train, {variant}", LLAMA_12, repeats or 3)


def gpt2(_, repeats):
    config = LLAMA_12 | GPT2_FORM | {"block_size": 512}
    yield None, measure.beside_stock, {"config": config, "batch": 4, "repeats": repeats or 9}


def generate(rows, repeats):
    cases, repeats = [(row, 12, 512) for row in rows], repeats or 3
    for row in (row for row in LEARNED if row in rows):
        cases += [(row, n_layer, 512) for n_layer in (4, 8, 16)] + [(row, 12, context) for context in (128, 992)]
    for row, n_layer, context in cases:
        config = LLAMA_12 | {"n_layer": n_layer} | parse(row).model_changes()
        name = f"{row}, {n_layer} layers, context {context}"
        yield name, measure.generation, {"config": config, "context": context, "repeats": repeats}
    yield "transformers", measure.beside_transformers, {"config": LLAMA_12, "repeats": repeats}


def data(_, repeats):
    yield None, measure.batches, {"config": NOTES, "repeats": repeats or 2}


def relative_time(r, base):
    """How many times as long as base r takes, at the same matrix-multiply rate: a shared machine's own rate drifts."""
    return r["limit"] * r["gflops"] / r["part"] / (base["limit"] * base["gflops"] / base["part"])


def two_digits(*numbers):
    return ["" if number is None else f"{number:.2f}" for number in numbers]


def step_table(results):
    """× baseline: the eager one of the same shape; × plain: neither checkpointed nor compiled."""
    header = ["", "s", "fastest–slowest", "× baseline", "× plain", "tokens/s", "limit s", "part of limit"]
    header += ["peak GB", "× baseline", "first s"]
    with_cache = any(r.get("cache_bytes") for r in results.values())  # older records have no such figure
    lines = []
    for name, r in results.items():
        base = results[f"baseline, {name.split(', ')[1]}, eager"]
        line = [name.removesuffix(", eager"), f"{r['seconds']:.2f}", f"{r['fastest']:.2f}–{r['slowest']:.2f}"]
        line += [*two_digits(relative_time(r, base), r["times_plain"]), f"{r['tokens_per_second']:,.0f}"]
        line += two_digits(r["limit"], r["part"], r["peak_bytes"] / 1e9, r["peak_bytes"] / base["peak_bytes"])
        cache = f"{r['cache_bytes'] / 1e6:.1f}" if r.get("cache_bytes") else ""
        lines.append([*line, f"{r['first']:.1f}", *[cache] * with_cache])
    rates = sorted(r["gflops"] for r in results.values())
    rate = f"Matrix multiplication meanwhile: {rates[0]:.0f} to {rates[-1]:.0f} GFLOP/s."
    return f"{rate}\n\n{markdown_table(header + ['cache MB'] * with_cache, lines)}"


def times_baseline(results, row):
    """Of a row of `modes`: time and peak of its training step and time of its evaluation, × the baseline's; of the
    checkpointed step time × plain and peak × the baseline's, None and None if the row runs nothing again."""
    base, base_eval = results["baseline, train, eager"], results["baseline, eval, eager"]
    train, evaluate = results[f"{row}, train, eager"], results[f"{row}, eval, eager"]
    again = results.get(f"{row}, train, checkpointed")
    again = (again["times_plain"], again["peak_bytes"] / base["peak_bytes"]) if again else (None, None)
    peak = train["peak_bytes"] / base["peak_bytes"]
    return relative_time(train, base), peak, relative_time(evaluate, base_eval), *again


def modes_table(results):
    """One line per row, then one per step."""
    header = ["", "training step, s", "× baseline", "part of limit", "peak GB", "× baseline"]
    header += ["checkpointed: × time", "peak × baseline", "evaluation, s", "× baseline", "part of limit"]
    lines = []
    for row in dict.fromkeys(name.split(", ")[0] for name in results):  # what is newer than the record has no line
        train, evaluate = results[f"{row}, train, eager"], results[f"{row}, eval, eager"]
        time, peak, evaluation, *again = times_baseline(results, row)
        numbers = [train["seconds"], time, train["part"], train["peak_bytes"] / 1e9, peak, *again]
        lines.append([row, *two_digits(*numbers, evaluate["seconds"], evaluation, evaluate["part"])])
    return f"{markdown_table(header, lines)}\n\n{step_table(results)}"


def readme_table(results, rows):
    """A few rows of `modes`: the baseline's figures, and the others' as multiples of them."""
    header = ["", "training step", "peak memory", "evaluation step", "checkpointed: training step", "peak memory"]
    train, evaluate = results["baseline, train, eager"], results["baseline, eval, eager"]
    seconds, peak, evaluation = two_digits(train["seconds"], train["peak_bytes"] / 1e9, evaluate["seconds"])
    lines = [["baseline", f"{seconds} s", f"{peak} GB", f"{evaluation} s", "", ""]]
    for row in rows:
        refuse(f"{row}, train, eager" not in results, f"the record holds no row {row!r}")
        time, peak, evaluation, times_plain, again_peak = times_baseline(results, row)
        numbers = two_digits(time, peak, evaluation, times_plain and time * times_plain, again_peak)
        lines.append([row, *(number and f"× {number}" for number in numbers)])
    return markdown_table(header, lines)


def gpt2_table(r):
    header = ["this repository, s", "stock torch modules, s", "ratio", "smallest–largest"]
    smallest, largest = r["ratios"][0], r["ratios"][-1]
    line = [f"{r['ours']:.3f}", f"{r['stock']:.3f}", f"{r['ratio']:.3f}", f"{smallest:.3f}–{largest:.3f}"]
    return markdown_table(header, [line])


def generate_table(results):
    header = ["", "tokens/s", "slowest–fastest", "limit", "without the cache", "ratio", "cache MB", "peak GB"]
    lines = []
    for name, r in results.items():
        if name != "transformers":
            line = [name, f"{r['cached']:.1f}", f"{r['slowest']:.1f}–{r['fastest']:.1f}", f"{r['limit']:,.0f}"]
            line += [f"{r['uncached']:.2f}", f"{r['ratio']:.0f}"]
            lines.append([*line, f"{r['cache_bytes'] / 1e6:.1f}", f"{r['peak_bytes'] / 1e9:.2f}"])
    r = results["transformers"]
    return (
        f"{markdown_table(header, lines)}\n\nThe same Llama, 512 tokens and 64 new ones, greedy: "
        f"{r['ours']:.1f} tokens/s here, {r['transformers']:.1f} with transformers, ratio {r['ratio']:.2f}."
    )


def data_table(r):
    return f"{r['tokens']:,} tokens: {r['seconds'] * 1e3:.2f} ms, {r['part']:.4%} of the baseline's step with as many."


SHAPE = "8 layers × 512, FFN 1024, vocabulary 32,000, length 2048, batch 1, float32"
SECTIONS = {  # name: title, cases, table
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


def measure_section(name, rows, repeats):
    results = {}
    for case, measurement, arguments in tqdm([*SECTIONS[name][1](rows, repeats)], unit="case", leave=False):
        results[case] = measure.in_own_process(measurement, **arguments)
    return results.get(None, results)
