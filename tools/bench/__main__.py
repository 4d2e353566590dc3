"""
Speed and memory on this machine's CPU, each figure beside its limit:

    python -m tools.bench                                 # every section, some hours on 2 cores
    python -m tools.bench modes generate                  # some sections
    python -m tools.bench modes --rows=baseline,mudd      # some rows, which join those of the record
    python -m tools.bench tables --out_dir=results/bench  # nothing new: a record's tables again; --rows: a short one
    python -m tools.bench against ../other_clone          # the same steps by two clones of this project in turn

The limit of a step is its FLOPs (model.flops_per_token, three times that for training) at the rate of a 2048³ float32
matrix multiplication, measured between the steps. Every configuration runs in a process of its own, so that its peak
memory is its own. Prints tables, and writes them with bench.json and a picture into out_dir. The sections: modes (every
residual mode), depth, length, vocabulary, compiled, gpt2 (beside stock torch modules), generate, data.
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from configurator import configure
from lib.errors import UserError, refuse, run_main, user_error_from_os
from lib.files import read_json
from tools.bench.against import clones_table, compare_clones
from tools.bench.record import about_now, check_same_machine, joined, section_text, write_record
from tools.bench.sections import ALL_ROWS, SECTIONS, WITH_ROWS, measure_section, readme_table
from tools.compare.rows import parse


@dataclass
class BenchConfig:
    # what is measured
    rows: str | None = None  # of modes, compiled, generate, against: MODE, MODE-stored, MODE-1 (reruns=1) …; None: all
    repeats: int | None = None  # steps that are timed; None: each section's own number
    # where it goes
    out_dir: str = "out/bench"  # bench.json, README.md and depth.png


def row_name(text):
    """As in tools/compare, but only a row with a step of its own."""
    try:
        row = parse(text.strip())
    except UserError as error:
        raise UserError(f"rows: {error}") from None
    of_another = row.control or row.fast or row.length != 1
    refuse(of_another, f"rows: {text!r} is a baseline or has the step of another row: name that one")
    return str(row)


def measure(folder, names, rows, repeats):
    """rows: those that join the record; None: all, in its place."""
    for name in names:
        known = f"{', '.join(SECTIONS)}, tables, or against FOLDER"
        refuse(name not in SECTIONS, f"unknown section {name!r}: choose from {known}")
        refuse(rows and name not in WITH_ROWS, f"--rows is for {', '.join(WITH_ROWS)} and against, not for {name}")
        missing = name == "generate" and find_spec("transformers") is None
        refuse(missing, f"the section {name} compares with transformers: pip install -r requirements-dev.txt")
    record, about = folder / "bench.json", about_now()
    results = read_json(record) if record.exists() else {}
    before = {name: results[name] for name in names if rows and name in results}
    for name in before:
        check_same_machine(name, before[name]["about"], about)
    with user_error_from_os(f"make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        chosen = rows or ALL_ROWS
        if name not in before and "baseline" not in chosen:
            chosen = ["baseline", *chosen]  # all else is relative to it
        now = {"about": about, "measured": measure_section(name, chosen, repeats)}
        results[name] = joined(before[name], now) if name in before else now
        write_record(folder, results)
        print(section_text(name, results[name]))


def main():
    s = configure(sys.argv[1:], BenchConfig, folders="[SECTION …]")
    rows = None if s.rows is None else list(dict.fromkeys(map(row_name, s.rows.split(","))))
    refuse(s.repeats is not None and s.repeats < 1, f"repeats must be at least 1, not {s.repeats}")
    folder = Path(s.out_dir)
    if s.folders[:1] == ["against"]:
        refuse(len(s.folders) != 2, "name one other clone: python -m tools.bench against FOLDER")
        other = Path(s.folders[1])
        refuse(not (other / "model.py").is_file(), f"{other} is no clone: there is no model.py in it")
        results = compare_clones(other.resolve(), rows or ALL_ROWS, s.repeats or 5)
        refuse(not results, "nothing could be measured: see above", status=1)
        print(clones_table(results))
    elif s.folders == ["tables"]:
        results = read_json(folder / "bench.json")
        if rows:
            refuse("modes" not in results, "--rows is for the short table of modes, which the record does not hold")
            print(readme_table(results["modes"]["measured"], [row for row in rows if row != "baseline"]))
        write_record(folder, results)
    else:
        measure(folder, s.folders or list(SECTIONS), rows, s.repeats)


if __name__ == "__main__":
    run_main(main)
