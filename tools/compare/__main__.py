"""
The experiment: residual modes × learning rates × seeds under one budget, through the real train.py.

    python -m tools.compare config/shakespeare.py --modes=baseline,method3_2,looped --seeds=1,2,3 --jobs=2
    python -m tools.compare config/tuned.py --learning_rates=4e-3,8e-3,1.6e-2 --print=True > commands.txt
    python -m tools.compare results/tuned

Keys of train.py may be given too, for all rows. A finished run leaves a small record in results/NAME/runs, and tables
and pictures are made from the records; the same command again makes what is missing. A folder of results alone: its
tables and pictures are made anew. tools/compare/rows.py says what a row is: a mode by its name, followed by -stored,
-1, -own …, or deeper, longer, looped.
"""

import contextlib
import os
import shlex
import signal
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from configurator import configure
from lib.code import code_hash
from lib.errors import UserError, refuse, run_main
from tools.compare.analysis import kind, one_kind
from tools.compare.measure import measure, plan
from tools.compare.records import check_same, read_speeds
from tools.compare.results import Results
from tools.compare.rows import DEFAULT_ROWS, open_scale, parse
from tools.compare.runs import Queue, Run, collect, make_folders
from tools.compare.tuning import TUNING_SEED, Tuning, known_rates
from train import ROOT, SETTINGS


@dataclass
class CompareConfig:
    # the comparison
    name: str | None = None  # of results/NAME and out/compare/NAME; None: the config files' names
    modes: str = "all"  # rows with commas between them; all: DEFAULT_ROWS
    seeds: str = "1,2,3"  # a seed is the same data in the same order for every row
    learning_rates: tuple | None = None  # try these for each row with seed 0 and take the best; None: learning_rate
    rates_from: str | None = None  # a folder of results: the rates that its search found for these rows
    contrasts: str | None = None  # ROW (against the baseline) or ROW:ROW, to be tested; None: those of CONTRASTS
    results_dir: str | None = None  # None: results/NAME. The runs' own folders are in out_dir, None: out/compare/NAME
    # this machine
    jobs: int = 1  # runs side by side, each with its share of the cores and GPUs
    nproc: int = 1  # processes of one run, started by torchrun
    # instead of training
    print: bool = False  # the commands of the missing runs, for a job array; a later call collects what they left
    measure: bool = False  # each row's speed and memory, on an otherwise idle machine
    plan: bool = False  # what it would cost
    flops_per_second: float | None = None  # for plan: of a machine that one does not have


CONTRASTS = "method3_2 method4_2 method3_1-stored method3_2-1 mudd hc method3_2:looped method3_2:longer".split()
OWN_KEYS = [field.name for field in fields(CompareConfig)]


def listed(text, what, kind):
    try:
        return list(dict.fromkeys(kind(item.strip()) for item in text.split(",")))
    except UserError:
        raise
    except ValueError:
        raise UserError(f"{what} must be {kind.__name__}s with commas between them, not {text!r}") from None


def checked_row(text):
    return str(parse(text))


def contrast(text):
    row, _, against = text.partition(":")
    return checked_row(row), checked_row(against or "baseline")


def check(s, seeds):
    for key in ("jobs", "nproc"):
        refuse(getattr(s, key) < 1, f"{key} must be at least 1, not {getattr(s, key)}")
    most = 4 * os.cpu_count()
    refuse(s.jobs * s.nproc > most, f"jobs × nproc = {s.jobs * s.nproc} is too much for this machine: at most {most}")
    if s.learning_rates is not None:
        good = len(set(s.learning_rates)) > 1 and min(s.learning_rates) > 0
        refuse(not good, "learning_rates must be several numbers above 0; --learning_rate is one for all rows")
        refuse(s.rates_from, "learning_rates and rates_from contradict each other: leave one out")
        refuse(TUNING_SEED in seeds, f"seed {TUNING_SEED} is for the search for learning rates: choose others")
    refuse(min(seeds) < 0, f"seeds must not be negative, not {s.seeds}")
    refuse(s.flops_per_second is not None and s.flops_per_second <= 0, "flops_per_second must be more than 0")
    plain = Path(s.name).name == s.name and s.name != ".."
    refuse(not plain, f"name {s.name!r} must be a plain folder name; --results_dir and --out_dir choose places")


def train_or_print(runs, s, failed, on_record):
    """Collect what is finished already; train what is missing, or print its commands."""
    missing = collect(runs, failed, on_record)
    if s.print:
        for run in missing:
            if not run.is_training():
                print(run.command(s.nproc))
    elif missing:
        Queue(missing, s, failed, on_record).work()


def find_rates(tuning, s, failed):
    """The best learning rate of each row: {row: rate}, without those for which there is none yet."""
    warn_of_other_code([r for r in tuning.records() if "diverged" not in r], tuning.records_dir, tuning.missing())
    seen = set()
    while todo := [run for run in tuning.missing() if run.name not in seen]:  # the grid may grow
        seen |= {run.name for run in todo}
        train_or_print(todo, s, failed, lambda record: None)
    return tuning.rates()


