"""compare.py and report.py: a tiny comparison from outside, and the arithmetic of its table against values by hand."""

import contextlib
import fcntl
import io
import json
import math
import re
import shutil
import signal
import statistics
import sys
import time
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
from helpers import TINY, command, dataset, options

import compare
import report
from compare import CompareConfig, Scale, summarize
from configurator import UserError, configure
from model import GPTConfig
from train import TrainConfig, load_checkpoint

STEPS = 60
SMALL = TINY | {"n_layer": 2, "micro_batch": 8, "max_steps": STEPS, "eval_every": 30, "checkpoint_every": 20}
ROWS, SEEDS = ["baseline", "method3_2"], [1, 2]
NAMES = {f"{row}-seed{seed}" for row in ROWS for seed in SEEDS}


def arguments(folder, **settings):
    places = {"out_dir": folder / "out", "results_dir": folder / "results", "name": "tiny", "dataset": dataset()}
    return options(**SMALL | {"modes": ",".join(ROWS), "seeds": "1,2"} | places | settings)


def main(monkeypatch, module, *args):
    monkeypatch.setattr(sys, "argv", ["", *map(str, args)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own process keeps its handlers
    module.main()


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def count_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def records(folder):
    """Every record with what would change if it were written again."""
    stats = {path.stem: path.stat() for path in (folder / "results/runs").glob("*.json")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


@pytest.fixture(scope="module")
def sittings(tmp_path_factory):
    """One comparison in three sittings: stopped in the middle of its second run; one run made to fail; the rest."""
    folder = tmp_path_factory.mktemp("comparison")
    out = folder / "out"
    seen = SimpleNamespace(folder=folder, out=out)
    args = ["compare.py", *arguments(folder)]

    process = command(*args)
    wait_for(lambda: count_lines(out / "method3_2-seed1/metrics.jsonl") >= 3, process)
    process.send_signal(signal.SIGINT)
    _, seen.stderr1 = process.communicate(timeout=60)
    seen.status1, seen.records1 = process.returncode, records(folder)
    seen.locks = []
    for path in out.glob("*/lock"):
        with open(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if a child still lives
            seen.locks.append(path.parent.name)
    seen.stopped_at = load_checkpoint(out / "method3_2-seed1/ckpt.pt")["step"]
    seen.metrics1 = (out / "method3_2-seed1/metrics.jsonl").read_bytes()

    (out / "method3_2-seed2").write_text("in the way")
    process = command(*args, "--jobs=2")
    _, seen.stderr2 = process.communicate(timeout=120)
    seen.status2, seen.records2 = process.returncode, records(folder)
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(io.StringIO()):
        main(monkeypatch, compare, *arguments(folder, modes="baseline"))  # nothing to do, and the failure stays known
    seen.readme2 = (folder / "results/README.md").read_text()

    (out / "method3_2-seed2").unlink()
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(io.StringIO()) as stdout:
        main(monkeypatch, compare, *args[1:])  # here, which saves the imports
    seen.stdout3, seen.records3 = stdout.getvalue(), records(folder)
    return seen


def test_stopped_in_the_middle_and_continued(sittings):
    assert sittings.status1 == 130 and "the same command goes on" in sittings.stderr1
    assert "Traceback" not in sittings.stderr1
    assert sittings.records1.keys() == {"baseline-seed1"}
    assert sorted(sittings.locks) == ["baseline-seed1", "method3_2-seed1"]
    assert 3 <= sittings.stopped_at < STEPS
    # the stopped run went on from its checkpoint: its first lines are the ones of the first sitting, times included
    metrics = (sittings.out / "method3_2-seed1/metrics.jsonl").read_bytes()
    assert metrics.startswith(sittings.metrics1) and len(metrics) > len(sittings.metrics1)
    # and no record was written twice
    assert sittings.records1.items() <= sittings.records2.items() <= sittings.records3.items()
    assert sittings.records3.keys() == NAMES


def test_a_failed_run_stops_no_other(sittings):
    assert sittings.status2 == 1
    assert sittings.records2.keys() == NAMES - {"method3_2-seed2"}
    failure = re.search("method3_2-seed2 failed: exit status 2, error: .*cannot be written to", sittings.stderr2)
    assert failure, sittings.stderr2
    assert sittings.stderr2.splitlines()[-1] == "error: 1 of 4 runs failed: method3_2-seed2"
    assert "- method3_2-seed2: exit status 2, error: " in sittings.readme2
    assert "method3_2-seed2: validation loss" in sittings.stdout3  # tried again in the last sitting
    assert "Failed" not in (sittings.folder / "results/README.md").read_text()


def test_results_are_those_of_the_runs(sittings):
    results = json.loads((sittings.folder / "results/results.json").read_text())
    assert [entry["row"] for entry in results["rows"]] == ROWS
    for entry in results["rows"]:
        finals = [
            json.loads((sittings.out / f"{entry['row']}-seed{seed}/eval_results.json").read_text()) for seed in SEEDS
        ]
        assert entry["loss"][0] == pytest.approx(statistics.mean(final["eval_loss"] for final in finals))
        assert entry["accuracy"][0] == pytest.approx(statistics.mean(final["eval_accuracy"] for final in finals))
        assert entry["seeds"] == SEEDS and entry["tokens"] == STEPS * SMALL["batch_tokens"]
    record = json.loads((sittings.folder / "results/runs/method3_2-seed1.json").read_text())
    assert record["weights"] == json.loads((sittings.out / "method3_2-seed1/residual_weights.json").read_text())
    assert record["curve"]["tokens"] == [30 * 64, 60 * 64]
    assert record["curve"]["flops"] == [3 * record["flops_per_token"] * tokens for tokens in (30 * 64, 60 * 64)]
    assert str(sittings.folder) not in json.dumps(record)  # it is to be published

    readme = (sittings.folder / "results/README.md").read_text()
    table = [line for line in readme.splitlines() if line.startswith("|")]
    assert len(table) == 4 and "\n".join(table) in sittings.stdout3
    made_by = next(line for line in readme.splitlines() if line.startswith("    python compare.py"))
    assert made_by.endswith("--modes=baseline,method3_2 --seeds=1,2 --name=tiny") and "--n_layer=2" in made_by
    for name in re.findall(r"\((\w+\.png)\)", readme):
        check_picture(sittings.folder / "results" / name)


def check_picture(path):
    height, width, _ = matplotlib.image.imread(path).shape
    assert 300 < height and 300 < width <= 1400


@pytest.mark.parametrize("change", [{"learning_rate": 1e-3}, {"max_steps": 70}, {"n_layer": 3}])
def test_records_of_other_settings_are_refused(sittings, monkeypatch, change):
    key = next(iter(change))
    before = records(sittings.folder)
    with pytest.raises(UserError, match=f"made under other settings: {key} is {SMALL.get(key, 0.002)} there and"):
        main(monkeypatch, compare, *arguments(sittings.folder, **change, seeds="7"))
    # nor does a run go on from what another schedule left in its folder
    scale = Scale(configure(arguments(sittings.folder, **change), CompareConfig, TrainConfig, GPTConfig))
    run = compare.Run(scale, "baseline", 1, sittings.out, sittings.folder / "nowhere")
    with pytest.raises(UserError, match=f"baseline-seed1 was made under other settings: {key}"):
        run.start(None, 0)
    assert records(sittings.folder) == before


def test_mistakes_end_with_a_sentence(tmp_path, monkeypatch):
    for change, words in [
        ({"modes": "baseline,method9"}, "'method9' is not known"),
        ({"seeds": "1,x"}, "seeds must be ints"),
        ({"jobs": 0}, "jobs must be at least 1"),
        ({"seed": 3}, "compare.py sets seed itself"),
        ({"learning_rat": 3}, "did you mean learning_rate"),
        ({"name": "../x"}, "plain folder name"),
        ({"norm": "batchnorm"}, "method3_2: .*batchnorm cannot be re-run"),
        ({"name": ".."}, "plain folder name"),
        ({"epochs": 0, "max_steps": None}, "epochs must be more than 0"),
        ({"seeds": "-1"}, "seed must not be negative"),
        ({"results_dir": compare.ROOT}, "holds a README.md that is not compare.py's"),
        ({"results_dir": compare.ROOT / "LICENSE"}, "cannot be made: Not a directory"),
    ]:
        with pytest.raises(UserError, match=words):
            main(monkeypatch, compare, *arguments(tmp_path, **change))
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("OMP_NUM_THREADS", "two")
    with pytest.raises(UserError, match="whole number of threads, not 'two'"):
        compare.threads(SimpleNamespace(jobs=1, nproc=1))


# the table by hand


def record(row, seed, loss, best_loss, accuracy=0.5, flops=100, tokens=1000, n_layer=4):
    return {
        "row": row,
        "seed": seed,
        "settings": {"n_layer": n_layer, "learning_rate": 0.1, "seed": seed},
        "parameters": 10 * n_layer,
        "flops_per_token": flops,
        "loss": loss,
        "best_loss": best_loss,
        "perplexity": math.exp(loss),
        "accuracy": accuracy,
        "curve": {"tokens": [tokens // 2, tokens], "flops": [1.5 * flops * tokens, 3 * flops * tokens]},
    }


def test_arithmetic_of_the_table():
    speed = {
        "tokens_per_second": 50.0,
        "relative": 0.25,
        "memory": 3 * 2**20,
        "threads": 2,
        "settings": {"learning_rate": 0.1},
    }
    entries = summarize(
        [
            record("baseline", 1, 2.0, 1.9, accuracy=0.4),
            record("baseline", 2, 2.2, 2.1, accuracy=0.5),
            record("baseline", 3, 2.4, 2.3, accuracy=0.6),
            record("longer", 1, 1.5, 1.4, tokens=4500),
            record("method3_2", 1, 1.9, 1.9, flops=450),
            record("method3_2", 2, 2.05, 2.1, flops=450),
            record("method3_2", 3, 2.3, 2.4, flops=450),
            record("method3_2", 9, 7.0, 7.0, flops=450),  # no baseline has this seed: it is in no pair
        ],
        {"method3_2": speed, "baseline": speed | {"settings": {"learning_rate": 0.2}}},
    )
    assert [entry["row"] for entry in entries] == ["baseline", "method3_2", "longer"]
    baseline, method, longer = entries
    assert baseline["loss"] == pytest.approx((2.2, 0.2)) and baseline["best_loss"] == pytest.approx((2.1, 0.2))
    assert baseline["accuracy"] == pytest.approx((0.5, 0.1))
    assert baseline["perplexity"][0] == pytest.approx((7.38906 + 9.02501 + 11.02318) / 3, rel=1e-5)
    assert baseline["difference"] is None and baseline["memory"] is None  # measured with another learning rate

    # differences -0.1, -0.15, -0.1: mean -0.1167, deviation 0.0289, standard error 0.0167
    assert method["difference"]["mean"] == pytest.approx(-0.35 / 3)
    assert method["difference"]["error"] == pytest.approx(0.05 / 3)
    assert method["difference"]["pairs"] == 3 and not method["difference"]["noise"]
    # 0, 0, 0.1: mean 0.0333, deviation 0.0577, standard error 0.0333
    assert method["best_difference"]["mean"] == pytest.approx(0.1 / 3)
    assert method["best_difference"]["error"] == pytest.approx(0.1 / 3) and method["best_difference"]["noise"]
    assert method["relative_flops"] == method["relative_training_flops"] == 4.5
    assert method["relative_speed"] == 0.25 and method["tokens_per_second"] == 50

    assert longer["relative_flops"] == 1 and longer["relative_training_flops"] == 4.5
    assert longer["loss"] == (1.5, None)
    assert longer["difference"] == {"mean": -0.5, "error": None, "pairs": 1, "noise": True}

    cells = dict(zip(compare.HEADER, compare.table_row(method), strict=True))
    assert cells["Δ loss"] == "-0.1167 ± 0.0167" and cells["Δ best loss"] == "≈ +0.0333 ± 0.0333"
    assert (cells["FLOPs/token"], cells["tokens/s"], cells["peak MB"]) == ("4.50", "0.25", "3")
    cells = dict(zip(compare.HEADER, compare.table_row(longer), strict=True))
    assert (cells["loss"], cells["Δ loss"], cells["tokens/s"]) == ("1.5000", "≈ -0.5000", "–")


@pytest.mark.parametrize("pairs, errors", [(2, 12.706), (3, 4.303), (5, 2.776), (10, 2.262), (40, 2.262)])
def test_noise_is_what_a_student_t_test_calls_so(pairs, errors):
    """errors: the two-sided 95 % quantile of t with pairs - 1 degrees of freedom; beyond 10 pairs that of 10."""
    deviations = np.linspace(-1, 1, pairs)
    standard_error = deviations.std(ddof=1) / math.sqrt(pairs)
    baseline = {seed: {"loss": 0.0} for seed in range(pairs)}
    for factor, noise in ((0.99, True), (1.01, False)):
        losses = deviations - factor * errors * standard_error
        records = [{"row": "method1", "seed": seed, "loss": loss} for seed, loss in enumerate(losses)]
        assert compare.difference(records, baseline, "loss")["noise"] == noise


def test_controls_match_method3_2(tmp_path):
    """Depth and length of the controls, from the FLOPs of each matrix."""
    d, ffn, vocab, length, n = 16, 32, 320, 8, 6
    attention = 4 * d * (length + 1) / 2
    layer = 2 * (4 * d * d + 3 * d * ffn) + attention
    rerun = 2 * (2 * d * d + 3 * d * ffn) + attention
    head = 2 * d * vocab
    baseline, method = n * layer + head, n * layer + n * (n - 1) / 2 * rerun + head
    depth = min(range(1, 100), key=lambda k: abs(k * layer + head - method))
    assert depth > n

    def scale(**settings):
        args = options(**{k: v for k, v in SMALL.items() if k != "max_steps"} | {"dataset": dataset()} | settings)
        return Scale(configure(args, CompareConfig, TrainConfig, GPTConfig))

    assert scale(n_layer=n).flops_per_token({}) == baseline
    assert scale(n_layer=n).changes("deeper") == {"n_layer": depth}
    assert scale(n_layer=n, max_steps=100).changes("longer") == {"max_steps": round(100 * method / baseline)}
    assert scale(n_layer=n, epochs=2.0).changes("longer") == {"epochs": pytest.approx(2 * method / baseline)}
    assert scale().changes("method3_1-stored") == {"residual_mode": "method3_1", "recompute": False}
    assert scale().changes("method3_2-fast") == {"residual_mode": "method3_2", "residual_lr_scale": 10.0}


def test_measured_speed_is_relative_to_the_same_round(tmp_path, monkeypatch):
    """The machine is now fast, now slow; the rounds' ratios are 0.5, 0.4 and 0.25, that of the medians is 0.25."""
    rates = iter([1000, 500, 100, 40, 500, 125])

    def start_training(options, s, slot, log):
        rate, folder = next(rates), next(o for o in options if o.startswith("--out_dir=")).removeprefix("--out_dir=")
        assert {"--stop_at=8", "--eval_every=1000000000"} <= set(options)
        lines = [{"step": 1, "tokens_per_sec": 1.0, "memory": 7}] * 2  # warming up
        lines += [{"step": 3, "tokens_per_sec": rate, "memory": rate}] * 6
        with open(f"{folder}/metrics.jsonl", "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        return SimpleNamespace(wait=lambda: 0, terminate=lambda: None)

    monkeypatch.setattr(compare, "start_training", start_training)
    main(monkeypatch, compare, *arguments(tmp_path, modes="method3_2", measure=True))
    speeds = json.loads((tmp_path / "results/speed.json").read_text())
    assert speeds["baseline"]["relative"] == 1 and speeds["baseline"]["tokens_per_second"] == 500
    assert speeds["method3_2"]["relative"] == 0.4 and speeds["method3_2"]["memory"] == 500


def test_a_job_gets_its_share_of_the_machine(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(compare.subprocess, "Popen", lambda command, **rest: started.append((command, rest["env"])))
    monkeypatch.setattr(compare.os, "cpu_count", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for gpus, jobs, nproc in [(0, 3, 1), (4, 2, 2), (2, 2, 1)]:
        if jobs == 2 and nproc == 1:  # a cluster's choice
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
        monkeypatch.setattr(compare.torch.cuda, "device_count", lambda gpus=gpus: gpus)
        compare.start_training(["--seed=1"], SimpleNamespace(jobs=jobs, nproc=nproc), jobs - 1, tmp_path / "log")
    (alone, cpu), (torchrun, gpu), (_, given) = started
    assert given["CUDA_VISIBLE_DEVICES"] == "7"
    assert alone[1:] == [str(compare.ROOT / "train.py"), "--seed=1"]
    assert cpu["OMP_NUM_THREADS"] == "4" and "CUDA_VISIBLE_DEVICES" not in cpu
    assert torchrun[2] == "torch.distributed.run" and "--nproc_per_node=2" in torchrun
    assert gpu["OMP_NUM_THREADS"] == "3" and gpu["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize("name", ["shakespeare", "pydocs"])
def test_the_readme_prints_what_the_results_say(name):
    lines = (compare.ROOT / "README.md").read_text().splitlines()
    for entry in json.loads((compare.ROOT / "results" / name / "results.json").read_text())["rows"]:
        cells = dict(zip(compare.HEADER, compare.table_row(entry), strict=True))
        rows = [line for line in lines if line.startswith(f"| {cells['row']} ")]
        assert any(cells["loss"] in line and cells["Δ loss"] in line for line in rows), cells


# report.py


def test_report_of_finished_runs(sittings, monkeypatch, capsys):
    folders = [sittings.out / "baseline-seed1", sittings.out / "method3_2-seed1"]
    main(monkeypatch, report, *folders)
    printed = capsys.readouterr().out
    for folder in folders:
        results = json.loads((folder / "eval_results.json").read_text())
        row = next(line for line in printed.splitlines() if line.startswith(f"| {folder.name}"))
        assert f"{results['eval_loss']:.4f}" in row and f"{results['eval_accuracy']:.4f}" in row
        check_picture(folder / "loss.png")
    assert (folders[1] / "residual_weights.txt").read_text() in printed
    check_picture(folders[1] / "residual_weights.png")
    check_picture(sittings.out / "loss.png")
    assert not (folders[0] / "residual_weights.png").exists()


def test_report_of_a_folder_without_a_run(tmp_path):
    process = command("report.py", tmp_path)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 2 and stdout == ""
    assert stderr == f"error: {tmp_path} holds no run: there is no ckpt.pt in it\n"


def test_report_of_a_run_that_is_being_written(sittings, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(sittings.out / "baseline-seed1", tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 6')
    main(monkeypatch, report, run)
    assert f"| {run.name}" in capsys.readouterr().out
    (run / "loss.png").unlink()
    (run / "loss.png").mkdir()
    _, stderr = command("report.py", run).communicate(timeout=60)
    assert re.fullmatch(r"error: .*loss.png'?\n", stderr)


def test_the_notes_weights():
    """Softmax of the raw weights gives the normalised ones that are printed beside them."""
    square = report.notes_weights()
    assert square[1, :2] == pytest.approx([0.30925, 0.69075], abs=1e-4)
    assert square[5, :6] == pytest.approx([0.17115, 0.03788, 0.02855, 0.03999, 0.10544, 0.61699], abs=1e-4)
    assert square[11, [0, 6, 11]] == pytest.approx([0.02096, 0.03889, 0.43266], abs=1e-4)
    assert np.nansum(square, axis=1)[1:] == pytest.approx(1) and np.isnan(square[0]).all()


def test_labels_are_moved_apart():
    places = report.spread([0.0, 0.01, 0.5, 0.52, 0.53, 0.99], gap=0.05)
    assert np.diff(places).min() >= 0.05 - 1e-9 and places[0] >= 0 and places[-1] <= 1
    assert places[3] == pytest.approx((0.5 + 0.52 + 0.53) / 3)  # a crowd spreads around its middle
    assert report.spread([0.2, 0.8], gap=0.05) == [0.2, 0.8]
    for wishes in ([0.0, 0.01, 0.02, 0.12], [0.1] * 12 + [0.45], [0.9, 0.98, 0.99, 1.0], [0.5] * 20):  # at the edges
        places = report.spread(wishes, gap=0.05)
        assert np.diff(places).min() >= 0.05 - 1e-9 and places[0] >= -1e-9 and places[-1] <= 1 + 1e-9
