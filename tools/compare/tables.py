"""What the records say, for people: the tables of README.md and of the terminal, and results.csv."""

import csv
import io

from lib.files import write_whole
from lib.plots import markdown_table
from tools.compare.analysis import FEW, MARGIN
from tools.compare.rows import parse
from tools.compare.tuning import best_rate, rows_at_an_edge

TERMINAL_WIDTH = 120
BOUNDS = {"inside": "", "dearer": "> ", "cheaper": "< "}


# --- cells ------------------------------------------------------------------------------------------------------------


def show(value, form, half=None):
    if value is None:
        return "–"
    return format(value, form) + ("" if half is None else f" ± {half:.4f}")


def show_difference(entry):
    if entry is None:
        return "–"
    if entry["half"] is None:
        return ", ".join(f"{value:+.4f}" for value in entry["each"])
    return "≈ " * entry["noise"] + show(entry["mean"], "+.4f", entry["half"])


def show_worth(entry):
    if entry is None:
        return "–"
    if entry["seeds"] < FEW:
        values = zip(entry["sides"], entry["each"], strict=True)
        return ", ".join(f"{BOUNDS[side]}{value:.2f}" for side, value in values)
    if entry["bound"]:
        bound = {"above": f"> {entry['mean']:.2f}", "below": f"< {entry['mean']:.2f}", "both": "–"}[entry["bound"]]
        return f"{bound} ({entry['outside']} of {entry['seeds']} outside)"
    interval = f" [{entry['low']:.2f}, {entry['high']:.2f}]" if entry["low"] is not None else ""
    return f"{entry['mean']:.2f}{interval}"


def row_cell(entry):
    control = parse(entry["row"]).control
    size = {"deeper": f" ({entry['n_layer']} layers)", "looped": f" ({entry['loops']} loops)"}
    return entry["row"] + size.get(control, "")


COLUMNS = {
    "row": row_cell,
    "rate": lambda e: f"{e['learning_rate']:g}",
    "seeds": lambda e: str(len(e["seeds"])),
    "parameters": lambda e: f"{e['parameters']:,}",
    "FLOPs/token": lambda e: show(e["relative_flops"], ".2f"),
    "training FLOPs": lambda e: show(e["relative_training_flops"], ".2f"),
    "tokens/s": lambda e: show(e["relative_speed"], ".2f"),
    "peak MB": lambda e: show(e["memory"] and e["memory"] / 2**20, ",.0f"),
    "loss": lambda e: show(e["loss"][0], ".4f", e["loss"][1]),
    "training loss": lambda e: show(e["train_loss"], ".4f"),
    "best loss": lambda e: show(e["best_loss"][0], ".4f", e["best_loss"][1]),
    "bits/byte": lambda e: show(e["bits_per_byte"], ".4f"),
    "perplexity": lambda e: show(e["perplexity"], ".3f"),
    "accuracy": lambda e: show(e["accuracy"][0], ".4f"),
    "Δ loss": lambda e: show_difference(e["difference"]),
    "Δ best loss": lambda e: show_difference(e["best_difference"]),
    "Δ vs longer": lambda e: show_difference(e["against"].get("longer")),
    "Δ vs deeper": lambda e: show_difference(e["against"].get("deeper")),
    "Δ vs looped": lambda e: show_difference(e["against"].get("looped")),
    "worth, FLOPs": lambda e: show_worth(e["worth_flops"]),
    "worth, time": lambda e: show_worth(e["worth_time"]),
}
# left out where all are empty
OPTIONAL = ["training loss", "best loss", "Δ best loss", "Δ vs longer", "Δ vs deeper", "Δ vs looped"]
OPTIONAL += ["worth, FLOPs", "worth, time"]
# what the terminal shows first; as much as fits
BY_IMPORTANCE = [
    "row",
    "loss",
    "Δ loss",
    "rate",
    "FLOPs/token",
    "worth, FLOPs",
    "tokens/s",
    "parameters",
    "worth, time",
    "Δ vs looped",
    "bits/byte",
]


def full_table(summary):
    """Header and rows of cells."""
    columns = {name: [cell(entry) for entry in summary] for name, cell in COLUMNS.items()}
    kept = [name for name in columns if name not in OPTIONAL or set(columns[name]) != {"–"}]
    return kept, [list(row) for row in zip(*(columns[name] for name in kept), strict=True)]


