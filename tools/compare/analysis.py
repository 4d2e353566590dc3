"""
What the records say: differences, intervals, p-values, worth. Pure functions over records, which are dicts as
records.py describes them.
"""

import math
import statistics
from collections import Counter

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq
from scipy.stats import t as student

from tools.compare.rows import CONTROLS, control_of, length_of_baseline, place, row_of_same_step

CONFIDENCE = 0.95
FEW = 3  # with fewer seeds there is no interval: of two it would reach 12.7 standard errors to each side
CHANGES_NO_STEP = set("seed epochs max_steps eval_every eval_tokens dtype learning_rate".split())
MARGIN = 0.01  # nats: the smallest difference worth speaking of; luck with learning rates makes smaller ones


# --- which records belong together ------------------------------------------------------------------------------------


def kind(record):
    """What records of one mean share: the code that can change a loss, the device's type and the number format."""
    return record["code"], record["machine"]["device"], record["machine"]["dtype"]


def one_kind(records):
    """The records of the kind that most are of, at a tie of the newest, and lines that name the others."""
    counts = Counter(map(kind, records))
    dates = sorted((record["date"], kind(record)) for record in records)
    newest = {one: date for date, one in dates}
    main = max(counts, key=lambda one: (counts[one], newest[one]))
    lines = []
    for other in (other for other in counts if other != main):
        names = [record_name(record) for record in records if kind(record) == other]
        commits = sorted({str(record["commit"]) for record in records if kind(record) == other})
        what = [
            f"{name} {theirs[:12]} instead of {ours[:12]}"
            for name, theirs, ours in zip(("code", "device", "dtype"), other, main, strict=True)
            if theirs != ours
        ]
        lines.append(f"Not in the means: {', '.join(names)}: {', '.join(what)} (commit {', '.join(commits)})")
    return [record for record in records if kind(record) == main], lines


def record_name(record):
    return f"{record['row']}-seed{record['seed']}"


# --- statistics -------------------------------------------------------------------------------------------------------


def mean_sd(values):
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def mean_or_none(values):
    return None if None in values else statistics.fmean(values)


def estimate(values):
    """The values, their mean, its standard error, and half of its 95 % interval by Student's t; None for few values."""
    mean, sd = mean_sd(values)
    error = half = None
    if len(values) >= FEW:
        error = sd / math.sqrt(len(values))
        half = error * float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    noise = half is None or abs(mean) <= half
    return {"each": values, "mean": mean, "error": error, "half": half, "pairs": len(values), "noise": noise}


def differences(records, others, key="loss"):
    """Of two rows, one per seed that both have."""
    theirs = {record["seed"]: record[key] for record in others}
    return [record[key] - theirs[record["seed"]] for record in records if record["seed"] in theirs]


def difference(records, others, key="loss"):
    """Their estimate, or None without a pair. Noise: the interval holds 0, or there is none."""
    pairs = differences(records, others, key)
    return estimate(pairs) if pairs else None


def paired_deviation(groups):
    """
    The standard deviation of a difference between two rows with one seed, as all rows together show it: what is left of
    the losses without the means of their rows and seeds, times √2. Of the rows with several seeds; None without two
    such rows that share two seeds.
    """
    losses = [{record["seed"]: record["loss"] for record in group} for group in groups.values() if len(group) > 1]
    seeds = set.intersection(*map(set, losses)) if len(losses) > 1 else set()
    if len(seeds) < 2:
        return None
    table = np.array([[row[seed] for seed in seeds] for row in losses])
    rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    return math.hypot(*rest.flat) * math.sqrt(2 / (len(losses) - 1) / (len(seeds) - 1))


