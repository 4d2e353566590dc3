"""tools/report from outside, and the arithmetic of its pictures."""

import json
import re
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
import torch
from helpers import command, dataset, good, tiny

from data.dataset import Windows, load_meta, load_tokens
from data.prepare import write_dataset
from data.tokenizer import load_tokenizer
from lib import plots
from lib.checkpoint import load_checkpoint
from lib.errors import UserError
from model import GPT, ResidualMode
from tools import report
from tools.compare.rows import DEFAULT_ROWS

MODES = ("baseline", "method3_2", "hc")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs on one dataset and one on another, and that other dataset."""
    out = tmp_path_factory.mktemp("runs")
    for mode in MODES:
        good("train.py", *tiny(out / mode, residual_mode=mode))
    other = out / "other_data"
    texts = ["another text, 1 2 3\n" * 20] * 3
    write_dataset(other, {"train": texts, "val": texts[:1]}, load_tokenizer("bytes", None), source="a test")
    good("train.py", *tiny(out / "other", dataset=other))
    return SimpleNamespace(out=out, other_data=other)


@pytest.fixture
def main(monkeypatch, capsys):
    """main() with these arguments in this process; returns what it prints."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["report", *map(str, args)])
        report.main()
        return capsys.readouterr().out

    return call


@pytest.fixture
def figures(monkeypatch):
    """The pictures that are made, instead of their files."""
    kept = []
    monkeypatch.setattr(plots, "save", lambda figure, path, svg=False: kept.append(figure))
    yield kept
    plots.plt.close("all")


def call(*args):
    """(exit status, stdout, stderr) of the real command."""
    process = command("-m", "tools.report", *args)
    stdout, stderr = process.communicate(timeout=120)
    return process.returncode, stdout, stderr


def check_picture(path):
    """A PNG in which something is to be seen."""
    picture = matplotlib.image.imread(path)
    assert picture.shape[0] > 300 and picture.shape[1] > 400 and picture[..., :3].std() > 0.05


# --- the table and what was learned -----------------------------------------------------------------------------------


def test_finished_runs(runs):
    folders = [runs.out / mode for mode in MODES]
    status, printed, stderr = call(*folders)
    assert (status, stderr) == (0, "")
    for folder in folders:
        results = json.loads((folder / "eval_results.json").read_text())
        (row,) = (line for line in printed.splitlines() if line.startswith(f"| {folder.name} "))
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        assert cells[:5] == [folder.name, folder.name, "dataset (bytes)", cells[3], "384"]
        for key in ("eval_loss", "eval_bits_per_byte", "eval_perplexity", "eval_accuracy"):
            assert f"{results[key]:.4f}" in cells
        check_picture(folder / "loss.png")
        check_picture(folder / "depth_mixing.png")
        learned = folder / "residual_weights.txt"
        assert learned.exists() == (folder.name != "baseline")
        if learned.exists():
            assert f"\n{folder.name}: what the residual has learned\n{learned.read_text()}" in printed
    # weights under a softmax have a picture; of other tensors small ones are printed, of large ones the norm
    assert [(folder / "residual_weights.png").exists() for folder in folders] == [False, True, False]
    tensors = load_checkpoint(runs.out / "hc/ckpt.safetensors").model.residual_tensors()
    assert f"h.1.residual_dynamic norm {tensors['h.1.residual_dynamic'].norm():.4f}\n" in printed
    first = ", ".join(f"{number:.4f}" for number in tensors["h.1.residual_scale"][0].tolist())
    assert f"h.1.residual_scale [[{first}], [" in printed
    check_picture(runs.out / "loss.png")
    check_picture(runs.out / "depth_mixing.png")


def test_bits_per_byte_are_those_of_the_validation_text(runs, main, figures):
    printed = main(runs.out / "other")
    loss = json.loads((runs.out / "other/eval_results.json").read_text())["eval_loss"]
    meta = load_meta(runs.other_data)
    bits = loss * (meta.val_tokens - 1) / meta.val_bytes / np.log(2)
    assert f" {bits:.4f} " in printed and " other_data (bytes) " in printed


