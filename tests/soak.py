"""
Kill train.py with SIGKILL at random moments, resume, and compare with a run that nobody interrupted. `make soak` does
it some hundred times; the tests do it a few times.
"""

import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from helpers import assert_same_run, good, start, tiny

SETTINGS = {"residual_mode": "method3_2", "dropout": 0.1, "max_steps": 30, "eval_every": 4, "checkpoint_every": 3}


def kill_and_resume(folder, kills, seed):
    """Start, kill and start again until there were so many kills; returns the steps after which they came."""
    chance = random.Random(seed)
    good("train.py", *tiny(folder / "whole", **SETTINGS))
    at, resumed = 0, []
    while len(resumed) < kills:
        last = at + chance.randint(0, 9)  # of the steps before the kill
        process = start("train.py", *tiny(folder / "killed", **SETTINGS))
        while process.poll() is None and metrics_are_whole(folder / "killed") < last:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.1))
        process.kill()
        if process.wait().status == 0:  # it was finished: begin anew
            assert_same_run(folder / "whole", folder / "killed")
            shutil.rmtree(folder / "killed")
            at = 0
            continue
        assert process.status == -9, process.stderr
        at = metrics_are_whole(folder / "killed")
        resumed.append(at)
    good("train.py", *tiny(folder / "killed", **SETTINGS))
    assert_same_run(folder / "whole", folder / "killed")
    left = {path.name for path in (folder / "killed").iterdir()}
    assert left == {path.name for path in (folder / "whole").iterdir()}, left
    return resumed


def metrics_are_whole(out_dir):
    """The last step in metrics.jsonl, after checking that no line is missing, doubled or torn; the last may be."""
    path = out_dir / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    steps = [json.loads(line)["step"] for line in whole if '"loss"' in line]
    assert steps == list(range(1, len(steps) + 1))
    return len(steps)


def main():
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seed = int(time.time())
    print(f"{kills} kills, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        resumed = kill_and_resume(Path(folder), kills, seed)
    print(f"killed after steps {resumed}; at the end parameters, metrics and evaluation were those of a whole run")


if __name__ == "__main__":
    main()
