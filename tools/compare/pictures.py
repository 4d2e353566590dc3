"""Pictures of the records, each as PNG and, for a paper, as SVG."""

import numpy as np

from lib.plots import (
    notes_weights,
    plot_depth_mixing,
    plot_differences,
    plot_frontier,
    plot_losses,
    plot_overview,
    plot_weights,
    weight_square,
)
from tools.compare.analysis import MARGIN, by_row, differences, same_tokens, seconds_by_speed, training_flops
from tools.compare.rows import length_of_baseline, parse

PICTURES = {
    "overview": "difference from the baseline at equal tokens, and whether it pays",
    "loss_tokens": "validation loss against tokens",
    "difference_tokens": "difference from the baseline's validation loss of the same seed, against tokens",
    "loss_flops": "validation loss against training FLOPs",
    "loss_time": "validation loss against time",
    "frontier_flops": "last validation loss against training FLOPs",
    "frontier_time": "last validation loss against time",
    "weights": "learned weights in per cent",
    "depth_mixing": "depth mixing: the factor of each output in what is read (of mudd's inputs in r), mean over seeds",
}


def plot_all(records, summary, speeds, folder):
    """summary: of these records, as analysis.py makes it."""
    groups, seconds = by_row(records), seconds_by_speed(speeds)

    def curves(name, key, label, rows=tuple(groups), per_unit=lambda record: 1.0):
        lines = []
        for row in rows:
            x = np.mean([record["curve"][key] for record in groups[row]], axis=0) / per_unit(groups[row][0])
            lines.append((row, row, x, [record["curve"]["loss"] for record in groups[row]]))
        plot_losses(lines, label, folder / f"{name}.png", svg=True)

    def frontier(name, label, cost):
        points = [(row, row, cost(group[0]), [record["loss"] for record in group]) for row, group in groups.items()]
        lengths = [row for row in groups if length_of_baseline(row) is not None]
        plot_frontier(points, label, folder / f"{name}.png", lengths, svg=True)

    same = same_tokens(groups) or list(groups)
    overview(groups, summary, same, folder / "overview.png")
    curves("loss_tokens", "tokens", "tokens", same)
    difference_curves(groups, same, folder / "difference_tokens.png")
    curves("loss_flops", "flops", "training FLOPs")
    frontier("frontier_flops", "training FLOPs", training_flops)
    if all(seconds(group[0]) for group in groups.values()):
        label = "minutes of training at the measured speed"
        curves("loss_time", "tokens", label, per_unit=lambda r: 60 * r["curve"]["tokens"][-1] / seconds(r))
        frontier("frontier_time", label, lambda record: seconds(record) / 60)
    else:  # a busy machine's clock says little
        curves("loss_time", "seconds", "minutes of training, as it ran", per_unit=lambda record: 60)
    for name, panels_of, plot in (
        ("weights", weight_panels, plot_weights),
        ("depth_mixing", mixing_panels, plot_depth_mixing),
    ):
        panels = [panel for row, group in groups.items() for panel in panels_of(row, group)]
        if panels:
            plot(panels, folder / f"{name}.png", svg=True)


def overview(groups, summary, same, path):
    """Of the rows trained on as many tokens as the baseline, with the baseline's loss of the same seed."""
    baselines = groups.get("baseline", [])
    rows = [
        (
            entry["row"],
            differences(groups[entry["row"]], baselines),
            entry["difference"]["half"],
            entry["worth_flops"],
            entry["worth_time"],
        )
        for entry in summary
        if entry["row"] in same and entry["difference"]
    ]
    if rows:
        plot_overview(rows, MARGIN, path, svg=True)


def difference_curves(groups, same, path):
    """Of the same rows: who is ahead at which time."""
    baselines = {record["seed"]: record["curve"] for record in groups.get("baseline", [])}
    lines = []
    for row in same:
        curves = [(record["curve"], baselines[record["seed"]]) for record in groups[row] if record["seed"] in baselines]
        if row != "baseline" and curves:
            pairs = [np.subtract(curve["loss"], base["loss"]) for curve, base in curves]
            lines.append((row, row, curves[0][0]["tokens"], pairs))
    if lines:
        plot_differences(lines, "tokens", path, svg=True)


def weight_panels(row, group):
    """The mean over seeds of the weights under a softmax; beside a repetition of the notes' run those of the notes."""
    squares = [
        weight_square([layer["weights"] and layer["weights"]["raw"] for layer in record["weights"]])
        for record in group
        if isinstance(record.get("weights"), list)
    ]
    if not squares:
        return []
    panels = [(f"{row}, %, mean of {len(squares)}" if len(squares) > 1 else f"{row}, %", np.mean(squares, axis=0))]
    model = [group[0]["settings"].get(key) for key in ("residual_mode", "recompute", "n_layer", "n_embd")]
    if model == ["method3_2", False, 12, 768] and "wikitext" in group[0]["data"]["source"].lower():
        panels.append(("the notes' run, %", notes_weights()))
    return panels


def mixing_panels(row, group):
    """
    The mean over seeds; the baseline's and its controls' would say nothing. Behind the norm that follows, the sign of
    all that is read means nothing, but of two seeds it would cancel: each row gets the one that makes its sum positive.
    """
    mixings = [record["depth_mixing"] for record in group if record["depth_mixing"]]
    if not mixings or parse(row).control or parse(row).mode == "baseline":
        return []
    matrices = np.array([mixing["matrix"] for mixing in mixings])  # (seeds, who reads, what is read)
    matrices *= np.where(matrices.sum(2, keepdims=True) < 0, -1, 1)
    return [(row, mixings[0] | {"matrix": matrices.mean(0)})]