def leads(groups):
    """
    Of the rows trained on as many tokens as the baseline, per seed: how many are ahead of it half-way (at the
    evaluation nearest to that), and how many of these are less so at the end, or no longer.
    """
    entries = []
    for base in groups.get("baseline", []):
        tokens, others = base["curve"]["tokens"], [record for row in same_tokens(groups) for record in groups[row]]
        half_way = int(np.argmin(np.abs(np.subtract(tokens, tokens[-1] / 2))))
        pairs = [
            [record["curve"]["loss"][n] - base["curve"]["loss"][n] for n in (half_way, -1)]
            for record in others
            if record["seed"] == base["seed"]
        ]
        shrunk = [end > half for half, end in pairs if half < 0]
        entries.append({"seed": base["seed"], "ahead_half_way": len(shrunk), "less_at_the_end": sum(shrunk)})
    return entries


def p_value(entry, margin=0.0):
    """
    Of a difference of several pairs: the paired t-test's, two-sided. With a margin, that of a difference at least as
    large if the true one lay at the margin: small means that it lies beyond.
    """
    mean, error = abs(entry["mean"]), entry["error"]
    if error == 0:
        return 0.0 if mean > margin else 1.0
    return float(sum(student.sf((mean + side) / error, entry["pairs"] - 1) for side in (-margin, margin)))


def holm(p_values, tests):
    """Holm's adjusted p-values, in the same order, of what is there of so many tests."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, n in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (tests - rank) * p_values[n]))
        adjusted[n] = highest
    return adjusted


def contrasts(groups, names):
    """
    The contrasts (row, against) whose rows have at least three pairs: p-values against no difference and against one of
    up to MARGIN, and Holm's over all that were named.
    """
    entries = []
    for row, against in names:
        entry = difference(groups.get(row, []), groups.get(against, []))
        if entry and entry["error"] is not None:
            tests = {"p": p_value(entry), "p_margin": p_value(entry, MARGIN)}
            entries.append({"row": row, "against": against, "difference": entry} | tests)
    for p, adjusted in (("p", "holm"), ("p_margin", "holm_margin")):
        for entry, value in zip(entries, holm([entry[p] for entry in entries], len(names)), strict=True):
            entry[adjusted] = value
    return entries


# --- worth ------------------------------------------------------------------------------------------------------------


def reach(points, loss):
    """
    What the baseline must spend to reach a loss, and where that lies: "inside" of what was measured, or at its end,
    "cheaper" or "dearer" than that. points: (cost, loss) of the baseline's lengths. Interpolated monotonically over
    the logarithm of the cost, without lengths that are no better than a shorter one.
    """
    frontier = []
    for cost, reached in sorted(points):
        if not frontier or reached < frontier[-1][1]:
            frontier.append((cost, reached))
    costs, losses = np.log([cost for cost, _ in frontier]), [reached for _, reached in frontier]
    if loss > losses[0]:
        return frontier[0][0], "cheaper"
    if loss < losses[-1]:
        return max(points)[0], "dearer"
    if loss in losses:
        return frontier[losses.index(loss)][0], "inside"
    curve = PchipInterpolator(costs, losses)
    return math.exp(brentq(lambda cost: curve(cost) - loss, costs[0], costs[-1])), "inside"


def worth(records, lengths, cost):
    """
    What the baseline must spend to reach a row's loss, divided by what the row spent, per seed: above 1 it pays.
    lengths: the baseline's records of all its lengths; cost: of a record. The geometric mean with its 95 % interval,
    of the seeds that have all lengths; where one lies outside of these a bound instead, which holds for the mean too.
    """
    ratios, sides = [], []
    rows = len({other["row"] for other in lengths})
    for record in records:
        points = [(cost(other), other["loss"]) for other in lengths if other["seed"] == record["seed"]]
        if len(points) < max(2, rows) or None in (cost(record), *(spent for spent, _ in points)):
            continue
        needed, side = reach(points, record["loss"])
        ratios.append(math.log(needed / cost(record)))
        sides.append(side)
    if not ratios:
        return None
    outside = {side for side in sides if side != "inside"}
    entry = {"each": [math.exp(ratio) for ratio in ratios], "sides": sides, "seeds": len(ratios)}
    entry |= {"mean": math.exp(statistics.fmean(ratios)), "low": None, "high": None}
    entry["bound"] = {(): None, ("dearer",): "above", ("cheaper",): "below"}.get(tuple(outside), "both")
    entry["outside"] = sum(side != "inside" for side in sides)
    if not outside and len(ratios) >= FEW:
        half = estimate(ratios)["half"]
        entry |= {"low": entry["mean"] * math.exp(-half), "high": entry["mean"] * math.exp(half)}
    return entry


# --- the table's entries ----------------------------------------------------------------------------------------------


def by_row(records):
    """{row: its records, by seed}, in the order of a table."""
    groups = {row: [] for row in sorted({record["row"] for record in records}, key=place)}
    for record in sorted(records, key=lambda record: record["seed"]):
        groups[record["row"]].append(record)
    return groups


def same_tokens(groups):
    """The rows trained on as many tokens as the baseline, and evaluated where it was."""
    tokens = {row: group[0]["curve"]["tokens"] for row, group in groups.items()}
    return [row for row in groups if tokens[row] == tokens.get("baseline")]


def training_flops(record):
    return record["curve"]["flops"][-1]


def speed_of(row, settings, speeds):
    """The row's measured speed, if it is one of this model: a baseline of another length steps as the baseline."""
    speed = speeds.get(row) or speeds.get(row_of_same_step(row))
    decisive = settings.keys() - CHANGES_NO_STEP
    if not speed or any(speed["settings"].get(key, settings[key]) != settings[key] for key in decisive):
        return dict.fromkeys("tokens_per_second relative rounds memory threads".split())
    return speed