def check_records(results, scale):
    """Refuse records of other settings; their rates are checked once those are known."""
    for record in results.records:
        row, seed = record["row"], record["seed"]
        now = scale.settings(scale.changes(row) | {"seed": seed}).as_dict()
        check_same(record, now, scale.data, results.path(record), ignore=["learning_rate"])


def check_rates(results, rates):
    for record in results.records:
        row, rate = record["row"], record["settings"]["learning_rate"]
        words = f"learning_rate is {rate} there and {rates.get(row)} here; choose another --name or remove it"
        refuse(rates.get(row, rate) != rate, f"{results.path(record)} was made under other settings: {words}")


def warn_of_other_code(records, folder, runs):
    if records and any(not run.record.exists() for run in runs):
        code = kind(one_kind(records)[0][0])[0]
        if code != code_hash():
            words = f"the records in {folder} are of other code ({code[:12]}): new ones do not belong to them"
            print(f"warning: {words}; use another --name, or that code", file=sys.stderr)


def command_text(s, rows, seeds):
    """This call, as the README tells it: without what only says where and how to work."""
    own = tuple(f"--{key}=" for key in [*OWN_KEYS, "out_dir"])
    shared = [argument for argument in sys.argv[1:] if not argument.startswith(own)]
    which = [f"--modes={','.join(rows)}", f"--seeds={','.join(map(str, seeds))}"]
    which += [f"--rates_from={s.rates_from}"] if s.rates_from else []
    which += [f"--learning_rates={','.join(f'{rate:g}' for rate in s.learning_rates)}"] if s.learning_rates else []
    which += [f"--contrasts={s.contrasts}"] if s.contrasts else []
    return shlex.join(["python", "-m", "tools.compare", *shared, *which, f"--name={s.name}"])


def train(s, scale, rows, seeds, results, out_dir):
    """The rows' learning rates, then the seeds."""
    rates = dict.fromkeys(rows, scale.plain.learning_rate)
    if s.rates_from:
        rates = known_rates(rows, Path(s.rates_from))
    if s.learning_rates:
        rates = find_rates(Tuning(scale, rows, s.learning_rates, out_dir, results.runs), s, results.failed)
    check_rates(results, rates)
    runs = [
        Run(scale, row, seed, rates[row], f"{row}-seed{seed}", out_dir, results.runs)
        for seed in seeds  # whole seeds first
        for row in rows
        if row in rates
    ]
    warn_of_other_code(results.records, results.runs, runs)
    command = command_text(s, rows, seeds)
    train_or_print(runs, s, results.failed, lambda record: results.add(record, command))
    without = [row for row in rows if row not in rates]
    with contextlib.redirect_stdout(sys.stderr if s.print else sys.stdout):  # which is for the commands
        results.show()
        if without:
            print(f"without a learning rate: {', '.join(without)}: runs of the search are missing, or all diverged")
    failed = [run.name for run in runs if run.name in results.failed]
    refuse(failed and not s.print, f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}", 1)
    refuse(without and not s.print, f"{len(without)} of {len(rows)} rows have no learning rate", 1)


def main():
    s = configure(sys.argv[1:], CompareConfig, *SETTINGS, folders="[RESULTS] [config/FILE.py …]")
    for folder in map(Path, s.folders):
        refuse(s.files or s.given, "a folder of results is shown as it is: leave the other arguments out")
        refuse(not (folder / "runs").is_dir(), f"{folder} holds no results of a comparison: it has no runs in it")
        Results(folder, folder.resolve().name).show()
    if s.folders:
        return

    rows = DEFAULT_ROWS if s.modes == "all" else listed(s.modes, "modes", checked_row)
    seeds = listed(s.seeds, "seeds", int)
    named = listed(",".join(CONTRASTS) if s.contrasts is None else s.contrasts, "contrasts", contrast)
    s.name = s.name or "-".join(Path(file).stem for file in s.files) or "default"
    check(s, seeds)
    results_dir, out_dir = Path(s.results_dir or ROOT / "results" / s.name), Path(s.out_dir or f"out/compare/{s.name}")
    scale = open_scale(s, OWN_KEYS)
    for row in rows:
        scale.changes(row)  # may be refused
    if s.plan:
        speeds = read_speeds(results_dir / "speed.json")
        print(plan(scale, rows, seeds, s.learning_rates, speeds, s.flops_per_second))
        return
    results = Results(results_dir, s.name)
    results.name_contrasts(named, asked=s.contrasts is not None)
    check_records(results, scale)
    foreign = (results_dir / "README.md").exists() and not (results_dir / "results.json").exists()
    refuse(foreign, f"{results_dir} holds a README.md that is not of a comparison: choose another results_dir")
    make_folders(results.runs, out_dir)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as orderly as Ctrl-C
    if s.measure:
        measure(scale, rows, seeds[0], s, results_dir / "speed.json")
        results.speeds = read_speeds(results_dir / "speed.json")
        results.show()
    else:
        train(s, scale, rows, seeds, results, out_dir)


if __name__ == "__main__":
    run_main(main)
