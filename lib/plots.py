"""
Pictures and tables of runs, for the tools. Every picture is written whole, and the same data gives the same file.
"""

import math
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no window: pictures are files
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from lib.files import open_whole
from model import ResidualMode

matplotlib.rcParams |= {"svg.hashsalt": "reGPT", "svg.fonttype": "none"}  # the same names inside, text as text
WIDTH, DPI = 9.2, 150  # inches and dots: 1380 pixels
INK, GREY = "#222222", "#999999"
MOST_BANDS = 12  # more of them cannot be told apart
TICK = {"marker": "|", "linestyle": "none", "markersize": 8}  # one seed

# --- how a row looks: colour and marker are its mode's, the dashes its variant's --------------------------------------

# Okabe and Ito's colours, which colour-blind people can tell apart: black is the baseline's, yellow too pale for a line
PALETTE = "#0072B2 #E69F00 #009E73 #D55E00 #CC79A7 #56B4E9".split()
FAMILIES = {"methods": "o^<>", "rivals": "sDvP"}  # a family's colours begin again with its next marker
VARIANTS = {  # lengths on and off, those of several variants one behind the other; how the marker is filled
    "stored": ((5, 2), "none"),
    "fast": ((1, 1.5), "bottom"),
    "own": ((3, 1, 1, 1), "left"),
    "checkpointed": ((4, 1), "none"),
    "deeper": ((6, 2), "full"),
    "longer": ((1, 2), "full"),
    "looped": ((4, 1.5, 1, 1.5), "full"),
}
CONTROLS = {"deeper": "X", "longer": "*", "looped": "p"}


def mode_looks():
    """{mode: (colour, marker)}"""
    looks = {"baseline": ("#000000", "o")}
    for family, markers in FAMILIES.items():
        names = [mode.value for mode in ResidualMode if mode.value != "baseline"]
        names = [name for name in names if name.startswith("method") == (family == "methods")]
        for n, name in enumerate(names):
            looks[name] = PALETTE[n % len(PALETTE)], markers[n // len(PALETTE) % len(markers)]
    return looks


LOOKS = mode_looks()


def style(row):
    """Of a row of a comparison: MODE, MODE-VARIANT…, or a control made from the baseline, CONTROL or CONTROL-MODE."""
    first, *variants = row.split("-")
    mode, marker = first, LOOKS.get(first, LOOKS["baseline"])[1]
    if first in CONTROLS:
        mode, marker, variants = (variants or ["baseline"])[0], CONTROLS[first], [first, *variants[1:]]
    looks = [variant_look(variant) for variant in variants]
    return {
        "color": LOOKS.get(mode, LOOKS["baseline"])[0],
        "linestyle": (0, sum((dashes for dashes, _ in looks), ())) if looks else "-",
        "marker": marker,
        "fillstyle": looks[-1][1] if looks else "full",
        "markersize": 5,
    }


def variant_look(variant):
    """That of a number, as of the re-runs, is a long dash and as many dots."""
    number = int("".join(filter(str.isdecimal, variant)) or 0)
    fill = ("bottom", "right", "top", "left", "none")[number % 5]
    return VARIANTS.get(variant, ((7, 1.5) + (1, 1.5) * min(number, 8), fill))


# --- what pictures share ----------------------------------------------------------------------------------------------


def new_axes(x_label, y_label, height=5.0):
    figure, axes = plt.subplots(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    label(axes, x_label, y_label)
    return figure, axes


def label(axes, x_label, y_label):
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.xaxis.set_major_formatter(FuncFormatter(short_number))


def short_number(x, _=None):
    return EngFormatter()(x) if abs(x) >= 1e3 else f"{x:g}"  # 1.5 M


def save(figure, path, svg=False):
    """As PNG and, if asked, as SVG beside it. A link there is replaced, not followed."""
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None}))[: 1 + svg]:
        with open_whole(Path(path).with_suffix(f".{kind}")) as file:
            figure.savefig(file, format=kind, metadata=metadata)
    plt.close(figure)


