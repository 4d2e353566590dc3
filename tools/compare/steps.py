"""
Training steps of one row on request, for measure.py: a line on stdin asks for one, its answer is a line on stdout.

    python -m tools.compare.steps --KEY=VALUE …     # keys of train.py

It ends with stdin, so it cannot outlive the process that asks.
"""

import json
import sys
import time

from configurator import configure
from lib.errors import run_main
from lib.machine import Machine, seconds_since
from lib.run import RunFolder, about
from lib.start import Data, start_training
from train import ROOT, SETTINGS, Trainer


def main():
    s = configure(sys.argv[1:], *SETTINGS)
    machine = Machine(s.device, s.dtype, s.compile)
    folder = RunFolder(ROOT / "out", machine)  # to which nothing is written
    data = Data(s.dataset, machine)
    t = start_training(s, machine, folder, data, checkpoint=None)
    data.cut(t.model.config.block_size, s.seed)
    trainer = Trainer(s, machine, folder, t, data)
    tell(machine, about(t.model, s.dataset, trainer.plan.steps, machine))
    while any(machine.sum(machine.chief and bool(sys.stdin.readline()))):  # all processes go on, or none
        started = time.perf_counter()
        trainer.train_step()
        tell(machine, {"seconds": seconds_since(started), "memory": machine.peak_memory()})
    machine.leave()


def tell(machine, values):
    if machine.chief:
        print(json.dumps(values), flush=True)


if __name__ == "__main__":
    run_main(main)
