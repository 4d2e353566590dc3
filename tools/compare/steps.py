"""
Training steps of one row on request, for measure.py: a number on stdin asks for so many, a line on stdout answers.

    python -m tools.compare.steps --out_dir=EMPTY_FOLDER --KEY=VALUE …     # keys of train.py

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
from train import SETTINGS, Trainer


def main():
    s = configure(sys.argv[1:], *SETTINGS)
    machine = Machine(s.device, s.dtype, s.compile)
    folder = RunFolder(s.out_dir, machine)  # to which nothing is written
    with folder.failures():
        data = Data(s.dataset, machine)
        t = start_training(s, machine, folder, data, checkpoint=None)
        data.cut(t.model.config.block_size, s.seed)
        trainer = Trainer(s, machine, folder, t, data)
        tell(machine, about(t.model, s.dataset, trainer.plan.steps, machine))
        while steps := asked_for(machine):
            started = time.perf_counter()
            for _ in range(steps):
                trainer.train_step()
            tell(machine, {"seconds": seconds_since(started) / steps, "memory": machine.peak_memory()})
    machine.leave()


def asked_for(machine):
    """How many steps, known to all processes; 0 at the end."""
    return int(*machine.sum(int(sys.stdin.readline() or 0) if machine.chief else 0))


def tell(machine, values):
    if machine.chief:
        print(json.dumps(values), flush=True)


if __name__ == "__main__":
    run_main(main)