def seconds_by_speed(speeds):
    """A function of a record: its seconds if it ran alone, at its speed relative to the baseline's of one day."""
    base = speeds.get("baseline", {}).get("tokens_per_second")

    def seconds(record):
        relative = speed_of(record["row"], record["settings"], speeds)["relative"]
        return base and relative and record["curve"]["tokens"][-1] / (base * relative)

    return seconds


def summarize(records, speeds):
    """One entry per row, in the order of a table; what is relative is so to the baseline."""
    groups = by_row(records)
    baselines = groups.get("baseline", [])
    base = baselines[0] if baselines else None
    rows_of_lengths = [row for row in groups if length_of_baseline(row) is not None]
    lengths = [record for row in rows_of_lengths for record in groups[row]]
    seconds = seconds_by_speed(speeds)
    knows_best = not any(record["best_loss"] is None for record in records)
    summary = []
    for row, group in groups.items():
        one, speed = group[0], speed_of(row, group[0]["settings"], speeds)
        loss, others = mean_sd([record["loss"] for record in group]), baselines if row != "baseline" else []
        controls = {control: groups.get(control_of(control, row)) for control in CONTROLS}
        summary.append(
            {
                "row": row,
                "seeds": sorted(record["seed"] for record in group),
                "learning_rate": one["settings"]["learning_rate"],
                "n_layer": one["settings"]["n_layer"],
                "loops": one["settings"].get("loops", 1),
                "tokens": one["curve"]["tokens"][-1],
                "parameters": one["parameters"],
                "relative_flops": base and one["flops_per_token"] / base["flops_per_token"],
                "relative_training_flops": base and training_flops(one) / training_flops(base),
                "tokens_per_second": speed["tokens_per_second"],
                "relative_speed": speed["relative"],
                "relative_speed_by_round": speed["rounds"],
                "memory": speed["memory"],
                "threads": speed["threads"],
                "loss": loss,
                "train_loss": mean_or_none([record["curve"]["train_loss"][-1] for record in group]),
                "best_loss": mean_sd([record["best_loss"] for record in group]) if knows_best else (None, None),
                "perplexity": math.exp(min(loss[0], 700)),
                "bits_per_byte": statistics.fmean(record["bits_per_byte"] for record in group),
                "accuracy": mean_sd([record["accuracy"] for record in group]),
                "difference": difference(group, others),
                "best_difference": difference(group, others, "best_loss") if knows_best else None,
                "against": {control: difference(group, like) for control, like in controls.items() if like},
                "worth_flops": None if row in rows_of_lengths else worth(group, lengths, training_flops),
                "worth_time": None if row in rows_of_lengths else worth(group, lengths, seconds),
            }
        )
    return summary