def test_only_comparable_runs_are_plotted_together(runs, main, figures, monkeypatch):
    plotted = []
    monkeypatch.setattr(report, "plot_losses", lambda curves, *_: plotted.append([name for name, *_ in curves]))
    printed = main(*(runs.out / name for name in ("baseline", "other", "hc")))
    assert plotted == [["baseline", "hc"]]
    assert re.search(r"not plotted together, since data or tokenizer differ .*: baseline, hc; other\n", printed)
    assert "not plotted together" not in main(runs.out / "baseline", runs.out / "hc")
    plotted.clear()
    printed = main(runs.out / "baseline", runs.out / "other")
    assert plotted == [] and "baseline; other\n" in printed


def test_the_whole_evaluation_is_shown_where_those_on_the_way_are_capped(tmp_path, main, figures):
    good("train.py", *tiny(tmp_path / "run", eval_tokens=16))
    results = json.loads((tmp_path / "run/eval_results.json").read_text())
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert results["eval_samples"] > last["eval_samples"]
    printed = main(tmp_path / "run")
    assert f"| {results['eval_loss']:.4f} | –    |" in printed  # the best on the way is that of a part


# --- what is wrong with a folder --------------------------------------------------------------------------------------


def test_a_folder_without_a_run(tmp_path, main):
    with pytest.raises(UserError, match=rf"there is no ckpt\.safetensors of a run in {tmp_path}: "):
        main(tmp_path)
    (tmp_path / "ckpt.pt").touch()
    with pytest.raises(UserError, match="it is of an older version"):
        main(tmp_path)


def test_no_folder(main):
    with pytest.raises(UserError, match="name the folders of one or more runs"):
        main()