def markdown_table(header, rows):
    """Rows of text cells as Markdown that is also readable as it is."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


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


def crop(axes, curves, skip):
    """
    Limits that leave the steep beginning out, which is the same for all and would press the rest together: the curves
    enter at the top left. curves: (x, y); skip: the part of a curve that may stay outside.
    """
    low, tops = min(y.min() for _, y in curves), [y[int(skip * len(y))] for _, y in curves]
    high = min(max(tops), low + 4 * (np.median(tops) - low) or np.inf)  # not for the sake of one that failed
    margin = 0.05 * (high - low) or 0.01
    low, high = low - margin, high + margin
    lefts = []
    for x, y in curves:
        i = int(np.argmax(y <= high))  # the first point inside
        part = (y[i - 1] - high) / (y[i - 1] - y[i]) if 0 < i else 1.0
        lefts.append(x[i - 1] + part * (x[i] - x[i - 1]) if 0 < i else x[0])
    left, right = min(lefts), max(x[-1] for x, _ in curves)
    axes.set(xlim=(left if left < right else 0, right), ylim=(low, high))


def name_ends(axes, ends, bold=()):
    """
    The names of points or of curves' ends at the right, in the order of their losses, each with a thin line to its
    own. ends: (name, row, x, loss).
    """
    low, high = axes.get_ylim()
    edge = axes.get_xlim()[1]
    ends = sorted(ends, key=lambda end: end[3])
    gap = 0.21 / (axes.figure.get_figheight() - 0.7)  # a line of text, as a part of the axes
    places = spread([min(1, max(0, (loss - low) / (high - low))) for *_, loss in ends], gap)
    for (name, row, x, loss), place in zip(ends, places, strict=True):
        look = style(row)
        y = min(max(loss, low), high)
        thin = {"linewidth": 0.6, "color": look["color"], "alpha": 0.6}
        if x < edge:
            axes.plot([x, edge], [y, y], linestyle=(0, (1, 3)), zorder=1, **thin)
        arrow = {"arrowstyle": "-", "shrinkA": 0, "shrinkB": 0, **thin}
        axes.annotate("", (edge, y), (1.03, place), textcoords="axes fraction", arrowprops=arrow, annotation_clip=False)
        sample = Line2D([1.03, 1.06, 1.09], [place] * 3, transform=axes.transAxes, clip_on=False, linewidth=1.5, **look)
        sample.set_markevery([1])
        axes.add_line(sample)
        weight = "bold" if name in bold else "normal"
        where = {"transform": axes.transAxes, "va": "center", "fontsize": 9}
        axes.text(1.1, place, f"{name}  {loss:.3f}", color=INK, weight=weight, **where)


def legend_above(figure, handles):
    figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False, fontsize=9)


def seeds_text(groups):
    counts = sorted({len(losses) for losses in groups if len(losses) > 1})
    return f"± standard deviation over {' to '.join(map(str, dict.fromkeys([counts[0], counts[-1]])))} seeds"


def height_for(names):
    return max(5.0, 0.21 * names + 0.9)


def panel_grid(panels, cells, beside=0.0):
    """Axes for squares of so many cells, and inches beside them; what is left over stays empty. Returns a side, too."""
    columns = min(4 if panels > 9 else 3, panels)
    rows = -(-panels // columns)
    side = min(WIDTH / max(columns, 1.5), max(3.0, 1.2 + 0.45 * cells))
    size = side * columns + beside, side * rows + 0.25  # a title
    figure, grid = plt.subplots(rows, columns, figsize=size, dpi=DPI, layout="constrained", squeeze=False)
    for axes in grid.flat[panels:]:
        axes.set_axis_off()
    return figure, grid.ravel()[:panels], side


def write_numbers(axes, square, texts, light, inches):
    """Texts into cells, white where light; returns whether the cells are large enough for that."""
    cell = 72 * inches / len(square)  # points
    size = min(7.0, cell / (0.65 * max(map(len, texts.values()), default=1)))
    for (m, i), text in texts.items() if size >= 4.5 else ():
        colour = "white" if light[m, i] else INK
        axes.text(i, m, text, color=colour, ha="center", va="center", fontsize=size)
    return size >= 4.5


def label_square(axes, title, x_label, y_label):
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x_label, fontsize=8)
    axes.set_ylabel(y_label, fontsize=8)
    axes.tick_params(labelsize=7, length=0)
    axes.spines[:].set_visible(False)


# --- the pictures -----------------------------------------------------------------------------------------------------


def plot_losses(curves, x_label, path, svg=False):
    """
    curves: (name, row, x, losses) with one list of losses per seed. The mean over seeds as a line, of a few curves its
    standard deviation as a band, and names at the right, in the order in which the curves end.
    """
    bands = len(curves) <= MOST_BANDS and any(len(losses) > 1 for *_, losses in curves)
    figure, axes = new_axes(x_label, "validation loss (nats)", height_for(len(curves)))
    means = [np.mean(losses, axis=0) for *_, losses in curves]
    for n, ((_, row, x, losses), mean) in enumerate(zip(curves, means, strict=True)):
        look, every = style(row), max(1, len(x) // 6)
        axes.plot(x, mean, linewidth=1.5, markevery=(n % every, every), **look)
        if bands and len(losses) > 1:
            deviation = np.std(losses, axis=0, ddof=1)
            axes.fill_between(x, mean - deviation, mean + deviation, color=look["color"], alpha=0.12, linewidth=0)
    crop(axes, [(np.asarray(x), mean) for (_, _, x, _), mean in zip(curves, means, strict=True)], skip=0.25)
    name_ends(axes, [(name, row, x[-1], mean[-1]) for (name, row, x, _), mean in zip(curves, means, strict=True)])
    if bands:
        text = f"line: mean, band: {seeds_text([losses for *_, losses in curves])}"
        legend_above(figure, [Patch(color=GREY, alpha=0.3, linewidth=0, label=text)])
    save(figure, path, svg)


def plot_differences(curves, x_label, path, svg=False):
    """
    curves: (name, row, x, differences from the baseline's losses) with one list of them per seed: the mean over seeds,
    without the first quarter, in which differences are large and say little.
    """
    figure, axes = new_axes(x_label, "validation loss minus the baseline's (nats)", height_for(len(curves)))
    axes.axhline(0, color=INK, linewidth=0.8, zorder=1)
    ends = []
    for name, row, x, differences in curves:
        x, mean = (np.asarray(values)[len(x) // 4 :] for values in (x, np.mean(differences, axis=0)))
        axes.plot(x, mean, linewidth=1.2, **style(row))
        ends.append((name, row, x[-1], mean[-1]))
    axes.margins(x=0)
    name_ends(axes, ends)
    save(figure, path, svg)


def plot_frontier(points, x_label, path, lengths=(), svg=False):
    """
    points: (name, row, x, losses) with one loss per seed; x: training FLOPs or time. The frontier joins the points
    that no cheaper one beats; their names are bold. lengths: names of the baseline trained for shorter and longer,
    which a line joins: what lies below it pays.
    """
    figure, axes = new_axes(x_label, "validation loss (nats)", height_for(len(points)))
    points = sorted(((name, row, x, float(np.mean(losses)), losses) for name, row, x, losses in points), key=cheapest)
    best = frontier(points)
    for _, row, x, mean, losses in points:
        look = style(row)
        if len(losses) > 1:
            axes.errorbar(x, mean, np.std(losses, ddof=1), color=look["color"], linewidth=0.8, alpha=0.7)
        axes.plot(x, mean, **look | {"linestyle": "none", "markersize": 7})
    low, high = axes.get_ylim()
    xs = [x for _, _, x, _, _ in points]
    if max(xs) > 4 * min(xs) > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(short_number))
    axes.set_ylim(low, high)
    right = axes.get_xlim()[1]
    steps = [(x, mean) for _, _, x, mean, _ in best] + [(right, best[-1][3])]
    axes.plot(*zip(*steps, strict=True), drawstyle="steps-post", color=GREY, alpha=0.45, linewidth=4, zorder=1)
    axes.set_xlim(right=right)
    name_ends(axes, [point[:4] for point in points], bold={name for name, *_ in best})
    handles = [Line2D([], [], color=GREY, alpha=0.45, linewidth=4, label="frontier: nothing cheaper is better")]
    joined = [(x, mean) for name, _, x, mean, _ in points if name in lengths]
    if len(joined) > 1:
        text = "the baseline, trained shorter and longer: what lies below pays"
        handles += axes.plot(*zip(*joined, strict=True), color=INK, linewidth=1.2, zorder=1.5, label=text)
    if any(len(losses) > 1 for *_, losses in points):
        text = f"bar: {seeds_text([losses for *_, losses in points])}"
        handles.append(
            Line2D([], [], color=GREY, linewidth=0.8, marker="|", linestyle="none", markersize=9, label=text)
        )
    legend_above(figure, handles)
    save(figure, path, svg)


def plot_overview(rows, margin, path, svg=False):
    """
    Two questions, one line per row, the best on top. rows: (row, differences from the baseline's loss, one per seed,
    half of their mean's 95 % interval, worth in FLOPs, worth in time), these as tools/compare/analysis.py makes them;
    None: there is none. margin: up to which a difference is not worth speaking of.
    """
    rows = sorted(rows, key=lambda row: np.mean(row[1]), reverse=True)
    titles = ["Better at equal tokens?", "Does it pay?"][: 1 + any(flops or time for *_, flops, time in rows)]
    size = WIDTH, 0.23 * max(5, len(rows)) + 1.7
    figure, grid = plt.subplots(1, len(titles), figsize=size, dpi=DPI, layout="constrained", sharey=True, squeeze=False)
    handles = overview_differences(grid[0, 0], [row[:3] for row in rows], margin)
    if len(titles) > 1:
        handles |= overview_worths(grid[0, 1], [(row, *worths) for row, _, _, *worths in rows])
    for plain, (axes, title) in enumerate(zip(grid.flat, titles, strict=True)):
        axes.axvline(plain, color=INK, linewidth=0.8, zorder=1)  # the baseline: a difference of 0, worth 1
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#EEEEEE", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_title(title, fontsize=11)
    grid[0, 0].set_yticks(range(len(rows)), [row for row, *_ in rows], fontsize=9)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save(figure, path, svg)


def overview_differences(axes, rows, margin):
    """Returns {text: handle} for the legend."""
    line, handles = {"linewidth": 0.8}, {"one seed": Line2D([], [], color=GREY, **TICK)}
    seen = [-margin, margin, *(difference for _, differences, _ in rows for difference in differences)]
    rim = 0.05 * (max(seen) - min(seen))
    left, right = min(seen) - rim, max(seen) + rim
    for y, (row, differences, half) in enumerate(rows):
        look, mean = style(row) | {"linestyle": "none", "markersize": 7}, np.mean(differences)
        axes.plot(differences, [y] * len(differences), color=look["color"], **TICK)
        axes.plot(mean, y, **look)
        if half is not None:
            axes.plot([mean - half, mean + half], [y, y], color=look["color"], **line)
            handles["95 % interval of the mean"] = Line2D([], [], color=GREY, **line)
            for marker, x, is_cut in (("<", left, mean - half < left), (">", right, mean + half > right)):
                if is_cut:
                    mark = {"marker": marker, "markersize": 5, "linestyle": "none"}
                    axes.plot(x, y, color=look["color"], clip_on=False, **mark)
                    handles["goes on beyond the picture"] = Line2D([], [], color=GREY, **mark)
    band = axes.axvspan(-margin, margin, color="#E4E4E4", linewidth=0, zorder=0)
    handles[f"up to {margin} nats: too little to speak of"] = band
    axes.set(xlim=(left, right), xlabel="loss minus the baseline's (nats); left is better")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    return handles


def overview_worths(axes, rows):
    """Returns {text: handle} for the legend."""
    handles, shapes = {}, {None: ("o", ""), "above": (">", ", or more"), "below": ("<", ", or less")}
    shown = [worth for _, *worths in rows for worth in worths if worth and worth["bound"] in shapes]
    seen = [1.0, *(value for worth in shown for value in worth["each"])]
    axes.set(xscale="log", xlim=(0.85 * min(seen), 1.18 * max(seen)))
    for y, (row, *worths) in enumerate(rows):
        for worth, what, fill in zip(worths, ("FLOPs", "time"), ("full", "none"), strict=True):
            if worth and worth["bound"] in shapes:
                shape, beyond = shapes[worth["bound"]]
                look = {"marker": shape, "fillstyle": fill, "markersize": 6, "linestyle": "none"}
                axes.plot(worth["mean"], y, color=style(row)["color"], **look)
                handles[f"in {what}{beyond}"] = Line2D([], [], color=GREY, **look)
                if what == "FLOPs":
                    axes.plot(worth["each"], [y] * worth["seeds"], color=style(row)["color"], **TICK)
                if what == "FLOPs" and worth["low"] is not None:
                    axes.plot([worth["low"], worth["high"]], [y, y], color=style(row)["color"], linewidth=0.8)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(short_number))
    axes.set_xlabel("baseline's cost ÷ the row's; right of 1 it pays")
    return handles


def cheapest(point):
    _, _, x, mean, _ = point
    return x, mean


def frontier(points):
    """Of points (name, row, x, loss, …), the cheapest first, those whose loss no cheaper one reaches."""
    return [point for n, point in enumerate(points) if all(point[3] < other[3] for other in points[:n])]


def plot_run(run, path, svg=False):
    """run: name, row, loss, best_loss, its curve and training, lists by name."""
    figure, axes = new_axes("tokens", "loss (nats)")
    tokens, losses = np.array(run["training"]["tokens"]), np.array(run["training"]["loss"])
    window = max(1, len(losses) // 50)
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    tokens_smooth = tokens[window - 1 :]
    evaluated = np.array(run["curve"]["tokens"]), np.array(run["curve"]["loss"])
    text = "training" if window == 1 else f"training, mean of {window} lines"
    axes.plot(tokens, losses, linewidth=0.5, color="#BBBBBB")
    axes.plot(tokens_smooth, smooth, linewidth=1.2, color="#777777", label=text)
    axes.plot(*evaluated, label="validation", **style(run["row"]))
    crop(axes, [(tokens_smooth, smooth), evaluated], skip=0.05)
    axes.set_title(f"{run['name']}: validation loss {run['loss']:.4f}, best {run['best_loss']:.4f}", loc="left")
    axes.legend(frameon=False)
    save(figure, path, svg)


def plot_reruns(row, points, path, svg=False):
    """points: (re-runs per layer, forward FLOPs per token, loss) of one trained model."""
    figure, axes = new_axes("forward FLOPs per token", "validation loss (nats)")
    points = sorted(points)
    _, flops, losses = zip(*points, strict=True)
    axes.plot(flops, losses, **style(row))
    for reruns, x, y in points:
        axes.annotate(f"{reruns}", (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=9, color=INK)
    axes.margins(y=0.12)
    axes.set_title(f"{row}: the loss if only the nearest 0, 1, … earlier layers are run again", loc="left")
    save(figure, path, svg)


def plot_growth(panels, x_label, path, svg=False):
    """panels: (y label, {row: (x, y)}), side by side; the legend is outside, below."""
    figure, grid = plt.subplots(1, len(panels), figsize=(WIDTH, 4.4), dpi=DPI, layout="constrained", squeeze=False)
    for axes, (y_label, lines) in zip(grid.flat, panels, strict=True):
        label(axes, x_label, y_label)
        for row, (x, y) in lines.items():
            axes.plot(x, y, label=row, **style(row))
        axes.set(xticks=sorted({value for x, _ in lines.values() for value in x}), ylim=(0, None))
    handles = {
        text: handle for axes in grid.flat for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save(figure, path, svg)


def plot_weights(panels, path, svg=False):
    """panels: (title, square of normalised weights); in per cent, all in one colour scale."""
    figure, grid, side = panel_grid(len(panels), max(len(square) for _, square in panels))
    top = max(np.nanmax(square, initial=0.5) for _, square in panels)
    for axes, (title, square) in zip(grid, panels, strict=True):
        axes.imshow(square, cmap="cividis", vmin=0, vmax=top)
        texts = {at: f"{100 * weight:.0f}" for at, weight in np.ndenumerate(square) if not np.isnan(weight)}
        write_numbers(axes, square, texts, square < 0.5 * top, side - 0.6)
        axes.set(xticks=range(len(square)), yticks=range(1, len(square)))
        axes.set_ylim(len(square) - 0.5, 0.5)  # layer 0 has no weights
        label_square(axes, title, "output of layer", "in layer")
    save(figure, path, svg)


def plot_depth_mixing(panels, path, svg=False):
    """
    panels: (title, {"rows": who reads, "columns": what is read, "matrix": the factors}). The plain residual is 1
    everywhere below the diagonal, and colourless; twice as much is as far from it as half as much. What is below 0 is
    beyond the scale and has a minus.
    """
    squares = [(title, mixing, readable(mixing["matrix"])) for title, mixing in panels]
    figure, grid, side = panel_grid(len(panels), max(len(square) for *_, square in squares), beside=0.9)
    doublings = [np.log2(np.maximum(square, 2.0**-9)) for *_, square in squares]  # 0 and below: as far as it goes
    largest = max(np.nanmax(np.abs(square)) for square in doublings)
    top = min(max(largest, 0.15), 3.0)  # neither rounding nor a single outlier decides about the colours
    alike, columns = len({str(mixing["rows"]) for _, mixing, _ in squares}) == 1, grid[0].get_gridspec().ncols
    for panel, (axes, (title, mixing, square), colours) in enumerate(zip(grid, squares, doublings, strict=True)):
        n = len(square)
        image = axes.imshow(np.where(np.isnan(square), np.nan, colours), cmap="RdBu_r", vmin=-top, vmax=top)
        edges = np.repeat(np.arange(n + 1) - 0.5, 2)  # the outline of the stairs, for what has no colour
        axes.fill([*edges[1:], -0.5], [*edges[:-1], n - 0.5], fill=False, edgecolor=GREY, linewidth=0.6)
        texts = {at: three_digits(f) for at, f in np.ndenumerate(square) if not np.isnan(f)}
        light, room = np.abs(colours) > 0.65 * top, side - 1.1
        if not write_numbers(axes, square, texts, light, room):
            write_numbers(axes, square, {at: "–" for at, f in np.ndenumerate(square) if f < 0}, light, room)
        shown = range(0, n, math.ceil(n / (8 * (side - 1.1))))  # names that fit: eight per inch
        axes.set_xticks(shown, [mixing["columns"][i] for i in shown], rotation=90)
        axes.set_yticks(shown, [mixing["rows"][m] for m in shown])
        label_square(axes, title, "what is read", "who reads")
        if alike:  # once, at the left and below
            axes.tick_params(labelleft=panel % columns == 0, labelbottom=panel + columns >= len(grid))
            axes.xaxis.label.set_visible(panel + columns >= len(grid))
            axes.yaxis.label.set_visible(panel % columns == 0)
    extend = "both" if largest > top else "neither"
    text = "factor; the plain residual is 1" + "; – is below 0" * any((square < 0).any() for *_, square in squares)
    bar = figure.colorbar(image, ax=grid, extend=extend, shrink=0.6 if len(grid) < 4 else 0.3, label=text)
    ticks = [n for n in (-3, -2, -1, -0.5, -0.25, -0.1, 0, 0.1, 0.25, 0.5, 1, 2, 3) if abs(n) <= top]
    ticks = [n for n in ticks if n == 0 or abs(n) > top / 4]
    bar.set_ticks(ticks, labels=[f"{2.0**n:.3g}" for n in ticks])
    save(figure, path, svg)


def three_digits(factor):
    """At most four characters: 0.58, -0.5, 12.3."""
    return f"{factor:.2f}" if 0 <= factor < 9.995 else f"{factor:.1f}".replace("-0.0", "0.0")


def readable(matrix):
    """A reader has before it e and what the sub-layers before it wrote: nan elsewhere."""
    square = np.array(matrix, dtype=float)
    square[np.triu_indices(len(square), 1)] = np.nan
    return square


# --- learned weights under a softmax, as squares for plot_weights -----------------------------------------------------

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


def weight_square(raw):
    """Row m, column i is layer m's weight of layer i's output, nan where there is none. raw: per layer, or None."""
    square = np.full((len(raw), len(raw)), np.nan)
    for m, row in enumerate(raw):
        if row is not None:
            square[m, : m + 1] = np.exp(row - np.max(row)) / np.exp(row - np.max(row)).sum()
    return square


def notes_weights():
    """The same of the notes' run; it belongs beside a repetition of it, nowhere else."""
    return weight_square([None, *NOTES_RAW])
