"""Speed and memory of each row, one run at a time; and what a comparison would cost, before anybody pays for it."""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from lib.errors import UserError
from lib.files import read_json, write_json
from lib.plots import markdown_table
from lib.run import read_metrics
from tools.compare.analysis import speed_of
from tools.compare.records import read_speeds, shared_settings
from tools.compare.rows import row_of_same_step, row_to_tune
from tools.compare.runs import last_words, start_process, stop, threads

STEPS, ROUNDS = 8, 3


def measure(scale, rows, seed, s, path):
    """A few steps of each row alone, in rounds and relative to the round's baseline: a machine's speed wanders."""
    if os.getloadavg()[0] > 1:
        print(f"warning: the machine is busy, load {os.getloadavg()[0]:.1f}: speeds will be wrong", file=sys.stderr)
    rows = list(dict.fromkeys(["baseline", *map(row_of_same_step, rows)]))
    rates, memory, machine = {row: [] for row in rows}, dict.fromkeys(rows, 0), None
    for row in tqdm(rows * ROUNDS, unit="run", desc="measuring"):
        with tempfile.TemporaryDirectory() as folder:
            changes = {"seed": seed, "out_dir": folder, "stop_at": STEPS, "eval_every": 10**9, "log_every": 1}
            log = Path(folder) / "log"
            process = start_process(scale.options(scale.changes(row) | changes), s, 0, log)
            try:
                if process.wait():
                    raise UserError(f"{row} could not be measured: {last_words(log)}", status=1)
            finally:
                stop([process])
            lines = [line for line in read_metrics(folder) if "tokens_per_sec" in line]
            info = read_json(Path(folder) / "run.json")
        machine = {key: info[key] for key in ("device", "device_type", "dtype", "compile", "processes", "torch")}
        warm = lines[len(lines) // 4 :]
        rates[row].append(statistics.median(line["tokens_per_sec"] for line in warm))
        memory[row] = max(memory[row], lines[-1]["memory"])
    speeds = read_speeds(path)
    for row in rows:
        ratios = [rate / base for rate, base in zip(rates[row], rates["baseline"], strict=True)]
        speeds[row] = {
            "tokens_per_second": statistics.median(rates[row]),
            "relative": statistics.median(ratios),
            "memory": memory[row],
            "threads": threads(s),
            "machine": machine | {"date": time.strftime("%Y-%m-%d", time.gmtime())},
            "settings": shared_settings(scale.settings(scale.changes(row)).as_dict()),
        }
    write_json(path, speeds)


def plan(scale, rows, seeds, grid, speeds, flops_per_second):
    """A table of what each row costs, runs of the search for its rate included, and the sum."""
    tuned = {row_to_tune(row): True for row in rows} if grid else {}
    cells, total = [], {"runs": 0, "tokens": 0, "flops": 0.0, "hours": 0.0}
    for row in dict.fromkeys([*rows, *tuned]):
        changes = scale.changes(row)
        runs = len(seeds) * (row in rows) + len(grid or ()) * (row in tuned)
        tokens = runs * scale.steps(changes) * scale.plain.batch_tokens
        flops = runs * scale.training_flops(changes)
        speed = speed_of(row, shared_settings(scale.settings(changes).as_dict()), speeds)["tokens_per_second"]
        hours = flops / flops_per_second / 3600 if flops_per_second else speed and tokens / speed / 3600
        for key, value in {"runs": runs, "tokens": tokens, "flops": flops, "hours": hours}.items():
            total[key] = None if total[key] is None or value is None else total[key] + value
        cells.append([row, str(runs), f"{scale.model(changes).num_params():,}", *amounts(tokens, flops, hours)])
    cells.append(["sum", str(total["runs"]), "", *amounts(total["tokens"], total["flops"], total["hours"])])
    table = markdown_table("row,runs,parameters,tokens,training FLOPs,hours".split(","), cells)
    how = f"at {flops_per_second:.3g} FLOP/s" if flops_per_second else "at the speeds measured one run at a time"
    if total["hours"] is None:
        how = "missing: --measure=True measures this machine, --flops_per_second=… plans for another"
    text = f"{table}\n\nHours {how}, one run after another"
    if grid:
        text += f"; a row's rate is tuned with {len(grid)} runs, or up to {len(grid) + 2} if the grid has to grow"
    return text + "."


def amounts(tokens, flops, hours):
    return f"{tokens:.3g}", f"{flops:.3g}", "–" if hours is None else f"{hours:,.1f}"
