"""bench.py: not how fast anything is, but that the figures fit together."""

import json
import sys

import pytest
from helpers import ROOT, command

import bench

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": 64, "residual_mode": "method3_2"}


def measure(name, **arguments):
    stdout, stderr = command("bench.py", "--measure", json.dumps([name, arguments])).communicate(timeout=120)
    assert stderr == ""
    return json.loads(stdout)


@pytest.mark.parametrize("what", ["train", "eval"])
def test_a_step(what):
    r = measure("measure_step", config=SHAPE, what=what, batch=3, checkpoint=what == "train", repeats=1)
    assert 0 < r["fastest"] == r["seconds"] == r["slowest"] and r["peak_bytes"] > 1e7
    assert (r["times_plain"] is not None) == (what == "train")
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


def test_relative_times_do_not_depend_on_the_rate():
    slow = {"gflops": 100.0, "limit": 1.0, "part": 0.5}  # 2 s for 100 GFLOP
    fast = {"gflops": 400.0, "limit": 0.5, "part": 0.25}  # 2 s for 200 GFLOP, at four times the rate
    assert bench.relative_time(fast, slow) == 4.0


def test_sections_are_printed_and_written(tmp_path, monkeypatch, capsys):
    """At a toy shape and in this process."""
    tiny = {"block_size": 16, "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 8, "ffn_hidden": 8}
    monkeypatch.setattr(bench, "NOTES", tiny)
    monkeypatch.setattr(bench, "matmul_rate", lambda: 1e11)
    monkeypatch.setattr(bench, "in_own_process", lambda measurement, **arguments: measurement(**arguments))
    sections = ["modes", "depth", "data"]
    monkeypatch.setattr(sys, "argv", ["bench.py", f"--out_dir={tmp_path}", *sections])
    bench.main()
    printed, written = capsys.readouterr().out, (tmp_path / "README.md").read_text()
    results = json.loads((tmp_path / "bench.json").read_text())
    assert list(results) == sections and (tmp_path / "depth.png").stat().st_size > 10_000
    for name in sections:
        assert bench.section_text(name, results[name]) in printed
        assert bench.section_text(name, results[name]) in written
    steps = results["depth"]["measured"]
    ours, base = steps["method3_2, 16 layers train, checkpointed"], steps["baseline, 16 layers train, eager"]
    (row,) = (line for line in written.splitlines() if "method3_2, 16 layers train, checkpointed" in line)
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells[0] == f"{ours['seconds']:.2f}" and cells[2] == f"{bench.relative_time(ours, base):.2f}"
    assert cells[3] == f"{ours['times_plain']:.2f}"
    assert cells[6] == f"{ours['part']:.2f}" and cells[8] == f"{ours['peak_bytes'] / base['peak_bytes']:.2f}"


def test_the_readme_prints_what_was_measured():
    results = json.loads((ROOT / "results/bench/bench.json").read_text())
    readme = (ROOT / "README.md").read_text()
    assert bench.modes_summary(results["modes"]["measured"]) in readme
    for mode in bench.LEARNED:
        r = results["generate"]["measured"][f"{mode}, 12 layers, context 512"]
        figures = f"{r['cached']:.1f} | {r['uncached']:.2f} | {r['ratio']:.0f} | {r['cache_bytes'] / 1e6:.1f}"
        assert f"| {mode} | {figures} |" in readme
    record = (ROOT / "results/bench/README.md").read_text()
    for name in bench.SECTIONS:
        assert bench.section_text(name, results[name]) in record