def test_a_run_that_is_being_written(runs, tmp_path, main, figures):
    run = shutil.copytree(runs.out / "baseline", tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 6')
    assert "| run " in main(run)


@pytest.mark.parametrize("line", ["{", "[]", '{"loss": 1}', '{"step": 1, "loss": 2}', '{"step": 1e999}', "\0", "\xff"])
def test_a_damaged_line(runs, tmp_path, main, line):
    run = shutil.copytree(runs.out / "baseline", tmp_path / "run")
    (run / "metrics.jsonl").write_bytes(line.encode("latin-1") + b"\n" + (run / "metrics.jsonl").read_bytes())
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        main(run)


@pytest.mark.parametrize("mixing", ["{", "{}", '{"rows": ["a"], "columns": ["e"], "matrix": [[1, 2]]}'])
def test_a_damaged_depth_mixing(runs, tmp_path, main, mixing):
    run = shutil.copytree(runs.out / "baseline", tmp_path / "run")
    (run / "depth_mixing.json").write_text(mixing)
    with pytest.raises(UserError, match=r"depth_mixing\.json is damaged"):
        main(run)


def test_a_damaged_line_through_the_real_command(runs, tmp_path):
    run = shutil.copytree(runs.out / "baseline", tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write("torn\n")
    lines = len((run / "metrics.jsonl").read_text().splitlines())
    status, stdout, stderr = call(run)
    assert (status, stdout) == (2, "")
    assert re.fullmatch(rf"error: .*metrics.jsonl, line {lines}, is not a metrics line.*\n", stderr)


def test_a_picture_replaces_a_link_and_no_folder(runs, tmp_path, main):
    run = shutil.copytree(runs.out / "baseline", tmp_path / "run")
    (tmp_path / "precious").write_text("mine")
    (run / "loss.png").unlink(missing_ok=True)
    (run / "loss.png").symlink_to(tmp_path / "precious")
    main(run)
    assert (tmp_path / "precious").read_text() == "mine" and not (run / "loss.png").is_symlink()
    check_picture(run / "loss.png")
    (run / "loss.png").unlink()
    (run / "loss.png").mkdir()
    with pytest.raises(OSError, match=r"loss\.png"):  # which run_main makes one line
        main(run)


# --- fewer re-runs ----------------------------------------------------------------------------------------------------


def test_a_trained_model_with_fewer_reruns(runs, main):
    run = runs.out / "method3_2"
    printed = main(run, "--reruns=all", "--device=cpu")
    points = json.loads((run / "reruns.json").read_text())["points"]
    assert [point["reruns"] for point in points] == [2, 1, 0]
    checkpoint = load_checkpoint(run / "ckpt.safetensors")
    trained = json.loads((run / "eval_results.json").read_text())["eval_loss"]
    assert points[0]["loss"] == pytest.approx(trained, abs=1e-6)
    assert points[0]["flops_per_token"] == checkpoint.model.flops_per_token(8)
    # a second computation: the loss of every window by itself, with the layers' outputs as the first pass made them
    tokens = load_tokens(dataset(), "val")
    config = replace(checkpoint.config, recompute=False)
    model = GPT.from_state(config, checkpoint.model.state_dict()).eval()
    windows, loss = Windows(tokens, 8, 320, 0), 0.0
    for n in range(windows.n_all):
        x, y = windows.batch([n], 1, torch.device("cpu"))
        logits, _ = model(x, y)
        loss += torch.nn.functional.cross_entropy(logits[0].detach(), y[0], ignore_index=-1, reduction="sum").item()
    assert points[2]["loss"] == pytest.approx(loss / (len(tokens) - 1), abs=1e-6)
    assert points[2]["flops_per_token"] == model.flops_per_token(8)
    assert len({point["loss"] for point in points}) == 3
    assert f"| 2 (trained)       | {points[0]['flops_per_token']:,.0f}" in printed
    assert f"{points[2]['loss'] - points[0]['loss']:+.4f} |" in printed
    check_picture(run / "reruns.png")
    main(run, "--reruns=1,0,1", "--device=cpu", "--svg=True")
    assert [point["reruns"] for point in json.loads((run / "reruns.json").read_text())["points"]] == [1, 0]
    assert (run / "reruns.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("baseline", "1", "baseline runs no layer again"),
        ("hc", "all", "hc runs no layer again"),
        ("method3_2", "3", "reruns must be all or numbers from 2 to 0"),
        ("method3_2", "-1", "reruns must be all or numbers"),
        ("method3_2", "1,,0", "reruns must be all or numbers"),
    ],
)
def test_reruns_that_cannot_be(runs, main, name, text, words):
    with pytest.raises(UserError, match=words):
        main(runs.out / name, f"--reruns={text}")


def test_reruns_need_the_data_of_the_run(runs, tmp_path, main, figures):
    data = shutil.copytree(runs.other_data, tmp_path / "data")
    good("train.py", *tiny(tmp_path / "run", dataset=data, residual_mode="method1"))
    meta = json.loads((data / "meta.json").read_text())
    (data / "meta.json").write_text(json.dumps(meta | {"source": "told differently"}))
    main(tmp_path / "run", "--reruns=0", "--device=cpu")
    (data / "meta.json").write_text(json.dumps(meta | {"source_sha256": "0" * 64}))
    with pytest.raises(UserError, match="is not the data of the run"):
        main(tmp_path / "run", "--reruns=0", "--device=cpu")


# --- lib/plots --------------------------------------------------------------------------------------------------------


def test_every_row_looks_its_own_way():
    rows = dict.fromkeys(
        [*DEFAULT_ROWS, *(mode.value for mode in ResidualMode), "deeper-method4_2", "looped-method4_2"]
    )
    looks = {row: tuple(map(str, plots.style(row).values())) for row in rows}
    assert len(set(looks.values())) == len(rows)
    assert all(plots.style(row)["color"] != "#F0E442" for row in rows)  # too pale on white


def test_the_same_data_gives_the_same_files(tmp_path):
    curves = [("a", "method3_2", [1e5, 2e5, 3e5], [[3.0, 2.0, 1.5], [3.1, 2.2, 1.4]]), ("b", "mudd", [1e5], [[3.0]])]
    for name in ("first", "second"):
        plots.plot_losses(curves, "tokens", tmp_path / f"{name}.png", svg=True)
        plots.plot_frontier(
            [(n, r, x[-1], [loss[-1] for loss in y]) for n, r, x, y in curves], "x", tmp_path / f"{name}2.png"
        )
    for ending in (".png", ".svg", "2.png"):
        assert (tmp_path / f"first{ending}").read_bytes() == (tmp_path / f"second{ending}").read_bytes()
    check_picture(tmp_path / "first.png")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("first")) == [
        *("first.png", "first.svg", "first2.png")
    ]


