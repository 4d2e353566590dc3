"""
Look at runs without training:

    python -m tools.report out/baseline out/method3_2
    python -m tools.report out/method3_2 --reruns=all

Prints their metrics and what their residual connections have learned. Plots loss.png and, where there is something to
see, residual_weights.png and depth_mixing.png into each run's folder; for several runs the validation losses of those
with the same data and tokenizer together, and all depth mixing, beside the first folder. With --reruns a trained method
is evaluated with only its nearest re-runs: loss against FLOPs, in reruns.json and reruns.png.
"""

import json
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from configurator import configure
from lib.errors import refuse, run_main
from lib.evaluation import evaluate
from lib.files import read_json, write_json
from lib.machine import Machine, StopSignals
from lib.plots import (
    markdown_table,
    plot_depth_mixing,
    plot_losses,
    plot_reruns,
    plot_run,
    plot_weights,
    weight_square,
)
from lib.reports import residual_report, residual_text, row_name
from lib.run import load_run, read_metrics
from lib.start import Data
from model import GPT

EVAL_BATCH = 32  # sequences; has no influence on the result


@dataclass
class ReportConfig:
    # what to look at
    reruns: str | None = None  # how many of the nearest earlier layers are run again, such as 7,3,1,0; all; None: skip
    device: str | None = None  # for reruns: cuda, mps, cpu; None: by what the machine has
    svg: bool = False  # pictures as SVG beside the PNG, for a paper


# --- what a run's folder holds ----------------------------------------------------------------------------------------


def look_at(folder):
    """The latest checkpoint, the numbers of its table, and the curves up to it."""
    folder = Path(folder)
    checkpoint, _ = load_run(folder, "latest")
    model, lines = checkpoint.model, [line for line in read_metrics(folder) if line["step"] <= checkpoint.step]
    steps, evals = ([line for line in lines if key in line] for key in ("loss", "eval_loss"))
    refuse(not (evals and steps), f"the run in {folder} has no evaluation yet: resume it, or wait for it")
    where = folder / "metrics.jsonl"
    curve = {key: column(evals, key, where) for key in ("tokens", "eval_loss")}
    return {
        "name": folder.resolve().name,
        "folder": folder,
        "row": row_name(model.config),
        "checkpoint": checkpoint,
        "dataset": Path(str(checkpoint.settings.get("dataset"))).name,
        "last": last_evaluation(folder, evals[-1]),
        "loss": curve["eval_loss"][-1],
        "best_loss": min(curve["eval_loss"]),
        "curve": {"tokens": curve["tokens"], "loss": curve["eval_loss"]},
        "training": {key: column(steps, key, where) for key in ("tokens", "loss", "tokens_per_sec", "memory")},
        "residual": residual_report(model),
        "weights": [None if raw is None else raw.detach().numpy() for raw in model.residual_weights()],
        "mixing": read_mixing(folder / "depth_mixing.json"),
    }


def column(lines, key, where):
    values = [line.get(key) for line in lines]
    good = all(type(value) in (int, float) for value in values)
    refuse(not good, f"{where} is damaged: a line has no number as its {key}")
    return values


def last_evaluation(folder, line):
    """Of all validation tokens, if there was one at the end; the evaluations on the way may see a part of them."""
    path = folder / "eval_results.json"
    whole = read_json(path) if path.exists() else {}
    results = whole if whole.get("epoch") == line.get("epoch") else line
    keys = "eval_loss", "eval_perplexity", "eval_accuracy", "eval_bits_per_byte"
    return {key: column([results], key, path if results is whole else folder / "metrics.jsonl")[0] for key in keys}


def read_mixing(path):
    """The depth mixing of the last evaluation; None: this mode has none."""
    if not path.exists():
        return None
    mixing = read_json(path)
    try:
        shape = np.array(mixing["matrix"], dtype=float).shape
        good = shape == (len(mixing["rows"]), len(mixing["columns"])) and shape[0] == shape[1] > 0
    except (KeyError, TypeError, ValueError):
        good = False
    refuse(not good, f"{path} is damaged: remove it, and the next evaluation writes it again")
    return mixing


def same_data(run):
    """Runs are comparable where this is equal: content and tokenizer, wherever they came from."""
    return json.dumps({key: value for key, value in run["checkpoint"].data.items() if key != "source"}, sort_keys=True)


# --- re-runs left out -------------------------------------------------------------------------------------------------


def chosen_reruns(text, run):
    config = run["checkpoint"].config
    most = replace(config, recompute=True, reruns=None).n_reruns
    refuse(
        not most, f"{run['folder']}: {config.residual_mode} runs no layer again, so --reruns has nothing to leave out"
    )
    numbers = [str(k) for k in range(most, -1, -1)] if text == "all" else text.split(",")
    good = all(k.isdecimal() and int(k) <= most for k in numbers)
    refuse(not good, f"reruns must be all or numbers from {most} to 0 with commas between them, not {text!r}")
    return list(dict.fromkeys(map(int, numbers)))


def evaluate_reruns(run, numbers, machine):
    """For each number of re-runs per layer: forward FLOPs per token and the loss on the run's validation data."""
    checkpoint = run["checkpoint"]
    data, block_size = Data(str(checkpoint.settings.get("dataset")), machine), checkpoint.config.block_size
    same = asdict(data.meta) | {"source": None} == checkpoint.data | {"source": None}
    refuse(not same, f"{data.folder} is not the data of the run in {run['folder']}: prepare that again")
    data.cut(block_size, seed=0)
    points = []
    for k in numbers:
        config = replace(checkpoint.config, recompute=True, reruns=k)
        model = GPT.from_state(config, checkpoint.model.state_dict()).to(machine.device)
        loss = evaluate(model, data.val, machine, EVAL_BATCH, None, StopSignals())["eval_loss"]
        points.append({"reruns": k, "flops_per_token": model.flops_per_token(block_size), "loss": loss})
    return points


