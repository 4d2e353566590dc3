"""
Records: what a finished run leaves in results/NAME/runs, enough for table and pictures. Records of several machines are
merged by copying them into one folder.

    row, seed, settings, data        what was trained; of the settings those that a comparison must share
    code, commit, date, machine      the hash of the code that can change a loss; device, dtype, compile, torch …
    parameters, flops_per_token
    loss, perplexity, accuracy, bits_per_byte     of all validation tokens, at the end
    best_loss                        of all evaluations; null if those on the way saw a part of the text (eval_tokens)
    curve                            tokens, flops, seconds and loss of each evaluation, and as train_loss the mean of
                                     the batches logged since the one before; null if none was
    weights, depth_mixing            what the residual has learned, and what that does

runs/tuning holds those of the learning rates that were tried, ROW-lrRATE.json; one that diverged says no loss but when.
"""

import json
import math
import statistics
import subprocess
import time
from dataclasses import fields
from pathlib import Path

from configurator import Settings
from lib.checkpoint import read_run
from lib.code import code_hash
from lib.errors import UserError, refuse
from lib.files import read_json, write_whole
from lib.run import LATEST, read_metrics
from model import GPTConfig
from tools.compare.rows import is_known
from tools.report import read_mixing
from train import ROOT, SETTINGS, RecipeConfig, RunConfig

# Records of one comparison differ in none of these but by their row, seed and rate; data is compared by its content.
SAME_KEYS = [field.name for cls in (RunConfig, RecipeConfig, GPTConfig) for field in fields(cls)]
SAME_KEYS.remove("dataset")
SAME_KEYS += ["epochs", "max_steps", "eval_every", "eval_tokens", "init_from"]
DEFAULTS = Settings(*SETTINGS).as_dict()
MOST_BYTES = 1 << 24


# --- writing ----------------------------------------------------------------------------------------------------------


def shared_settings(settings):
    """Of all settings those that records share. A pretrained model's folder is known by its name, wherever it is."""
    kept = {key: settings[key] for key in SAME_KEYS}
    return json.loads(json.dumps(kept | {"init_from": Path(str(kept["init_from"])).name}))  # a tuple is a list there


def make_record(folder, row, seed):
    """The record of the finished run in a folder."""
    run, info, lines = read_run(folder / LATEST), read_json(folder / "run.json"), read_metrics(folder)
    evals = [line for line in lines if "eval_loss" in line and line["step"] <= run["step"]]
    refuse(run["step"] != info["steps"] or not evals, f"the run in {folder} is not finished: give the command again")
    whole, flops = read_json(folder / "eval_results.json"), info["flops_per_token"]
    losses = [line["eval_loss"] for line in evals]
    weights, mixing = folder / "residual_weights.json", read_mixing(folder / "depth_mixing.json")
    if mixing:
        mixing["matrix"] = [[float(f"{factor:.5g}") for factor in row] for row in mixing["matrix"]]
    return {
        "row": row,
        "seed": seed,
        "settings": shared_settings(DEFAULTS | run["settings"]),
        "data": run["data"],
        "code": run["code"],
        "commit": commit() if run["code"] == code_hash() else None,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(info["started"])),
        "machine": {
            "device": info["device_type"],
            "processor": info["device"],
            **{key: info[key] for key in ("dtype", "compile", "processes", "torch")},
        },
        "parameters": info["parameters"],
        "flops_per_token": flops,
        "loss": whole["eval_loss"],
        "best_loss": min(losses) if run["settings"].get("eval_tokens") is None else None,
        "perplexity": whole["eval_perplexity"],
        "accuracy": whole["eval_accuracy"],
        "bits_per_byte": whole["eval_bits_per_byte"],
        "curve": {
            "tokens": [line["tokens"] for line in evals],
            "flops": [3 * flops * line["tokens"] for line in evals],  # forward and backward
            "seconds": [line["seconds"] for line in evals],
            "loss": losses,
            "train_loss": train_losses(lines, [line["step"] for line in evals]),
        },
        "weights": json.loads(weights.read_bytes()) if weights.exists() else None,
        "depth_mixing": mixing,
    }


def train_losses(lines, ends):
    """The mean training loss of the lines up to each of these steps, from the one before on."""
    means = []
    for start, end in zip([0, *ends], ends, strict=False):
        losses = [line["loss"] for line in lines if "loss" in line and start < line["step"] <= end]
        means.append(statistics.fmean(losses) if losses else None)
    return means


