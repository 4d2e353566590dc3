"""bench.py: not how fast anything is, but that the figures fit together."""

import json

import pytest
from helpers import command

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": 64, "residual_mode": "method3_2"}


def measure(name, **arguments):
    stdout, stderr = command("bench.py", "--measure", json.dumps([name, arguments])).communicate(timeout=120)
    assert stderr == ""
    return json.loads(stdout)


@pytest.mark.parametrize("what", ["train", "eval"])
def test_a_step(what):
    r = measure("measure_step", config=SHAPE, what=what, batch=3, checkpoint=what == "train", repeats=1)
    assert 0 < r["fastest"] == r["seconds"] == r["slowest"] and r["peak_bytes"] > 1e7
    assert r["tokens_per_second"] == pytest.approx(3 * 16 / r["seconds"])
    assert r["part"] == pytest.approx(r["limit"] / r["seconds"])
    # by hand: two layers and a re-run, 8.5 tokens seen on average; a training step is three times the forward pass
    project, mlp, attention = 2 * 16 * 16, 2 * 3 * 16 * 256, 2 * 2 * 16 * 8.5
    flops = 2 * (4 * project + mlp + attention) + (2 * project + mlp + attention) + 2 * 16 * 64
    flops *= 3 * 16 * (3 if what == "train" else 1)
    assert r["limit"] == pytest.approx(flops / (r["gflops"] * 1e9), rel=1e-6)


def test_generation_and_data():
    r = measure("measure_generate", config=SHAPE, context=8, new=4, repeats=1)
    assert 0 < r["slowest"] <= r["cached"] <= r["fastest"] and r["ratio"] == pytest.approx(r["cached"] / r["uncached"])
    assert r["cache_bytes"] == 8 * 16 * 4 * (2 * 2 + 1)  # k and v of two layers, v of the re-run
    r = measure("measure_data", batch=2, block_size=16)
    assert r["seconds"] > 0 and r["tokens"] == 32


def test_an_unknown_section():
    process = command("bench.py", "modez")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2 and stderr.startswith("error: unknown section 'modez': choose from modes, depth")
