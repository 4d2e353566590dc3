"""tools/bench: not how fast anything is, but that the figures fit together."""

import json
import re
import shutil
import sys

import pytest
from helpers import ROOT, command

import tools.bench.__main__ as bench
from lib.errors import UserError
from model import GPT, GPTConfig, ResidualMode
from tools.bench import against, measure, sections
from tools.bench.record import section_text
from tools.compare.rows import parse

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": 64, "residual_mode": "method3_2"}
TOY = {"block_size": 16, "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 8, "ffn_hidden": 8}


@pytest.fixture
def toy(monkeypatch):
    """main() with these arguments, at a toy shape and in this process."""
    for module in (sections, against):
        monkeypatch.setattr(module, "NOTES", TOY)
    monkeypatch.setattr(measure, "matmul_rate", lambda: 1e11)
    monkeypatch.setattr(measure, "in_own_process", lambda measurement, **arguments: measurement(**arguments))

    def main(*args):
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, args)])
        bench.main()

    return main


@pytest.mark.parametrize("what", ["train", "eval"])
def test_a_step(what):
    arguments = {"config": SHAPE, "what": what, "repeats": 1, "batch": 3}
    if what == "train":
        r = measure.in_own_process(measure.step, variant="checkpointed", **arguments)
    else:
        r = measure.step(**arguments)
    assert 0 < r["fastest"] == r["seconds"] == r["slowest"] and r["peak_bytes"] > 1e7
    assert (r["times_plain"] is not None) == (what == "train")
    assert r["tokens_per_second"] == pytest.approx(3 * 16 / r["seconds"])
    assert r["part"] == pytest.approx(r["limit"] / r["seconds"])
    # by hand: two layers, a re-run and a sum of two outputs, 8.5 tokens seen on average; a training step is three times
    # the forward pass
    project, mlp, attention, mixed = 2 * 16 * 16, 2 * 3 * 16 * 256, 2 * 2 * 16 * 8.5, 2 * 2 * 16
    flops = 2 * (4 * project + mlp + attention) + (2 * project + mlp + attention) + mixed + 2 * 16 * 64
    flops *= 3 * 16 * (3 if what == "train" else 1)
    assert r["limit"] == pytest.approx(flops / (r["gflops"] * 1e9), rel=1e-6)
    # k and v of two layers, v of the re-run
    assert r["cache_bytes"] == (16 * 16 * 4 * (2 * 2 + 1) if what == "eval" else None)


def test_generation_and_data():
    r = measure.generation(config=SHAPE, context=8, repeats=1, new=4)
    assert 0 < r["slowest"] <= r["cached"] <= r["fastest"] and r["ratio"] == pytest.approx(r["cached"] / r["uncached"])
    assert r["cache_bytes"] == 8 * 16 * 4 * (2 * 2 + 1)
    r = measure.batches(config=SHAPE, repeats=1, batch=2)
    assert r["seconds"] > 0 and r["tokens"] == 32 and r["part"] > 0


def test_beside_others():
    """Stock modules make the same model as ours, and transformers the same text, which is checked there."""
    config = TOY | {"n_kv_head": None, "ffn_hidden": None} | sections.GPT2_FORM
    ours = GPT(GPTConfig(**config))
    assert sum(p.numel() for p in measure.StockGPT2(ours.config).parameters()) == ours.num_params()
    r = measure.beside_stock(config=config, batch=2, repeats=3)
    assert len(r["ratios"]) == 3 and r["ratio"] == r["ratios"][1] and r["ours"] > 0 < r["stock"]
    r = measure.beside_transformers(config=TOY, repeats=1, context=8, new=4)
    assert r["ours"] > 0 and r["ratio"] == pytest.approx(r["ours"] / r["transformers"])


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["modez"], "unknown section 'modez': choose from modes, depth"),
        (["modes", "--repeats=0"], "repeats must be at least 1"),
        (["modes", "--rows=method9"], "^rows: row 'method9' is not known: choose from baseline"),
        (["modes", "--rows=method3_2-often"], "^rows: row 'method3_2-often' is not known"),
        (["modes", "--rows=baseline-1"], "^rows: row 'baseline-1': baseline runs nothing again"),
        (["modes", "--rows=deeper"], "^rows: 'deeper' is a baseline"),
        (["modes", "--rows=method3_2-x2"], "^rows: 'method3_2-x2' is a baseline or has the step of another row"),
        (["depth", "--rows=mudd"], "--rows is for modes"),
        (["against"], "name one other clone"),
        (["against", "tests"], "tests is no clone"),
        (["tables", "--out_dir=tests"], "tests/bench.json"),
    ],
)
def test_a_mistake_is_one_line(toy, arguments, words):
    with pytest.raises(UserError, match=words):
        toy(*arguments)


