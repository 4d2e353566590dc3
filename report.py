"""
Look at runs without training:

    python report.py out/baseline out/method3_2

Prints their metrics and learned residual weights. Draws loss.png and residual_weights.png into each run's folder and,
for several runs, their validation losses together into the loss.png beside the first folder.
"""

import itertools
import json
import statistics
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no window: pictures are files
import matplotlib.pyplot as plt
from matplotlib.ticker import EngFormatter

from configurator import UserError, run_main
from model import ResidualMode
from train import load_checkpoint, residual_report, residual_text

# Okabe and Ito's colours, which colour-blind people can tell apart; the variants of a mode differ in their line
PALETTE = "#000000 #E69F00 #56B4E9 #009E73 #D55E00 #CC79A7 #0072B2 #F0E442 #999999".split()
COLOURS = dict(zip((mode.value for mode in ResidualMode), itertools.cycle(PALETTE), strict=False))
LINES = {"stored": "--", "fast": ":", "deeper": "--", "longer": ":", "checkpointed": "--"}
WIDTH, DPI = 9.2, 150  # inches and dots: 1380 pixels

# The raw weights of the 12-layer run that the notes print (learned, MLP site, not recomputed), layers 1 … 11
NOTES_RAW = [
    [0.1312, 0.9348],
    [0.3155, -0.6749, 1.1378],
    [0.3959, -1.0397, -0.1342, 1.4355],
    [0.6144, -0.9162, -0.8417, -0.1607, 1.6909],
    [0.5879, -0.9201, -1.2028, -0.8660, 0.1035, 1.8702],
    [0.6991, -0.8572, -1.3438, -1.1117, -0.6539, 0.0505, 1.8939],
    [0.6566, -0.7998, -1.4233, -1.0987, -0.7574, -0.3214, 0.5069, 1.9425],
    [0.3151, -0.9054, -1.4949, -1.0271, -0.8735, -0.5997, -0.2985, 0.7359, 2.0286],
    [-0.0841, -0.9551, -1.4212, -0.9177, -0.7908, -0.6987, -0.6402, 0.2105, 0.7319, 1.9868],
    [-1.3428, -1.5203, -1.7202, -1.1224, -1.0118, -0.9218, -0.8545, -0.1256, 0.2906, 0.9937, 2.0450],
    [-1.3070, -1.2758, -1.3992, -0.9561, -0.8325, -0.7357, -0.6888, -0.2466, -0.0706, 0.1912, 0.5906, 1.7205],
]


# --- what a run's folder holds ----------------------------------------------------------------------------------------


def read_metrics(folder):
    path = Path(folder) / "metrics.jsonl"
    try:
        *whole, _ = path.read_text().split("\n")  # behind the last is nothing, or a line being written
        lines = [json.loads(line) for line in whole]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not all(isinstance(line, dict) and "step" in line for line in lines):
        raise UserError(f"{path} is damaged: it has a line without a step")
    return lines


def read_run(folder):
    """The latest checkpoint's numbers, and the curves up to it."""
    folder = Path(folder)
    if not (folder / "ckpt.pt").exists():
        raise UserError(f"{folder} holds no run: there is no ckpt.pt in it")
    checkpoint = load_checkpoint(folder / "ckpt.pt")
    model, config = checkpoint["model"], checkpoint["model"].config
    lines = [line for line in read_metrics(folder) if line["step"] <= checkpoint["step"]]
    steps, evals = ([line for line in lines if key in line] for key in ("loss", "eval_loss"))
    if not (evals and steps):
        raise UserError(f"the run in {folder} has not been logged and evaluated yet: let it go on")
    flops = model.flops_per_token(config.block_size)
    return {
        "row": config.residual_mode + "-stored" * (config.mode.site is not None and not config.recompute),
        "settings": checkpoint["settings"].as_dict(),
        "data": checkpoint["data"],
        "code": checkpoint["code"],
        "parameters": model.num_params(),
        "flops_per_token": flops,
        "loss": evals[-1]["eval_loss"],
        "best_loss": min(line["eval_loss"] for line in evals),
        "perplexity": evals[-1]["eval_perplexity"],
        "accuracy": evals[-1]["eval_accuracy"],
        "curve": {
            "tokens": [line["tokens"] for line in evals],
            "flops": [3 * flops * line["tokens"] for line in evals],  # forward and backward
            "seconds": [line["seconds"] for line in evals],
            "loss": [line["eval_loss"] for line in evals],
        },
        "weights": residual_report(model) if config.mode.weights == "learned" else None,
        "training": {key: [line[key] for line in steps] for key in ("tokens", "loss", "tokens_per_sec", "memory")},
    }


