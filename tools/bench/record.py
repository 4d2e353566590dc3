"""A record of measurements: bench.json, and its tables and picture made from it."""

import os
import time

import torch

from lib.code import code_hash
from lib.errors import refuse
from lib.files import write_json, write_whole
from lib.machine import processor_name
from lib.plots import plot_growth
from tools.bench.sections import ALL_ROWS, SECTIONS


def about_now():
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {processor_name()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "code": code_hash(),
    }


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