def test_a_mistake_through_the_real_command(tmp_path):
    process = command("-m", "tools.bench", "modez", f"--out_dir={tmp_path / 'new'}")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 2 and stdout == "" and stderr.startswith("error: unknown section 'modez'")
    assert stderr.count("\n") == 1 and not (tmp_path / "new").exists()


def test_relative_times_do_not_depend_on_the_rate():
    slow = {"gflops": 100.0, "limit": 1.0, "part": 0.5}  # 2 s for 100 GFLOP
    fast = {"gflops": 400.0, "limit": 0.5, "part": 0.25}  # 2 s for 200 GFLOP, at four times the rate
    assert sections.relative_time(fast, slow) == 4.0


def test_sections_are_printed_and_written(toy, tmp_path, capsys):
    names = ["modes", "depth", "data"]
    toy(*names, f"--out_dir={tmp_path}", "--repeats=1")
    printed, written = capsys.readouterr().out, (tmp_path / "README.md").read_text()
    results = json.loads((tmp_path / "bench.json").read_text())
    assert list(results) == names and (tmp_path / "depth.png").stat().st_size > 10_000
    for name in names:
        assert section_text(name, results[name]) in printed
        assert section_text(name, results[name]) in written
    # every mode has its lines, also one that is newer than this test; what re-runs was checkpointed as well
    for row in [*(mode.value for mode in ResidualMode), "method3_2-1", "method3_3-stored"]:
        assert {f"{row}, train, eager", f"{row}, eval, eager"} <= results["modes"]["measured"].keys()
        reruns = GPTConfig(**TOY | parse(row).model_changes()).n_reruns
        assert bool(reruns) == (f"{row}, train, checkpointed" in results["modes"]["measured"])
    steps = results["depth"]["measured"]
    ours, base = steps["method3_2, 16 layers train, checkpointed"], steps["baseline, 16 layers train, eager"]
    (row,) = (line for line in written.splitlines() if "method3_2, 16 layers train, checkpointed" in line)
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells[0] == f"{ours['seconds']:.2f}" and cells[2] == f"{sections.relative_time(ours, base):.2f}"
    assert cells[3] == f"{ours['times_plain']:.2f}"
    assert cells[6] == f"{ours['part']:.2f}" and cells[8] == f"{ours['peak_bytes'] / base['peak_bytes']:.2f}"
    # the cache: k and v of every layer and v of each re-run, at most k of them per layer
    for row, k in {"baseline": 0, "method3_2": 15, "method3_2-1": 1, "method3_2-2": 2}.items():
        for n_layer in (4, 8, 16):
            values = 2 * n_layer + sum(min(m, k) for m in range(n_layer))
            assert steps[f"{row}, {n_layer} layers eval, eager"]["cache_bytes"] == 16 * 4 * 4 * values

    before = (tmp_path / "README.md").read_bytes(), (tmp_path / "depth.png").read_bytes()
    (tmp_path / "README.md").unlink()
    toy("tables", f"--out_dir={tmp_path}")
    assert before == ((tmp_path / "README.md").read_bytes(), (tmp_path / "depth.png").read_bytes())


def test_rows_join_the_record(toy, tmp_path):
    """In pieces, and beside a record that has no figure for the cache."""
    toy("modes", "--rows=mudd", f"--out_dir={tmp_path}", "--repeats=1")  # brings the baseline along
    record = tmp_path / "bench.json"
    first = json.loads(record.read_text())
    cases = ["baseline, train, eager", "baseline, eval, eager", "mudd, train, eager", "mudd, eval, eager"]
    assert list(first["modes"]["measured"]) == cases
    for r in first["modes"]["measured"].values():
        del r["cache_bytes"]
    first["modes"]["about"] |= {"date": "2020-01-01", "code": "before"}
    record.write_text(json.dumps(first))
    toy("modes", "--rows=method3_2", f"--out_dir={tmp_path}", "--repeats=1")
    second = json.loads(record.read_text())["modes"]
    assert list(second["measured"]) == [
        *cases[:2],
        *(f"method3_2, {case}" for case in ("train, eager", "train, checkpointed", "eval, eager")),
        *cases[2:],
    ]
    assert {case: second["measured"][case] for case in cases} == first["modes"]["measured"]
    assert second["about"]["date"].startswith("2020-01-01, 2") and second["about"]["code"].startswith("before, ")
    written = (tmp_path / "README.md").read_text()
    assert sections.modes_table(second["measured"]) in written and "| mudd, eval " in written
    toy("modes", "--rows=mudd-x1, mudd", f"--out_dir={tmp_path}", "--repeats=1")  # measured again: in its place
    third = json.loads(record.read_text())["modes"]["measured"]
    assert list(third) == list(second["measured"]) and third[cases[0]] == second["measured"][cases[0]]
    assert third["mudd, train, eager"] != second["measured"]["mudd, train, eager"]