def normalized(report):
    """What residual_report says, as a square: row m, column i is w_i of layer m, nan where there is none."""
    square = np.full((len(report), len(report)), np.nan)
    for entry in report:
        if entry["weights"]:
            square[entry["layer"], : entry["layer"] + 1] = entry["weights"]["normalized"]
    return square


def notes_weights():
    """The same of the notes' run."""
    square = np.full((12, 12), np.nan)
    for m, raw in enumerate(NOTES_RAW, start=1):
        square[m, : m + 1] = np.exp(raw) / np.exp(raw).sum()
    return square


def markdown_table(header, rows):
    """Rows of text cells as Markdown that is also readable as it is."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


# --- pictures ---------------------------------------------------------------------------------------------------------


def style(row):
    """Of a row of compare.py: MODE, MODE-VARIANT, or a control made from the baseline."""
    mode, _, variant = row.partition("-")
    return {"color": COLOURS.get(mode, COLOURS["baseline"]), "linestyle": LINES.get(variant or mode, "-")}


def new_axes(x_label, y_label):
    figure, axes = plt.subplots(figsize=(WIDTH, 5), dpi=DPI, layout="constrained")
    label(axes, x_label, y_label)
    return figure, axes


def label(axes, x_label, y_label):
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)


def save(figure, path):
    figure.savefig(path, metadata={"Software": None})  # the same data, the same file
    plt.close(figure)


def draw_losses(curves, x_label, path):
    """
    curves: (name, row, x, losses) with one list of losses a seed. The mean over seeds as a line, its standard
    deviation as a band, and names at the right, in the order in which the curves end.
    """
    figure, axes = new_axes(x_label, "validation loss")
    means = [np.mean(losses, axis=0) for _, _, _, losses in curves]
    for (_, row, x, losses), mean in zip(curves, means, strict=True):
        marker = "." if len(x) < 20 else None
        axes.plot(x, mean, linewidth=1.5, marker=marker, **style(row))
        if len(losses) > 1:
            deviation = np.std(losses, axis=0, ddof=1)
            axes.fill_between(x, mean - deviation, mean + deviation, color=style(row)["color"], alpha=0.12, linewidth=0)
    # the steep beginning, the same for all, would press the rest together
    low, high = min(mean.min() for mean in means), max(mean[len(mean) // 4] for mean in means)
    margin = 0.05 * (high - low) or 0.01
    low, high = low - margin, high + margin
    axes.set_ylim(low, high)
    x_end = max(max(x) for _, _, x, _ in curves)
    axes.set_xlim(0, x_end)
    if x_end >= 1e4:
        axes.xaxis.set_major_formatter(EngFormatter())  # 1.5 M

    ends = sorted(range(len(curves)), key=lambda n: means[n][-1])
    places = spread([(means[n][-1] - low) / (high - low) for n in ends], gap=0.048)
    for n, place in zip(ends, places, strict=True):
        name, row, x, _ = curves[n]
        y = min(means[n][-1], high)
        look = style(row)
        if x[-1] < x_end:  # this curve ends earlier: lead the eye to its name
            axes.plot([x[-1], x_end], [y, y], linewidth=0.6, alpha=0.5, color=look["color"], linestyle=(0, (1, 3)))
            axes.plot(x[-1], y, ".", color=look["color"])
        tick = {"arrowstyle": "-", "linewidth": 0.6, "color": look["color"], "alpha": 0.7, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (x_end, y), (1.03, place), textcoords="axes fraction", arrowprops=tick, annotation_clip=False)
        axes.plot([1.03, 1.07], [place] * 2, transform=axes.transAxes, clip_on=False, linewidth=1.5, **look)
        text = f"{name}  {means[n][-1]:.3f}"
        axes.text(1.08, place, text, transform=axes.transAxes, color=look["color"], fontsize=9, va="center")
    save(figure, path)


def spread(places, gap):
    """Ascending places in 0 … 1, moved apart to at least `gap`, as little as it takes."""
    groups = []  # [sum of the wishes for the group's first place, members]: members stand gap apart
    for place in places:
        groups.append([place, 1])
        while len(groups) > 1:
            (first, n), (wish, k) = groups[-2:]
            if wish / k - first / n >= gap * n:
                break
            groups[-2:] = [[first + wish - k * n * gap, n + k]]
    places = [total / n + gap * i for total, n in groups for i in range(n)]
    for i, place in enumerate(places):  # what stood below 0 pushes the others up
        places[i] = max(place, places[i - 1] + gap if i else 0.0)
    for i in reversed(range(len(places))):  # and what then stands above 1 pushes them down
        places[i] = min(places[i], places[i + 1] - gap if i + 1 < len(places) else 1.0)
    return places


def draw_run(run, path):
    """One run's training and validation loss."""
    figure, axes = new_axes("tokens", "loss (nats)")
    tokens, losses = np.array(run["training"]["tokens"]), np.array(run["training"]["loss"])
    window = max(1, len(losses) // 50)
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    axes.plot(tokens, losses, linewidth=0.5, color="#BBBBBB")
    axes.plot(tokens[window - 1 :], smooth, linewidth=1.2, color="#777777", label="training, smoothed")
    axes.plot(run["curve"]["tokens"], run["curve"]["loss"], marker=".", label="validation", **style(run["row"]))
    axes.set_title(f"{run['name']}: validation loss {run['loss']:.4f}, best {run['best_loss']:.4f}", loc="left")
    axes.legend(frameon=False)
    save(figure, path)


def draw_growth(panels, x_label, path):
    """panels: (y label, {row: (x, y)}), side by side."""
    figure, grid = plt.subplots(1, len(panels), figsize=(WIDTH, 4), dpi=DPI, layout="constrained")
    for axes, (y_label, lines) in zip(grid, panels, strict=True):
        label(axes, x_label, y_label)
        for row, (x, y) in lines.items():
            axes.plot(x, y, marker=".", label=row, **style(row))
        axes.set(xticks=x, ylim=(0, None))
    grid[0].legend(frameon=False)
    save(figure, path)


def draw_weights(panels, path):
    """panels: (title, square of normalised weights); in per cent, all in one colour scale."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    side = WIDTH / max(columns, 2)
    figure, grid = plt.subplots(
        rows, columns, figsize=(side * columns, side * rows), dpi=DPI, layout="constrained", squeeze=False
    )
    top = max(np.nanmax(square, initial=0.5) for _, square in panels)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, square) in zip(grid.flat, panels, strict=False):
        axes.imshow(square, cmap="cividis", vmin=0, vmax=top)
        for (m, i), weight in np.ndenumerate(square):
            if not np.isnan(weight):
                colour = "white" if weight < 0.5 * top else "black"
                axes.text(i, m, f"{100 * weight:.0f}", ha="center", va="center", color=colour, fontsize=7)
        axes.set_title(title, fontsize=9)
        axes.set(xticks=range(len(square)), yticks=range(1, len(square)))
        axes.set_ylim(len(square) - 0.5, 0.5)  # layer 0 has no weights
        axes.set_xlabel("output of layer", fontsize=8)
        axes.set_ylabel("in layer", fontsize=8)
        axes.tick_params(labelsize=7, length=0)
        axes.spines[:].set_visible(False)
    save(figure, path)


def main():
    folders = [Path(argument) for argument in sys.argv[1:]]
    if not folders or any(argument.startswith("-") for argument in sys.argv[1:]):
        raise UserError("name the folders of one or more runs: python report.py out/A out/B")
    runs = [read_run(folder) | {"name": folder.resolve().name} for folder in folders]
    header = "run,mode,parameters,tokens,loss,best,perplexity,accuracy,tokens/s,memory".split(",")
    rows = [
        [
            run["name"],
            run["row"],
            f"{run['parameters']:,}",
            f"{run['curve']['tokens'][-1]:,}",
            f"{run['loss']:.4f}",
            f"{run['best_loss']:.4f}",
            f"{run['perplexity']:.4f}",
            f"{run['accuracy']:.4f}",
            f"{statistics.median(run['training']['tokens_per_sec']):,.0f}",
            f"{max(run['training']['memory']) / 2**20:,.0f} MB",
        ]
        for run in runs
    ]
    print(markdown_table(header, rows))
    pictures = []
    for folder, run in zip(folders, runs, strict=True):
        pictures.append(folder / "loss.png")
        draw_run(run, pictures[-1])
        if run["weights"]:
            print(f"\n{run['name']}: learned residual weights\n{residual_text(run['weights'])}", end="")
            pictures.append(folder / "residual_weights.png")
            draw_weights([(f"{run['name']}: weights, %", normalized(run["weights"]))], pictures[-1])
    if len(runs) > 1:
        pictures.append(folders[0].resolve().parent / "loss.png")
        curves = [(run["name"], run["row"], run["curve"]["tokens"], [run["curve"]["loss"]]) for run in runs]
        draw_losses(curves, "tokens", pictures[-1])
    print("\npictures:", *pictures)


if __name__ == "__main__":
    run_main(main)
