"""Speed and memory of each row, beside the baseline; and what a comparison would cost, before anybody pays for it."""

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from lib.errors import UserError
from lib.files import write_json
from lib.plots import markdown_table
from tools.compare.analysis import speed_of
from tools.compare.records import read_speeds, shared_settings
from tools.compare.rows import row_of_same_step, row_to_tune
from tools.compare.runs import last_words, start_process, stop, threads

MACHINE_KEYS = "device device_type dtype compile processes torch".split()
ROUNDS, TURNS, TURN_SECONDS, WARM_UP = 3, 20, 0.5, 4


class Stepper:
    """A process that makes training steps of a row when asked, and waits in between."""

    def __init__(self, row, process, log):
        self.row, self.process, self.log = row, process, log
        self.machine = self.answer()
        self.seconds_of(1)  # compiles
        self.turn_steps = max(1, round(TURN_SECONDS / self.seconds_of(WARM_UP)))

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            reason = last_words(self.log).removeprefix("error: ")
            raise UserError(f"{self.row} could not be measured: {reason}", status=1)
        return json.loads(line)

    def seconds_of(self, steps):
        """The mean of so many steps."""
        with contextlib.suppress(BrokenPipeError):  # it has ended: there is no answer
            self.process.stdin.write(b"%d\n" % steps)
        answer = self.answer()
        self.memory = answer["memory"]
        return answer["seconds"]


@contextlib.contextmanager
def stepper(scale, seed, s, row):
    """A Stepper whose process ends with the `with`."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        options = scale.options(scale.changes(row) | {"seed": seed, "out_dir": folder})
        process = start_process(["-m", "tools.compare.steps", *options], s, 0, log, subprocess.PIPE, subprocess.PIPE)
        try:
            yield Stepper(row, process, log)
        finally:
            stop([process])
            process.stdin.close()
            process.stdout.close()


def side_by_side(start, row):
    """
    [(seconds of a step of the baseline, of the row), …], and the row's Stepper. Both wait on the machine and take short
    turns, since the speed of a processor wanders: by a tenth from one half minute to the next on a shared one. That of
    GPUs does not, which may have no room for both: there one comes after the other.
    """
    with start("baseline") as base:
        if base.machine["device_type"] == "cpu":
            with start(row) as other:
                turns = []
                for n in range(TURNS):
                    pair = {one: one.seconds_of(one.turn_steps) for one in (base, other)[:: (-1) ** n]}
                    turns.append((pair[base], pair[other]))
                return turns, other
        alone = base.seconds_of(TURNS * base.turn_steps)
    with start(row) as other:
        return [(alone, other.seconds_of(TURNS * other.turn_steps))], other


def measure(scale, rows, seed, s, path):
    """Speed, relative to the baseline, and memory of each row; written after each round."""
    if os.getloadavg()[0] > 1:
        print(f"warning: the machine is busy, load {os.getloadavg()[0]:.1f}: speeds will be wrong", file=sys.stderr)
    rows = list(dict.fromkeys(["baseline", *map(row_of_same_step, rows)]))
    start = functools.partial(stepper, scale, seed, s)
    rounds = {row: [] for row in rows}  # a list of turns each
    with tqdm(total=ROUNDS * len(rows), unit="row", desc="measuring") as bar:
        for _ in range(ROUNDS):
            steppers = {}
            for row in rows:
                turns, steppers[row] = side_by_side(start, row)
                rounds[row].append(turns)
                bar.update()
            write_json(path, read_speeds(path) | speeds_of(rounds, steppers, scale, threads(s)))


def speeds_of(rounds, steppers, scale, n_threads):
    """What speed.json says of each row. The baseline's own rounds are those beside a second baseline."""
    turns = {row: list(chain(*rounds[row])) for row in rounds}
    base = statistics.median(seconds for seconds, _ in chain(*turns.values()))
    speeds = {}
    for row in rounds:
        relative = 1.0 if row == "baseline" else ratio(turns[row])
        machine = {key: steppers[row].machine[key] for key in MACHINE_KEYS}
        speeds[row] = {
            "tokens_per_second": scale.plain.batch_tokens / base * relative,
            "relative": relative,
            "rounds": list(map(ratio, rounds[row])),
            "memory": steppers[row].memory,
            "threads": n_threads,
            "machine": machine | {"date": time.strftime("%Y-%m-%d", time.gmtime())},
            "settings": shared_settings(scale.settings(scale.changes(row)).as_dict()),
        }
    return speeds


def ratio(turns):
    return statistics.median(base / other for base, other in turns)


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
    how = f"at {flops_per_second:.3g} FLOP/s" if flops_per_second else "at the measured speeds"
    if total["hours"] is None:
        how = "missing: --measure=True measures this machine, --flops_per_second=… plans for another"
    text = f"{table}\n\nHours {how}, one run after another"
    if grid:
        text += f"; a row's rate is tuned with {len(grid)} runs, or up to {len(grid) + 2} if the grid has to grow"
    return text + "."


def amounts(tokens, flops, hours):
    return f"{tokens:.3g}", f"{flops:.3g}", "–" if hours is None else f"{hours:,.1f}"