def test_rows_of_two_machines_are_not_joined(toy, tmp_path):
    record = tmp_path / "bench.json"
    shutil.copy(ROOT / "results/bench/bench.json", record)
    before = json.loads(record.read_text())
    before["modes"]["about"]["machine"] = "another"
    record.write_text(json.dumps(before))
    with pytest.raises(UserError, match="modes was measured with machine another"):
        toy("modes", "--rows=mudd", f"--out_dir={tmp_path}")
    assert json.loads(record.read_text()) == before


def test_a_short_table_needs_its_rows(toy, tmp_path):
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(UserError, match="modes, which the record does not hold"):
        toy("tables", "--rows=mudd", f"--out_dir={tmp_path}")
    assert not (tmp_path / "README.md").exists()


def test_two_clones_in_turn(toy, tmp_path, monkeypatch, capsys):
    """The other is this one without a mode, as an older one would be."""
    other = tmp_path / "other"
    shutil.copytree(ROOT / "lib", other / "lib")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, other)
    source = (other / "model.py").read_text()
    (other / "model.py").write_text(source.replace('"mudd", rivals.MUDD', '"muddle", rivals.MUDD'))
    monkeypatch.setattr(bench, "compare_clones", keep(against.compare_clones, kept := []))
    toy("against", other, "--rows=method3_2,mudd", "--repeats=2")
    printed = capsys.readouterr()
    (results,) = kept
    assert list(results) == ["method3_2"] and "mudd is left out" in printed.err and str(other) in printed.err
    assert len(results["method3_2"]) == 2  # rounds of (here, there)
    for answers in results["method3_2"]:
        for train, evaluate, peak in answers:
            assert 0 < evaluate and 0 < train and peak > 1e7
    assert against.clones_table(results) in printed.out


def keep(function, kept):
    def keeping(*args):
        kept.append(function(*args))
        return kept[-1]

    return keeping


def test_the_table_of_two_clones():
    """The median of the rounds' ratios, not the ratio of the medians."""
    rounds = [
        ([2.0, 1.0, 200e6], [1.0, 1.0, 100e6]),
        ([3.0, 1.0, 210e6], [3.0, 2.0, 100e6]),
        ([9.0, 1.0, 220e6], [3.0, 4.0, 110e6]),
    ]
    (line,) = against.clones_table({"mudd": rounds}).splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "mudd",
        *("3.000", "3.000", "2.000", "1.000–3.000"),
        *("1.000", "2.000", "0.500", "0.250–1.000"),
        *("220", "110", "2.000"),
    ]


def test_the_readme_prints_what_was_measured():
    """Its short table, of whichever rows: `python -m tools.bench tables --out_dir=results/bench --rows=…` prints it."""
    results = json.loads((ROOT / "results/bench/bench.json").read_text())
    speed = (ROOT / "README.md").read_text().partition("\n## Speed and memory\n")[2]
    table = re.search(r"(^\|.*\n)+", speed, re.MULTILINE)[0].rstrip()
    baseline, *rows = (line.split("|")[1].strip() for line in table.splitlines()[2:])
    assert baseline == "baseline" and len(rows) >= 2
    assert table == sections.readme_table(results["modes"]["measured"], rows)
    record = (ROOT / "results/bench/README.md").read_text()
    for name in sections.SECTIONS:
        assert section_text(name, results[name]) in record


def test_the_short_table():
    base = {"gflops": 100.0, "limit": 1.0, "part": 0.5, "seconds": 2.0, "peak_bytes": 1e9}
    twice = base | {"part": 0.25, "seconds": 4.0, "peak_bytes": 1.5e9}
    results = {"baseline, train, eager": base, "baseline, eval, eager": base | {"seconds": 0.5}}
    results |= {"method1, train, eager": twice, "method1, eval, eager": base, "mudd, eval, eager": twice}
    results |= {"method1, train, checkpointed": twice | {"times_plain": 1.25, "peak_bytes": 1.1e9}}
    results |= {"mudd, train, eager": base}
    lines = sections.readme_table(results, ["method1", "mudd"]).splitlines()[2:]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines] == [
        ["baseline", "2.00 s", "1.00 GB", "0.50 s", "", ""],
        ["method1", "× 2.00", "× 1.50", "× 1.00", "× 2.50", "× 1.10"],
        ["mudd", "× 1.00", "× 1.00", "× 2.00", "", ""],
    ]
    with pytest.raises(UserError, match="the record holds no row 'hc'"):
        sections.readme_table(results, ["hc"])