def commit():
    """Of the clone, None if it is no clone."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return git.stdout.strip() or None


def write_record(path, record):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(record).encode() + b"\n")


# --- reading ----------------------------------------------------------------------------------------------------------


def read_records(folder, may_diverge=False):
    """All records of a folder, and lines about those of rows that this clone does not know."""
    records, lines = [], []
    for path in sorted(Path(folder).glob("*.json")):
        advice = "is damaged or not a record: remove it, and its run is made again"
        try:
            record = read_json(path, MOST_BYTES)
            good = holds(record, RECORD) and is_series(record)
        except UserError:
            raise UserError(f"{path} {advice}") from None
        if isinstance(record.get("row"), str) and not is_known(record["row"]):
            lines.append(f"Left out: {path.name}, whose row {record['row']!r} this clone does not know")
            continue
        good = good or (may_diverge and holds(record, DIVERGED))
        refuse(not good, f"{path} {advice}")
        records.append(record)
    return records, lines


def number(value):
    return type(value) in (int, float) and math.isfinite(value)


def whole(value):
    return type(value) is int and value >= 0


def text(value):
    return isinstance(value, str)


def is_list(check):
    return lambda value: isinstance(value, list) and all(map(check, value))


def numbers(value):
    return is_list(number)(value) and len(value) > 0


def above(value):
    return number(value) and value > 0


def maybe(check):
    return lambda value: value is None or check(value)


def holds(value, shape):
    """Whether a value is as a shape says: a function that checks it, or a dict of shapes for the keys to be there."""
    if not isinstance(shape, dict):
        return shape(value)
    return isinstance(value, dict) and all(key in value and holds(value[key], part) for key, part in shape.items())


MACHINE = {"compile": lambda value: isinstance(value, bool)}
MACHINE |= dict.fromkeys(("device", "processor", "dtype", "torch"), text)
RECORD = {
    "row": text,
    "seed": whole,
    "code": text,
    "settings": {"n_layer": whole, "learning_rate": number, "n_embd": whole, "n_head": whole, "batch_tokens": whole}
    | {"block_size": whole},
    "data": {"val_tokens": above, "val_bytes": above, "train_tokens": above, "source": text},
    "machine": MACHINE,
    "date": text,
    "commit": maybe(text),
    "parameters": whole,
    "flops_per_token": above,
    "loss": number,
    "best_loss": maybe(number),
    "accuracy": number,
    "bits_per_byte": number,
    "curve": dict.fromkeys(("tokens", "flops", "seconds", "loss"), numbers) | {"train_loss": is_list(maybe(number))},
    "weights": maybe(lambda value: isinstance(value, (dict, list))),
    "depth_mixing": maybe(lambda value: isinstance(value, dict)),
}
DIVERGED = {"row": text, "seed": whole, "settings": {"learning_rate": number}, "diverged": text}
SPEED = {"tokens_per_second": above, "relative": above, "rounds": numbers, "memory": whole, "threads": whole}
SPEED["settings"] = lambda value: isinstance(value, dict)


def is_series(record):
    """Whether what belongs together is of one length: the curve's points, the weights of a layer, a mixing's cells."""
    curve, mixing, layers = record["curve"], record["depth_mixing"], record["weights"]
    good = len({len(curve[key]) for key in RECORD["curve"]}) == 1 and min(curve["tokens"]) > 0 < min(curve["flops"])
    layers = layers if isinstance(layers, list) else None  # of other modes tensors by name
    good = good and (layers is None or len(layers) == record["settings"]["n_layer"])
    for m, layer in enumerate(layers or []):
        good = good and isinstance(layer, dict) and "weights" in layer
        if good and layer["weights"] is not None:
            good = holds(layer["weights"], {"raw": numbers}) and len(layer["weights"]["raw"]) == m + 1
    if good and mixing is not None:
        good = holds(mixing, {"rows": is_list(text), "columns": is_list(text), "matrix": is_list(numbers)})
        sizes = {len(mixing["matrix"]), *(len(row) for row in mixing["matrix"])} if good else {}
        good = good and sizes == {len(mixing["rows"])} == {len(mixing["columns"])}
    return good


def read_speeds(path):
    """What was measured, if anything."""
    speeds = read_json(path) if path.exists() else {}
    good = all(holds(speed, SPEED) for speed in speeds.values())
    refuse(not good, f"{path} is damaged or of an older version: remove it and measure again")
    return speeds


# --- comparing --------------------------------------------------------------------------------------------------------


def check_same(made, now, data, where, ignore=()):
    """Refuse what was made under other settings than now or of other data; a key that was not there had its default."""
    then, now = shared_settings(DEFAULTS | made["settings"]), shared_settings(now)
    different = [key for key in SAME_KEYS if key not in ignore and then[key] != now[key]]
    words = [f"{key} is {then[key]} there and {now[key]} here" for key in different]
    if made["data"] | {"source": None} != data | {"source": None}:  # a file's name and an address may differ
        words.append("its data is another")
    refuse(words, f"{where} was made under other settings: {', '.join(words)}; choose another --name or remove it")