@pytest.mark.parametrize("points", [2, 3, 5, 40])
def test_curves_fill_their_plot(figures, points):
    """From the left edge to the right and from top to bottom, however few points they have."""
    x = np.linspace(1, points, points) * 1e5
    falling = 1.5 + 2 * np.exp(-4 * np.arange(points) / points)
    plots.plot_losses([("a", "baseline", x, [falling]), ("b", "mudd", x, [falling + 0.1])], "tokens", "unused")
    (axes,) = figures[0].axes
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert right == x[-1] and x[0] <= left < x[-1] - 0.45 * (x[-1] - x[0])
    assert low < falling[-1] < low + 0.1 * (high - low)
    entering = np.interp(left, x, falling)
    assert high - 0.1 * (high - low) < entering <= high + 1e-9
    assert {text.get_text() for text in axes.texts} >= {f"a  {falling[-1]:.3f}", f"b  {falling[-1] + 0.1:.3f}"}


def test_one_failed_run_does_not_press_the_others_together(figures):
    x, good_run = np.arange(1, 11) * 1e5, np.linspace(2.2, 1.8, 10)
    curves = [(f"good{n}", "baseline", x, [good_run + 0.01 * n]) for n in range(4)]
    plots.plot_losses([*curves, ("failed", "method1", x, [np.full(10, 9.0)])], "tokens", "unused")
    (axes,) = figures[0].axes
    assert axes.get_ylim()[1] < 4 and "failed  9.000" in {text.get_text() for text in axes.texts}


def test_the_legend_says_what_the_band_is(figures):
    x, y = [1e5, 2e5], [2.0, 1.0]
    plots.plot_losses([("a", "baseline", x, [y, y]), ("b", "mudd", x, [y, y, y])], "tokens", "unused")
    (legend,) = figures[0].legends
    (text,) = legend.get_texts()
    assert text.get_text() == "line: mean, band: ± standard deviation over 2 to 3 seeds"
    plots.plot_losses([("a", "baseline", x, [y])], "tokens", "unused")
    assert figures[1].legends == []
    plots.plot_losses([(f"{n}", "mudd", x, [y, y]) for n in range(13)], "tokens", "unused")
    assert figures[2].legends == [] and not figures[2].axes[0].collections  # so many bands would hide the lines


def test_differences_are_plotted_from_the_second_quarter_on(figures):
    differences = np.array([[9.0, 8.0, -0.2, -0.3], [9.0, 8.0, -0.4, -0.1]])
    plots.plot_differences([("hc", "hc", [10, 20, 30, 40], differences)], "tokens", "unused")
    (axes,) = figures[0].axes
    (line,) = (line for line in axes.lines if len(line.get_xdata()) == 3 and line.get_transform() == axes.transData)
    assert line.get_xydata() == pytest.approx(np.array([[20, 8.0], [30, -0.3], [40, -0.2]]))
    assert "hc  -0.200" in [text.get_text() for text in axes.texts] and axes.get_xlim() == (20, 40)


def test_ticks_are_alike():
    shown = [plots.short_number(x) for x in (0, 0.5, 16, 2000, 1.5e6, 35e12)]
    assert shown == ["0", "0.5", "16", "2 k", "1.5 M", "35 T"]


def test_the_frontier(figures):
    points = [("dear", "hc", 9.0, [1.0, 1.1]), ("cheap", "baseline", 1.0, [2.0]), ("worse", "method1", 5.0, [2.1])]
    plots.plot_frontier([*points, ("good", "mudd", 3.0, [1.5])], "training FLOPs", "unused")
    (axes,) = figures[0].axes
    bold = {text.get_text() for text in axes.texts if text.get_weight() == "bold"}
    assert bold == {"cheap  2.000", "good  1.500", "dear  1.050"}
    (steps,) = (line for line in axes.lines if line.get_drawstyle() == "steps-post")
    assert steps.get_xydata()[:3].tolist() == [[1.0, 2.0], [3.0, 1.5], [9.0, 1.05]]
    assert axes.get_xscale() == "log"


