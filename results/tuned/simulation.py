"""
How often tests call rows ahead that are alike, when one run each chose their learning rates, and what the tests can see
(PLAN.md, Departures):

    PYTHONPATH=. python results/tuned/simulation.py
"""

import numpy as np

from tools.compare.analysis import MARGIN, estimate, holm, p_value
from tools.compare.tuning import best_rate, rates_to_try

EXPERIMENTS, SEEDS = 400, 10
GRID = (4e-3, 8e-3, 1.6e-2)
CONTRASTS = [(row, 0) for row in range(1, 7)] + [(1, 7), (1, 8)]  # row 0 is the baseline


def loss_at(rate, bend):
    """Above the loss of the best rate, which is the middle one."""
    return bend * np.log2(rate / GRID[1]) ** 2


def chosen_rate(bend, deviation, random):
    losses = {}
    while todo := rates_to_try(GRID, losses):
        losses |= {rate: loss_at(rate, bend) + random.normal(0, deviation) for rate in todo}
    return best_rate(losses)


def experiment(bend, paired_deviation, random):
    """Whether Holm's tests of nine rows alike find anything: against 0, against the margin."""
    deviation = paired_deviation / np.sqrt(2)  # of a single run
    rates = [chosen_rate(bend, deviation, random) for _ in range(9)]
    losses = np.array([loss_at(rate, bend) + random.normal(0, deviation, SEEDS) for rate in rates])
    entries = [estimate(list(losses[row] - losses[against])) for row, against in CONTRASTS]
    return [min(holm([p_value(entry, margin) for entry in entries], len(entries))) < 0.05 for margin in (0.0, MARGIN)]


def share(difference, paired, seeds, holds, random):
    """Of many contrasts with this true difference, those for whose estimate something holds."""
    entries = [estimate(list(random.normal(difference, paired, seeds))) for _ in range(5 * EXPERIMENTS)]
    return np.mean([holds(entry) for entry in entries])


def is_beyond(entry):
    return p_value(entry, MARGIN) < 0.05 / len(CONTRASTS)


def is_within(entry):
    return abs(entry["mean"]) + entry["half"] <= MARGIN


def show(bends, deviations, differences, random):
    """deviations: of a paired difference, each with a true difference to be found."""
    print("loss one doubling off, deviation of a paired difference: found against 0, beyond the margin")
    for bend in bends:
        for paired in deviations:
            found = np.mean([experiment(bend, paired, random) for _ in range(EXPERIMENTS)], axis=0)
            print(f"{bend} {paired}: {found[0]:.2f} {found[1]:.3f}")
    for difference, paired in zip(differences, deviations, strict=True):
        found = share(difference, paired, SEEDS, is_beyond, random)
        print(f"a difference of {difference}, deviation {paired}, {SEEDS} seeds: found with {found:.2f}")
    for seeds in (5, 10):
        within = [f"{share(0.0, paired, seeds, is_within, random):.2f}" for paired in deviations]
        print(f"no difference, {seeds} seeds: interval within the margin {', '.join(within)}")


if __name__ == "__main__":
    random = np.random.default_rng(0)
    show((0.002, 0.004, 0.008), (0.012, 0.017), (0.025, 0.032), random)  # as assumed before the search
    show((0.007, 0.010, 0.013), (0.023,), (0.04,), random)  # as seen in its first half