def reruns_table(points, trained_with):
    """Differences are to the most re-runs of the list, which need not be those that it was trained with."""
    first = max(points, key=lambda point: point["reruns"])
    header = ["re-runs per layer", "FLOPs/token", "× the first", "loss", "Δ"]
    lines = []
    for p in sorted(points, key=lambda point: -point["reruns"]):
        trained = " (trained)" if p["reruns"] == trained_with else ""
        cost = [f"{p['flops_per_token']:,.0f}", f"{p['flops_per_token'] / first['flops_per_token']:.3f}"]
        lines.append([f"{p['reruns']}{trained}", *cost, f"{p['loss']:.4f}", f"{p['loss'] - first['loss']:+.4f}"])
    return markdown_table(header, lines)


# --- what is printed and plotted --------------------------------------------------------------------------------------

HEADER = "run,mode,dataset,parameters,tokens,loss,best,bits/byte,perplexity,accuracy,tokens/s,memory".split(",")


def table_row(run):
    last, training = run["last"], run["training"]
    return [
        run["name"],
        run["row"],
        f"{run['dataset']} ({run['checkpoint'].data.get('tokenizer')})",
        f"{run['checkpoint'].model.num_params():,}",
        f"{run['curve']['tokens'][-1]:,}",
        f"{last['eval_loss']:.4f}",
        f"{run['best_loss']:.4f}" if run["checkpoint"].settings.get("eval_tokens") is None else "–",  # of a part
        f"{last['eval_bits_per_byte']:.4f}",
        f"{last['eval_perplexity']:.4f}",
        f"{last['eval_accuracy']:.4f}",
        f"{statistics.median(training['tokens_per_sec']):,.0f}",
        f"{max(training['memory']) / 2**20:,.0f} MB",
    ]


def title(run):
    return run["name"] if run["name"] == run["row"] else f"{run['name']} ({run['row']})"


def plot_one(run, svg):
    """The pictures of one run, in its folder; returns their paths."""
    folder = run["folder"]
    pictures = [folder / "loss.png"]
    plot_run(run, pictures[0], svg)
    if any(raw is not None for raw in run["weights"]):
        pictures.append(folder / "residual_weights.png")
        plot_weights([(f"{run['name']}: weights, %", weight_square(run["weights"]))], pictures[-1], svg)
    if run["mixing"]:
        pictures.append(folder / "depth_mixing.png")
        plot_depth_mixing([(title(run), run["mixing"])], pictures[-1], svg)
    return pictures


def plot_together(runs, svg):
    """Losses of comparable runs and everybody's depth mixing, beside the first run; returns the pictures' paths."""
    groups, pictures = {}, []
    for run in runs:
        groups.setdefault(same_data(run), []).append(run)
    if len(groups) > 1:
        names = "; ".join(", ".join(run["name"] for run in group) for group in groups.values())
        print(f"\nnot plotted together, since data or tokenizer differ and losses are not comparable: {names}")
    place = runs[0]["folder"].resolve().parent
    several = [group for group in groups.values() if len(group) > 1]
    for n, group in enumerate(several):
        pictures.append(place / (f"loss-{n + 1}.png" if len(several) > 1 else "loss.png"))
        curves = [(run["name"], run["row"], run["curve"]["tokens"], [run["curve"]["loss"]]) for run in group]
        plot_losses(curves, "tokens", pictures[-1], svg)
    panels = [(title(run), run["mixing"]) for run in runs if run["mixing"]]
    if len(panels) > 1:
        pictures.append(place / "depth_mixing.png")
        plot_depth_mixing(panels, pictures[-1], svg)
    return pictures


def main():
    s = configure(sys.argv[1:], ReportConfig, folders="RUN …")
    refuse(not s.folders, "name the folders of one or more runs: python -m tools.report out/A out/B")
    runs = [look_at(folder) for folder in dict.fromkeys(s.folders)]
    numbers = [chosen_reruns(s.reruns, run) for run in runs] if s.reruns else []
    print(markdown_table(HEADER, [table_row(run) for run in runs]))
    pictures = []
    for run in runs:
        if run["residual"]:
            print(f"\n{run['name']}: what the residual has learned\n{residual_text(run['residual'])}", end="")
        pictures += plot_one(run, s.svg)
    if len(runs) > 1:
        pictures += plot_together(runs, s.svg)
    machine = Machine(s.device) if s.reruns else None
    for run, chosen in zip(runs, numbers, strict=False):
        points = evaluate_reruns(run, chosen, machine)
        print(f"\n{run['name']}: {run['row']} with only its nearest re-runs")
        print(reruns_table(points, run["checkpoint"].config.n_reruns))
        write_json(run["folder"] / "reruns.json", {"row": run["row"], "points": points})
        pictures.append(run["folder"] / "reruns.png")
        places = [(point["reruns"], point["flops_per_token"], point["loss"]) for point in points]
        plot_reruns(run["row"], places, pictures[-1], s.svg)
    print("\npictures:", *pictures)


if __name__ == "__main__":
    run_main(main)