def terminal_table(header, rows):
    """The most important columns of the full table, as many as fit beside each other."""
    order = [name for name in BY_IMPORTANCE if name in header]
    chosen, width = [], 1
    for name in order:
        column = header.index(name)
        needed = max(len(cell) for cell in [name, *(row[column] for row in rows)]) + 3
        if width + needed <= TERMINAL_WIDTH or not chosen:
            chosen.append(column)
            width += needed
    chosen.sort()
    return markdown_table([header[i] for i in chosen], [[row[i] for i in chosen] for row in rows])


def write_csv(path, summary):
    """The same numbers, unrounded: one line per row, an estimate as several columns."""
    lines = [flat(entry) for entry in summary]
    names = list(dict.fromkeys(name for line in lines for name in line))
    text = io.StringIO()
    table = csv.DictWriter(text, names, lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    write_whole(path, text.getvalue().encode())


def flat(value, name=""):
    """{"loss": [1, 2]} as {"loss mean": 1, "loss sd": 2}, and so on."""
    if value is None:
        return {}
    if isinstance(value, list):
        return {name: " ".join(map(str, value))}
    if isinstance(value, tuple):
        value = dict(zip(("mean", "sd"), value, strict=True))
    if not isinstance(value, dict):
        return {name: value}
    return {full: cell for key, part in value.items() for full, cell in flat(part, f"{name} {key}".strip()).items()}


# --- README.md --------------------------------------------------------------------------------------------------------


def contrast_table(contrasts):
    rows = [
        [
            entry["row"],
            entry["against"],
            str(entry["difference"]["pairs"]),
            show_difference(entry["difference"]),
            *(f"{entry[key]:.2g}" for key in ("p", "holm", "p_margin", "holm_margin")),
        ]
        for entry in contrasts
    ]
    beyond = f"p, beyond ± {MARGIN}"
    return markdown_table(["row", "against", "seeds", "Δ loss", "p", "p, Holm", beyond, f"{beyond}, Holm"], rows)


def rate_table(losses, diverged):
    """The rates that were tried, the best of each row in bold."""
    rates = sorted({rate for tried in losses.values() for rate in tried})
    rows = []
    for row, tried in losses.items():
        cells = {rate: f"{loss:.4f}" for rate, loss in tried.items()}
        best = best_rate(tried)
        cells |= {best: f"**{cells[best]}**"} | dict.fromkeys(diverged.get(row, {}), "diverged")
        rows.append([row, *(cells.get(rate, "") for rate in rates)])
    return markdown_table(["row", *(f"{rate:g}" for rate in rates)], rows)


def machines_text(records):
    """What the runs were made on and with."""
    machines = [record["machine"] for record in records]
    dates = sorted(record["date"][:10] for record in records)
    parts = [
        together(f"{m['processor']} ({m['device']}, {m['dtype']})" for m in machines),
        f"torch {together(m['torch'] for m in machines)}",
        f"{sum(bool(m['compile']) for m in machines)} of {len(machines)} runs compiled",
        f"code {together(record['code'][:12] for record in records)}",
        f"commit {together(str(record['commit'])[:12] for record in records)}",
        " to ".join(dict.fromkeys([dates[0], dates[-1]])),
    ]
    return f"Run on {'; '.join(parts)}."


def together(words):
    return ", ".join(sorted(set(words)))


COLUMNS_TEXT = """\
Losses are validation losses in nats, last and best of a run: mean ± standard deviation over seeds. The training loss \
is the mean of the batches logged between the last two evaluations. Bits per byte and accuracy are those at the end, \
averaged over seeds; perplexity is exp of the mean loss. FLOPs/token (forward), training FLOPs and tokens/s are \
relative to the baseline; \
tokens/s and the process's peak memory are {measured}. Δ is the difference from the baseline, or from the control that \
costs what the row costs, paired by seed (the same data in the same order) ± half of its 95 % interval by Student's t; \
≈ marks an interval that holds zero. With one or two seeds the difference of each stands there instead.
"""
WORTH_TEXT = """
Worth is what the baseline would have to spend to reach a row's loss, divided by what the row spent: above 1 it pays. \
It comes from the baseline trained shorter and longer (`baseline-x2` has twice the steps), interpolated monotonically \
over the logarithm of FLOPs or of time, per seed: geometric mean and 95 % interval, or each of one or two seeds; \
> and < are bounds where seeds lie outside of what was measured.
"""
BEYOND_TEXT = f"""\
The first p is that of no difference *at these learning rates*; the last two are those of a difference of up to \
{MARGIN} nats, which luck in the search for rates can make.
"""
RATES_TEXT = """
Validation losses of one run each with seed 0, which is in no other table; a row that is not here takes the rate of \
the one whose variant it is.
"""


def about_text(summary, records):
    """Model, data and machine in a few lines."""
    one = next((r for r in records if parse(r["row"]).control is None), records[0])["settings"]
    data, rates = records[0]["data"], {entry["learning_rate"] for entry in summary}
    parts = [
        f"{one['n_layer']} layers × {one['n_embd']}, {one['n_head']} heads, length {one['block_size']}",
        f"{summary[0]['tokens']:,} tokens per run of {summary[0]['row']} in batches of {one['batch_tokens']:,}",
        f"learning rate {one['learning_rate']:g}" if len(rates) == 1 else "a learning rate for each row",
        f"data: {data['source']}, {data['train_tokens']:,} tokens",
        f"seeds {', '.join(map(str, sorted({record['seed'] for record in records})))}",
    ]
    return f"{'; '.join(parts)}. {machines_text(records)}"


def measured_text(summary):
    """How speed and memory were measured, and how exactly: at what a second baseline came out."""
    threads = sorted({entry["threads"] for entry in summary if entry["threads"]})
    if not threads:
        return "missing: `--measure=True` fills them in"
    text = "measured by `--measure=True`, each row in turn with a baseline beside it (on GPUs: after it), "
    text += f"OMP_NUM_THREADS={' or '.join(map(str, threads))}"
    rounds = [speed for e in summary if e["row"] == "baseline" for speed in e["relative_speed_by_round"] or []]
    if rounds:
        text += f"; a second baseline came out at {min(rounds):.2f} to {max(rounds):.2f} in {len(rounds)} rounds"
    return text


def noise_text(summary, paired_deviation):
    """The baseline's spread; of few seeds it says little, all rows together say more."""
    lines = [
        f"Noise floor: the baseline's standard deviation over its {len(entry['seeds'])} seeds is "
        f"{entry['loss'][1]:.4f} nats.\n"
        for entry in summary
        if entry["row"] == "baseline" and entry["loss"][1] is not None
    ]
    if paired_deviation is not None:
        lines.append(
            "As all rows with several seeds show it, a difference between two rows of the same seed has a standard "
            f"deviation of {paired_deviation:.4f}: what is left of the losses without the means of rows and of seeds, "
            "times √2.\n"
        )
    return "\n" + "".join(lines) if lines else ""


def leads_text(leads):
    """Whether a lead lasts."""
    words = [
        f"{entry['ahead_half_way']} with seed {entry['seed']}, {entry['less_at_the_end']} of them less so at the end "
        "or no longer"
        for entry in leads
        if entry["ahead_half_way"]
    ]
    return f"Rows ahead of the baseline half-way, at equal tokens: {'; '.join(words)}.\n" if words else ""


def readme_text(name, results, records, tuning, pictures):
    """results: what results.json holds; tuning: losses and divergences; pictures: {name: what it shows}."""
    summary, contrasts = results["rows"], results["contrasts"]
    text = f"# {name}\n\n{markdown_table(*full_table(summary))}\n\n{about_text(summary, records)} Made by\n\n"
    text += "".join(f"    {command}\n" for command in results["commands"]) + "\n"
    text += COLUMNS_TEXT.format(measured=measured_text(summary))
    if any(entry["worth_flops"] for entry in summary):
        text += WORTH_TEXT
    text += noise_text(summary, results["paired_deviation"]) + leads_text(results["leads"])
    if contrasts:
        text += f"\n## Contrasts\n\n{contrast_table(contrasts)}\n\n"
        named = len(results["named_contrasts"])
        text += f"Paired t-tests, two-sided; Holm's p allows for all {named} that were fixed before the first record. "
        text += BEYOND_TEXT
    if tuning[0]:
        text += f"\n## Learning rates\n\n{rate_table(*tuning)}\n{RATES_TEXT}"
        if edge := rows_at_an_edge(tuning[0]):
            text += f"The best rate lies at an edge, so that a better one may lie beyond it: {', '.join(edge)}.\n"
    if pictures:
        text += "\n## Pictures\n\n" + "".join(f"![{words}]({picture}.png)\n" for picture, words in pictures.items())
    failed = [f"{run}: {words}" for run, words in results["failed"].items()]
    for title, items in {"Left out": results["left_out"], "Failed": failed}.items():
        if items:
            text += f"\n## {title}\n\n" + "".join(f"- {item}\n" for item in items)
    return text