def test_the_frontier_joins_the_lengths_of_one_model(figures):
    points = [("x2", "baseline-x2", 2.0, [1.5]), ("x1", "baseline", 1.0, [2.0]), ("other", "hc", 1.5, [1.9])]
    for lengths in (("x1", "x2"), ("x1",), ()):
        plots.plot_frontier(points, "training FLOPs", "unused", lengths)
    joined = [
        [line.get_xydata().tolist() for line in figure.axes[0].lines if line.get_zorder() == 1.5] for figure in figures
    ]
    assert joined == [[[[1.0, 2.0], [2.0, 1.5]]], [], []]


def test_the_overview(figures):
    """The best on top; intervals of three seeds and more; a worth that is only a bound is an arrow."""
    inside = {"each": [0.45, 0.55], "mean": 0.5, "bound": None, "low": None, "high": None, "seeds": 2}
    above = {"each": [2.0, 3.0, 4.0], "mean": 3.0, "bound": "above", "low": None, "high": None, "seeds": 3}
    rows = [
        ("method1", [0.02, 0.04], None, inside, above | {"mean": 0.25, "each": [0.25] * 3, "bound": "below"}),
        ("mudd", [-0.03, -0.02, -0.01], 0.02, above, None),
        ("hc", [0.01], None, above | {"mean": 9.0, "bound": "both"}, None),
    ]
    plots.plot_overview(rows, 0.005, "unused")
    plots.plot_overview([(row, differences, 0.001, None, None) for row, differences, *_ in rows], 0.01, "unused")
    left, right = figures[0].axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["method1", "hc", "mudd"]
    intervals = [line.get_xdata() for line in left.lines if line.get_linewidth() == 0.8 and len(line.get_xdata()) == 2]
    assert np.allclose([interval for interval in intervals if interval[0] != 0], [[-0.04, 0.0]])
    assert left.get_xlim()[0] > -0.04  # the interval is cut, not the others pressed together; a mark says so
    marks = [(line.get_xdata()[0], line.get_ydata()[0]) for line in left.lines if line.get_marker() == "<"]
    assert marks == [(left.get_xlim()[0], 2)] and not any(line.get_marker() == ">" for line in left.lines)
    worths = [
        (line.get_xdata()[0], line.get_ydata()[0], line.get_marker(), line.get_fillstyle())
        for line in right.lines
        if line.get_marker() not in ("None", "|")
    ]
    assert worths == [(0.5, 0, "o", "full"), (0.25, 0, "<", "none"), (3.0, 2, ">", "full")]
    seeds = [(list(line.get_xdata()), line.get_ydata()[0]) for line in right.lines if line.get_marker() == "|"]
    assert seeds == [([0.45, 0.55], 0), ([2.0, 3.0, 4.0], 2)]
    low, high = right.get_xlim()
    assert low < 0.25 and high > 4.0
    texts = {text.get_text() for text in figures[0].legends[0].get_texts()}
    assert texts == {
        *("one seed", "95 % interval of the mean", "up to 0.005 nats: too little to speak of"),
        *("goes on beyond the picture", "in FLOPs", "in time, or less", "in FLOPs, or more"),
    }
    plots.plot_overview([("mudd", [-0.03, -0.02], 0.02, inside | {"low": 0.4, "high": 0.6}, None)], 0.01, "unused")
    assert [0.4, 0.6] in [list(line.get_xdata()) for line in figures[2].axes[1].lines]
    assert len(figures[1].axes) == 1  # nothing to say about worth
    texts = {text.get_text() for text in figures[1].legends[0].get_texts()}
    assert texts == {"one seed", "95 % interval of the mean", "up to 0.01 nats: too little to speak of"}  # none is cut


def test_factors_are_rounded_to_four_characters():
    factors = {
        0.5849: "0.58",
        0.999: "1.00",
        -0.476: "-0.5",
        -0.0588: "-0.1",
        -0.01: "0.0",
        9.996: "10.0",
        12.34: "12.3",
    }
    assert {factor: plots.three_digits(factor) for factor in factors} == factors


def test_panels_that_are_alike_have_their_names_once(figures):
    def panel(readers):
        return {"rows": readers, "columns": ["embedding", *readers[:-1]], "matrix": np.tril(np.ones((3, 3))).tolist()}

    same, other = panel(["attention 0", "mlp 0", "head"]), panel(["attention 5", "mlp 5", "head"])
    for second in (same, other):
        plots.plot_depth_mixing([("a", same), ("b", second)] * 5, "unused")
    shown = [
        [(axes.yaxis.get_tick_params()["labelleft"], axes.xaxis.get_tick_params()["labelbottom"]) for axes in ten]
        for ten in (figure.axes[:10] for figure in figures)
    ]
    assert shown[0] == [(panel % 4 == 0, panel >= 6) for panel in range(10)]  # four beside each other
    assert shown[1] == [(True, True)] * 10


