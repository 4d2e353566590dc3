"""The same steps by two clones of this project in turn, and their table."""

import json
import os
import subprocess
import sys
from statistics import median

from tqdm import tqdm

from lib.errors import UserError
from lib.plots import markdown_table
from tools.bench.measure import ROOT, TRAINING
from tools.bench.sections import NOTES
from tools.compare.rows import parse

# runs in the clone's folder, so it uses nothing but what every clone has
PROGRAM = """
import json, resource, sys, time
import torch
from model import GPT, GPTConfig

config, training = json.loads(sys.argv[1])
torch.manual_seed(0)
model = GPT(GPTConfig(**config))  # the end, if this clone does not know the row
optimizer = model.configure_optimizers(**training)
x = torch.randint(0, model.config.vocab_size, (1, model.config.block_size))

def seconds(train):
    started = time.perf_counter()
    with torch.set_grad_enabled(train):
        loss = model.train(train)(x, x, return_logits=False)[1]
    if train:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - started

seconds(True), seconds(True), seconds(False)
for line in sys.stdin:
    answer = [seconds(True), seconds(False)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps([*answer, peak]), flush=True)
"""


class Clone:
    """A process of a clone that makes a training step and an evaluation when asked, and waits in between."""

    def __init__(self, folder, config):
        command = [sys.executable, "-c", PROGRAM, json.dumps([config, TRAINING])]
        keep = {"MALLOC_MMAP_THRESHOLD_": str(2**31 - 1), "MALLOC_TRIM_THRESHOLD_": str(2**62)}  # keep_freed_memory
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.folder, self.process = folder, subprocess.Popen(command, cwd=folder, env=os.environ | keep, **pipes)

    def ask(self):
        """Seconds of a training step and of an evaluation, and the largest resident set so far in bytes."""
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, ValueError):
            words = self.process.communicate()[1].strip().splitlines()
            raise UserError(f"{self.folder}: {words[-1] if words else 'no answer'}", status=1) from None

    def end(self):
        self.process.kill()
        self.process.communicate()


def compare_clones(other, rows, repeats):
    """{row: [(here, there), …]}, answers of this clone and the other; what one does not know is left out and named."""
    results = {}
    for row in tqdm(rows, unit="row", leave=False):
        clones = [Clone(folder, NOTES | parse(row).model_changes()) for folder in (ROOT, other)]
        try:
            for clone in clones:
                clone.ask()
            rounds = []
            for n in range(repeats):
                answers = {clone: clone.ask() for clone in clones[:: (-1) ** n]}  # neither is always the first
                rounds.append([answers[clone] for clone in clones])
            results[row] = rounds
        except UserError as error:
            tqdm.write(f"{row} is left out: {error}", file=sys.stderr)
        finally:
            for clone in clones:
                clone.end()
    return results


def clones_table(results):
    header = ["", "training here, s", "there, s", "ratio", "smallest–largest"]
    header += ["evaluation here, s", "there, s", "ratio", "smallest–largest", "peak here, MB", "there, MB", "ratio"]
    lines = []
    for row, rounds in results.items():
        line = [row]
        for i in (0, 1):
            ratios = sorted(here[i] / there[i] for here, there in rounds)
            line += [f"{median(answers[i] for answers in side):.3f}" for side in zip(*rounds, strict=True)]
            line += [f"{median(ratios):.3f}", f"{ratios[0]:.3f}–{ratios[-1]:.3f}"]
        here, there = (peak for _, _, peak in rounds[-1])
        lines.append([*line, f"{here / 1e6:,.0f}", f"{there / 1e6:,.0f}", f"{here / there:.3f}"])
    return markdown_table(header, lines)
