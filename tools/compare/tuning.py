"""
A learning rate for each row: all of a grid are tried with a seed of their own, and the best by validation loss is the
row's. Where the best lies at an edge the grid grows by a step, at most twice at each end. A rate that diverges is the
worst.
"""

import math
import sys

from lib.errors import refuse
from tools.compare.records import check_same, read_records
from tools.compare.rows import row_to_tune
from tools.compare.runs import Run

TUNING_SEED = 0  # never in the table
MOST_GROWTH = 2


def rates_to_try(grid, losses):
    """What is still to be tried of a row. losses: {rate: loss, inf if it diverged} of what was."""
    missing = [rate for rate in grid if rate not in losses]
    if missing:
        return missing
    tried, best = sorted(losses), best_rate(losses)
    below, above = sum(rate < min(grid) for rate in tried), sum(rate > max(grid) for rate in tried)
    if best == tried[0] and below < MOST_GROWTH:
        return [rounded(tried[0] ** 2 / tried[1])]
    if best == tried[-1] and above < MOST_GROWTH:
        return [rounded(tried[-1] ** 2 / tried[-2])]
    return []


def best_rate(losses):
    return min(sorted(losses), key=losses.get)


def rows_at_an_edge(losses):
    """Rows whose best rate has none tried on one side of it: a better one may lie beyond."""
    return [row for row, tried in losses.items() if best_rate(tried) in (min(tried), max(tried))]


def rounded(rate):
    return float(f"{rate:.6g}")


def tuning_losses(records):
    """{row: {rate: loss}} of all rates tried, and {row: {rate: words}} of those that diverged."""
    losses, diverged = {}, {}
    for record in records:
        rate = record["settings"]["learning_rate"]
        losses.setdefault(record["row"], {})[rate] = record.get("loss", math.inf)
        if "diverged" in record:
            diverged.setdefault(record["row"], {})[rate] = record["diverged"]
    return losses, diverged


class Tuning:
    """The search for the rates of these rows, or of those whose rate they take."""

    def __init__(self, scale, rows, grid, out_dir, records_dir):
        self.scale, self.rows, self.grid = scale, rows, grid
        self.to_tune = list(dict.fromkeys(row_to_tune(row) for row in rows))
        self.out_dir, self.records_dir = out_dir / "tuning", records_dir / "tuning"

    def records(self):
        return read_records(self.records_dir, may_diverge=True)[0]

    def missing(self):
        """The runs that are next, of all rows, after a look at what is there."""
        records = self.records()
        for record in records:
            now = self.scale.settings(self.scale.changes(record["row"])).as_dict()
            where = f"the tuning of {record['row']} in {self.records_dir}"
            check_same(record, now, self.scale.data, where, ignore=("seed", "learning_rate"))
        self.losses, _ = tuning_losses(records)
        where = self.out_dir, self.records_dir
        return [
            Run(self.scale, row, TUNING_SEED, rate, f"{row}-lr{rate:g}", *where, may_diverge=True)
            for row in self.to_tune
            for rate in rates_to_try(self.grid, self.losses.get(row, {}))
        ]

    def rates(self):
        """{row: rate}, without rows all of whose rates diverged or whose search is not at its end."""
        found = {}
        for row in self.rows:
            losses = self.losses.get(row_to_tune(row), {})
            if not rates_to_try(self.grid, losses) and min(losses.values()) < math.inf:
                found[row] = best_rate(losses)
        return found


def known_rates(rows, folder):
    """{row: rate} that the search in another folder of results found."""
    losses, _ = tuning_losses(read_records(folder / "runs" / "tuning", may_diverge=True)[0])
    searched = {row: losses.get(row_to_tune(row), {}) for row in rows}
    without = [row for row, tried in searched.items() if min(tried.values(), default=math.inf) == math.inf]
    refuse(without, f"{folder} has no learning rate of {', '.join(without)}: choose other rows, or search")
    if edge := rows_at_an_edge(searched):
        words = f"the search in {folder} found its best at an edge, or is not at its end: {', '.join(edge)}"
        print(f"warning: {words}", file=sys.stderr)
    return {row: best_rate(tried) for row, tried in searched.items()}