def test_the_plain_residual_has_no_colour(figures):
    names = ["attention 0", "mlp 0", "head"]
    plain = {"rows": names, "columns": ["embedding", *names[:2]], "matrix": np.tril(np.ones((3, 3))).tolist()}
    changed = plain | {"matrix": [[1, 0, 0], [2, 1, 0], [0, 0.5, -1]]}
    plots.plot_depth_mixing([("baseline", plain), ("other", changed)], "unused")
    images = [axes.images[0] for axes in figures[0].axes[:2]]
    (low, high) = images[0].get_clim()
    assert low == -high and images[0].get_clim() == images[1].get_clim()  # the middle is 1, in all panels
    assert np.ma.masked_invalid(images[0].get_array()).compressed().tolist() == [0.0] * 6
    colours = np.ma.masked_invalid(images[1].get_array())
    assert colours.mask.tolist() == [[False, True, True], [False, False, True], [False, False, False]]
    assert (colours[1, 0], colours[2, 1]) == (1.0, -1.0)  # twice is as far from 1 as half
    assert colours[2, 0] <= low and colours[2, 2] <= low  # nothing, and the contrary
    assert [text.get_text() for text in figures[0].axes[1].texts] == ["1.00", "2.00", "1.00", "0.00", "0.50", "-1.0"]


def test_factors_below_zero_are_marked_where_numbers_have_no_room(figures):
    names = [f"mlp {n}" for n in range(40)]
    matrix = np.tril(np.ones((40, 40)))
    mixing = {"rows": names, "columns": names, "matrix": matrix.tolist()}
    matrix[30, 7] = -0.5
    plots.plot_depth_mixing([("a", mixing), ("b", mixing | {"matrix": matrix.tolist()})], "unused")
    without, with_one, bar = figures[0].axes
    assert [len(axes.texts) for axes in (without, with_one)] == [0, 1]
    assert (with_one.texts[0].get_position(), with_one.texts[0].get_text()) == ((7, 30), "–")
    assert bar.get_ylabel().endswith("– is below 0")


def test_the_notes_weights():
    """Softmax of the raw weights gives the normalised ones that are printed beside them."""
    square = plots.notes_weights()
    assert square[1, :2] == pytest.approx([0.30925, 0.69075], abs=1e-4)
    assert square[5, :6] == pytest.approx([0.17115, 0.03788, 0.02855, 0.03999, 0.10544, 0.61699], abs=1e-4)
    assert square[11, [0, 6, 11]] == pytest.approx([0.02096, 0.03889, 0.43266], abs=1e-4)
    assert np.nansum(square, axis=1)[1:] == pytest.approx(1) and np.isnan(square[0]).all()


def test_labels_are_moved_apart():
    places = plots.spread([0.0, 0.01, 0.5, 0.52, 0.53, 0.99], gap=0.05)
    assert np.diff(places).min() >= 0.05 - 1e-9 and places[0] >= 0 and places[-1] <= 1
    assert places[3] == pytest.approx((0.5 + 0.52 + 0.53) / 3)  # a crowd spreads around its middle
    assert plots.spread([0.2, 0.8], gap=0.05) == [0.2, 0.8]
    for wishes in ([0.0, 0.01, 0.02, 0.12], [0.1] * 12 + [0.45], [0.9, 0.98, 0.99, 1.0], [0.5] * 20):  # at the edges
        places = plots.spread(wishes, gap=0.05)
        assert np.diff(places).min() >= 0.05 - 1e-9 and places[0] >= -1e-9 and places[-1] <= 1 + 1e-9


def test_a_table_is_markdown():
    table = plots.markdown_table(["", "loss"], [["baseline", "1.5"], ["hc", "1.25"]])
    assert table.splitlines() == [
        "|          | loss |",
        "| -------- | ---- |",
        "| baseline | 1.5  |",
        "| hc       | 1.25 |",
    ]
