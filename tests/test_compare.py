"""
tools/compare: the arithmetic of its tables against values by hand and against scipy's own tests, rows and their costs,
and tiny comparisons through the real command.
"""

import contextlib
import csv
import io
import itertools
import json
import math
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
import scipy.stats
from helpers import ROOT, TINY, check_error, command, dataset, options, run, start, wait_until

import tools.compare.__main__ as compare
from configurator import configure
from lib.code import code_hash
from lib.errors import UserError
from tools.compare import analysis, measure, pictures, results, rows, runs, tables, tuning
from tools.compare.rows import parse
from train import SETTINGS

STEPS = 120
SMALL = TINY | {"n_layer": 2, "micro_batch": 8, "max_steps": STEPS, "eval_every": 60, "checkpoint_every": 10}
ROWS, SEEDS = ["baseline", "method3_2"], [1, 2]
NAMES = {f"{row}-seed{seed}" for row in ROWS for seed in SEEDS}
MISSING = object()


def arguments(folder, **settings):
    places = {"out_dir": folder / "out", "results_dir": folder / "results", "name": "tiny", "dataset": dataset()}
    return options(**SMALL | {"modes": ",".join(ROWS), "seeds": "1,2"} | places | settings)


def call(monkeypatch, *args):
    """The command's main() in this process, which saves the imports. Returns what it prints on stdout."""
    monkeypatch.setattr(sys, "argv", ["", *map(str, args)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own process keeps its handlers
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        compare.main()
    return stdout.getvalue()


class Forked:
    """What start_process returns, with a train.py from the tests' server, which starts at once."""

    def __init__(self, program, s, slot, log):
        assert program[0] == str(ROOT / "train.py")
        self.process, self.log = start("train.py", *program[1:]), log

    def poll(self):
        self.returncode = self.process.poll()
        if self.returncode is not None:
            self.log.write_text(self.process.stderr)
        return self.returncode

    def terminate(self):
        self.process.kill(signal.SIGTERM)

    def wait(self):
        self.process.wait()
        return self.poll()


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(runs, "start_process", Forked)


def no_pictures(monkeypatch):
    monkeypatch.setattr(results, "plot_all", lambda *_: None)


def count_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def record_files(folder):
    """Every record with what would change if it were written again."""
    stats = {path.stem: path.stat() for path in (folder / "results/runs").glob("*.json")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


# --- a comparison from outside ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """One comparison in five calls: one run; killed in the second; stopped in it; another made to fail; the rest."""
    folder = tmp_path_factory.mktemp("comparison")
    out, metrics = folder / "out", folder / "out/method3_2-seed1/metrics.jsonl"
    seen = SimpleNamespace(folder=folder, out=out)
    args = ["-m", "tools.compare", *arguments(folder)]

    def is_training():
        return runs.Run.is_training(SimpleNamespace(folder=metrics.parent))

    def real_call(lines, number):
        """Sent a signal when so many lines of metrics are there; ends when the run, which saves first, has ended."""
        process = command(*args)
        wait_until(lambda: count_lines(metrics) >= lines or process.poll() is not None, 120)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        wait_until(lambda: not is_training())
        return process.returncode, stderr, record_files(folder), metrics.read_bytes()

    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stderr(io.StringIO()) as stderr:
        monkeypatch.setattr(runs, "start_process", Forked)
        no_pictures(monkeypatch)
        call(monkeypatch, *arguments(folder, modes="baseline", seeds=1))
        *_, seen.records1, seen.metrics1 = real_call(3, signal.SIGKILL)
        more = seen.metrics1.count(b"\n") + 3
        seen.status2, seen.stderr2, seen.records2, seen.metrics2 = real_call(more, signal.SIGINT)

        (out / "method3_2-seed2").write_text("in the way")
        with pytest.raises(UserError) as error:
            call(monkeypatch, *args[2:], "--jobs=2")
        call(monkeypatch, *arguments(folder, modes="baseline"))  # nothing to do, and the failure stays known
        seen.error3, seen.stderr3, seen.records3 = error.value, stderr.getvalue(), record_files(folder)
        seen.readme3 = (folder / "results/README.md").read_text()

        (out / "method3_2-seed2").unlink()
        monkeypatch.undo()
        monkeypatch.setattr(runs, "start_process", Forked)
        seen.stdout4, seen.records4 = call(monkeypatch, *args[2:]), record_files(folder)
    return seen


def test_killed_and_continued(calls):
    """A killed comparison takes its runs with it; the next one resumes them, and no record is written twice."""
    assert calls.records1.keys() == {"baseline-seed1"}
    steps = [text.count(b"\n") for text in (calls.metrics1, calls.metrics2)]
    assert 3 <= steps[0] < steps[1] < STEPS or sys.platform != "linux"  # elsewhere the run goes on and is collected
    metrics = (calls.out / "method3_2-seed1/metrics.jsonl").read_bytes()
    assert metrics.startswith(calls.metrics2) and calls.metrics2.startswith(calls.metrics1)  # times included
    assert calls.records1 == calls.records2 or sys.platform != "linux"
    assert calls.records2.items() <= calls.records3.items() <= calls.records4.items()
    assert calls.records4.keys() == NAMES


def test_stopped_in_the_middle(calls):
    assert calls.status2 == 130 and "stopped: the same command resumes" in calls.stderr2
    assert "Traceback" not in calls.stderr2


def test_a_failed_run_stops_no_other(calls):
    assert calls.error3.status == 1 and str(calls.error3) == "1 of 4 runs failed: method3_2-seed2"
    assert calls.records3.keys() == NAMES - {"method3_2-seed2"}
    assert re.search("method3_2-seed2 failed: exit status 2, error: .*cannot be written to", calls.stderr3)
    assert "- method3_2-seed2: exit status 2, error: " in calls.readme3
    assert "method3_2-seed2: validation loss" in calls.stdout4  # tried again in the last call
    assert "Failed" not in (calls.folder / "results/README.md").read_text()


def finals_of(calls, row):
    return [json.loads((calls.out / f"{row}-seed{seed}/eval_results.json").read_text()) for seed in SEEDS]


def test_results_are_those_of_the_runs(calls):
    made = json.loads((calls.folder / "results/results.json").read_text())
    assert [entry["row"] for entry in made["rows"]] == ROWS
    for entry in made["rows"]:
        finals = finals_of(calls, entry["row"])
        assert entry["loss"][0] == pytest.approx(statistics.mean(final["eval_loss"] for final in finals))
        assert entry["accuracy"][0] == pytest.approx(statistics.mean(final["eval_accuracy"] for final in finals))
        assert entry["bits_per_byte"] == pytest.approx(statistics.mean(final["eval_bits_per_byte"] for final in finals))
        assert entry["seeds"] == SEEDS and entry["tokens"] == STEPS * SMALL["batch_tokens"]
    with open(calls.folder / "results/results.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["row"] for line in lines] == ROWS and lines[0]["seeds"] == "1 2"
    assert float(lines[1]["loss mean"]) == made["rows"][1]["loss"][0]
    ours, base = ([entry["eval_loss"] for entry in finals_of(calls, row)] for row in reversed(ROWS))
    each = [loss - other for loss, other in zip(ours, base, strict=True)]
    assert made["rows"][1]["difference"]["each"] == pytest.approx(each)
    assert [float(value) for value in lines[1]["difference each"].split()] == pytest.approx(each)
    assert made["rows"][1]["difference"]["half"] is None  # two seeds have no interval


def test_a_record_says_what_was_made_and_how(calls):
    record = json.loads((calls.folder / "results/runs/method3_2-seed1.json").read_text())
    folder = calls.out / "method3_2-seed1"
    assert record["weights"] == json.loads((folder / "residual_weights.json").read_text())
    mixing = json.loads((folder / "depth_mixing.json").read_text())
    assert record["depth_mixing"]["rows"] == mixing["rows"]
    assert np.array(record["depth_mixing"]["matrix"]) == pytest.approx(np.array(mixing["matrix"]), rel=1e-4)
    assert record["curve"]["tokens"] == [60 * 64, 120 * 64]
    assert record["curve"]["flops"] == [3 * record["flops_per_token"] * tokens for tokens in (60 * 64, 120 * 64)]
    lines = [json.loads(line) for line in (calls.out / "method3_2-seed1/metrics.jsonl").read_text().splitlines()]
    for n, half in enumerate((range(1, 61), range(61, 121))):
        losses = [line["loss"] for line in lines if "loss" in line and line["step"] in half]
        assert record["curve"]["train_loss"][n] == pytest.approx(np.mean(losses))
    data = record["data"]  # every token but the first is predicted
    bits = record["loss"] * (data["val_tokens"] - 1) / math.log(2) / data["val_bytes"]
    assert record["bits_per_byte"] == pytest.approx(bits)
    assert record["machine"].items() >= {"device": "cpu", "dtype": "float32", "compile": False, "processes": 1}.items()
    assert record["machine"]["torch"] and record["machine"]["processor"]
    assert record["code"] == code_hash() and re.fullmatch("[0-9a-f]{40}", record["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["date"])
    assert str(calls.folder) not in json.dumps(record)  # it is to be published


def test_code_hash(tmp_path):
    """Of what can change a loss: neither of comments nor of other files."""
    for path in [path for place in ("", "lib", "data", "tools") for path in (ROOT / place).glob("*.py")]:
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(ROOT))

    def hash_after(name, old, new):
        text = (tmp_path / name).read_text()
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new, 1))
        print_it = [sys.executable, "-c", "from lib.code import code_hash; print(code_hash())"]
        return subprocess.run(print_it, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    before = hash_after("tools/report.py", "import", "import")
    assert before == code_hash()
    assert before == hash_after("model.py", "  # longest context", "  # the longest")
    assert before == hash_after("train.py", '"""\nTrain a GPT', '"""\n\nMore words.\nTrain a GPT')
    assert before == hash_after("lib/kernels.py", "import", "\n# a line\n\nimport")
    for name in ("lib/plots.py", "lib/hf.py", "lib/generation.py", "tools/report.py", "data/prepare.py"):
        assert before == hash_after(name, "import", "import sys\nimport")
    seen = {before}
    for name, old in (("model.py", "std=0.02"), ("rivals.py", "0.01"), ("train.py", "math.pi")):
        seen.add(hash_after(name, old, "7"))
    seen.add(hash_after("lib/errors.py", '"error: ', '"error: #'))  # within a text it is no comment
    for name in ("lib/rope.py", "data/dataset.py"):
        seen.add(hash_after(name, "import", "import sys\nimport"))
    assert len(seen) == 7


def test_tables_and_pictures(calls):
    readme = (calls.folder / "results/README.md").read_text()
    table = [line for line in readme.splitlines() if line.startswith("|")]
    assert table[0].split()[1] == "row" and [line.split()[1] for line in table[2:4]] == ROWS
    made_by = [line for line in readme.splitlines() if line.startswith("    python -m tools.compare")]
    assert len(made_by) == 2 and "--n_layer=2" in made_by[0] and "--jobs" not in made_by[1]
    assert made_by[0].endswith("--modes=baseline --seeds=1 --name=tiny")
    assert made_by[1].endswith("--modes=baseline,method3_2 --seeds=1,2 --name=tiny")
    assert "Noise floor: the baseline's standard deviation over its 2 seeds is " in readme
    assert "As all rows with several seeds show it, a difference between two rows of the same seed has" in readme
    assert "missing: `--measure=True` fills them in" in readme
    assert "--measure=True fills them in" in calls.stdout4
    assert max(map(len, calls.stdout4.splitlines())) <= 120
    assert "Contrasts" not in readme  # two pairs test nothing
    shown = re.findall(r"\((\w+)\.png\)", readme)
    names = "overview loss_tokens difference_tokens loss_flops loss_time frontier_flops weights depth_mixing".split()
    assert sorted(names) == sorted(shown)
    for name in shown:
        height, width, _ = matplotlib.image.imread(calls.folder / f"results/{name}.png").shape
        assert 300 < height and 300 < width <= 1500
        assert (calls.folder / f"results/{name}.svg").read_text().startswith("<?xml")


def test_differences_on_the_way_are_those_of_the_same_seed(monkeypatch):
    def of(**losses):
        return [{"seed": int(s[1:]), "curve": {"tokens": [10, 20], "loss": loss}} for s, loss in losses.items()]

    groups = {
        "baseline": of(s1=[3.0, 2.0], s2=[5.0, 4.0]),
        "hc": of(s1=[2.5, 2.0], s2=[5.5, 3.0], s3=[9.0, 9.0]),  # no baseline has the last seed
        "x0": of(s3=[1.0, 1.0]),
    }
    plotted = []
    monkeypatch.setattr(pictures, "plot_differences", lambda curves, *_, **__: plotted.extend(curves))
    pictures.difference_curves(groups, list(groups), "unused")
    ((name, _, tokens, pairs),) = plotted
    assert (name, tokens, np.array(pairs).tolist()) == ("hc", [10, 20], [[-0.5, 0.0], [0.5, -1.0]])


def test_whether_leads_last():
    def of(*tokens, **losses):
        return [{"seed": int(s[1:]), "curve": {"tokens": list(tokens), "loss": loss}} for s, loss in losses.items()]

    groups = {
        "baseline": of(10, 21, 40, s1=[5.0, 3.0, 2.0], s2=[5.0, 4.0, 3.0]),
        "hc": of(10, 21, 40, s1=[5.0, 2.5, 1.75], s2=[5.0, 3.5, 3.5], s3=[1.0, 1.0, 1.0]),  # shrinks, ends behind
        "x0": of(10, 21, 40, s1=[9.0, 2.75, 1.5], s2=[1.0, 4.5, 2.0]),  # grows, was not ahead
        "longer": of(20, 40, 80, s1=[1.0, 1.0, 9.0]),
    }
    first = {"seed": 1, "ahead_half_way": 2, "less_at_the_end": 1}
    assert analysis.leads(groups) == [first, {"seed": 2, "ahead_half_way": 1, "less_at_the_end": 1}]
    words = "2 with seed 1, 1 of them less so at the end or no longer; 1 with seed 2, 1 of them"
    assert words in tables.leads_text(analysis.leads(groups))
    assert analysis.leads({"hc": groups["hc"]}) == [] and tables.leads_text([]) == ""


def test_depth_mixing_of_seeds_that_read_with_opposite_signs():
    """Behind a norm they are alike, so their mean is not nothing; a sign inside of a row stays."""
    factors = [[1.0, 0.0], [4.0, -1.0]], [[3.0, 0.0], [-2.0, 0.5]]
    group = [{"depth_mixing": {"rows": ["mlp 0", "head"], "matrix": matrix}} for matrix in factors]
    ((row, mixing),) = pictures.mixing_panels("hc", group)
    assert row == "hc" and mixing["rows"] == ["mlp 0", "head"]
    assert mixing["matrix"].tolist() == [[2.0, 0.0], [3.0, -0.75]]
    assert pictures.mixing_panels("baseline", group) == pictures.mixing_panels("looped", group) == []


@pytest.mark.parametrize("change", [{"learning_rate": 1e-3}, {"max_steps": 70}, {"n_layer": 3}])
def test_records_of_other_settings_are_refused(calls, monkeypatch, change):
    key = next(iter(change))
    before = record_files(calls.folder)
    with pytest.raises(UserError, match=f"made under other settings: {key} is {SMALL.get(key, 0.002)} there and"):
        call(monkeypatch, *arguments(calls.folder, **change, seeds="7"))
    # nor is a run resumed from what another schedule left in its folder
    other = runs.Run(scale(**change), "baseline", 1, change.get(key), "baseline-seed1", calls.out, calls.folder)
    with pytest.raises(UserError, match="baseline-seed1 was made under other settings"):
        other.check_folder()
    assert record_files(calls.folder) == before


def test_waits_for_what_another_process_trains(calls, tmp_path, monkeypatch, forked, capsys):
    """As after a kill where the children live on, or with two computers at one folder."""
    answers = iter([True, True, True])
    monkeypatch.setattr(runs.Run, "is_training", lambda run: next(answers, False))
    no_pictures(monkeypatch)
    for name in ("baseline-seed1", "method3_2-seed1"):
        shutil.copytree(calls.out / name, tmp_path / "out" / name)
    monkeypatch.setattr(runs, "start_process", None)  # nothing is started: all is collected
    stdout = call(monkeypatch, *arguments(tmp_path, seeds=1))
    assert "baseline-seed1 is being trained by another process: waiting for it" in capsys.readouterr().err
    assert "baseline-seed1: validation loss" in stdout and record_files(tmp_path).keys() == {
        "baseline-seed1",
        "method3_2-seed1",
    }


def test_mistakes_end_with_a_sentence(tmp_path, monkeypatch):
    for change, words in [
        ({"modes": "baseline,method9"}, "'method9' is not known"),
        ({"modes": "method3_2-slow"}, "-stored, -K .*, -own, -fast, -xF"),
        ({"modes": "deeper-x0"}, "deeper-x0: at 1.00. of the baseline's FLOPs it is the baseline itself"),
        ({"contrasts": "method3_2:nothing"}, "'nothing' is not known"),
        ({"seeds": "1,x"}, "seeds must be ints"),
        ({"jobs": 0}, "jobs must be at least 1"),
        ({"jobs": 10**6}, "jobs × nproc = 1000000 is too much for this machine"),
        ({"seed": 3}, "the comparison sets seed itself"),
        ({"init_from": "resume"}, "--init_from names a pretrained model"),
        ({"learning_rat": 3}, "did you mean learning_rate"),
        ({"learning_rates": "0.1"}, "learning_rates must be several numbers"),
        ({"learning_rates": "0.1,0.2", "seeds": "0,1"}, "seed 0 is for the search"),
        ({"name": "../x"}, "plain folder name"),
        ({"norm": "batchnorm"}, "method3_2: .*batchnorm cannot be re-run"),
        ({"name": ".."}, "plain folder name"),
        ({"epochs": 0, "max_steps": None}, "epochs must be more than 0"),
        ({"seeds": "-1"}, "seeds must not be negative"),
        ({"results_dir": ROOT}, "holds a README.md that is not of a comparison"),
        ({"results_dir": ROOT / "LICENSE"}, "cannot be made: Not a directory"),
        ({"plan": True, "flops_per_second": 0}, "flops_per_second must be more than 0"),
    ]:
        with pytest.raises(UserError, match=words):
            call(monkeypatch, *arguments(tmp_path, **change))
    with pytest.raises(UserError, match="holds no results"):
        call(monkeypatch, tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("OMP_NUM_THREADS", "two")
    with pytest.raises(UserError, match="whole number of threads, not 'two'"):
        runs.threads(SimpleNamespace(jobs=1, nproc=1))


def copied(calls, tmp_path):
    return shutil.copytree(calls.folder / "results", tmp_path / "results")


def places(value):
    """The keys that lead to every part of a record; of a list its first item."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in items:
        yield [key]
        yield from ([key, *rest] for rest in places(part))


def test_damaged_files_end_with_a_line(calls, tmp_path, monkeypatch):
    folder = copied(calls, tmp_path)
    record = (folder / "runs/baseline-seed1.json").read_text()
    for name, content, words in [
        ("runs/baseline-seed1.json", record[:-100], "is damaged or not a record: remove it"),
        ("runs/baseline-seed1.json", json.dumps(json.loads(record) | {"loss": "low"}), "damaged or not a record"),
        ("runs/baseline-seed1.json", json.dumps(json.loads(record) | {"curve": {"loss": [1]}}), "not a record"),
        ("runs/baseline-seed1.json", json.dumps(json.loads(record) | {"depth_mixing": {"rows": 3}}), "not a record"),
        ("speed.json", '{"baseline": 3}', "speed.json is damaged or of an older version: remove it and measure again"),
        ("results.json", '{"failed": ["x"]}', "results.json is damaged: remove it"),
        ("results.json", "[]", "results.json is damaged"),
    ]:
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).write_text(content)
        with pytest.raises(UserError, match=words):
            call(monkeypatch, folder)
        assert (folder / name).read_text() == content
        (folder / name).unlink()
        if before:
            (folder / name).write_bytes(before)
    # whatever else a record may have instead of what belongs there: a sentence, or a table
    for place in places(json.loads(record)):
        for wrong in (None, -1, "x", [], {}, 1e308, [[]], MISSING):
            changed = json.loads(record)
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            if wrong is MISSING:
                del inner[place[-1]]
            else:
                inner[place[-1]] = wrong
            (folder / "runs/baseline-seed1.json").write_text(json.dumps(changed))
            with contextlib.suppress(UserError):
                results.Results(folder, "tiny").write()
    (folder / "runs/baseline-seed1.json").write_text(record)
    (folder / "speed.json").write_text("{")
    check_error(run("tools.compare.__main__", folder), "speed.json is damaged")  # the same from outside


def test_records_of_many_machines(calls, tmp_path, monkeypatch):
    """Other code, devices and number formats stay out of the means, unknown rows out of the table; lines say so."""
    no_pictures(monkeypatch)
    folder = copied(calls, tmp_path)
    path = folder / "runs/baseline-seed1.json"
    record = json.loads(path.read_text())
    gpu = record["machine"] | {"device": "cuda", "dtype": "bfloat16"}
    for seed, change in {3: {"code": "0" * 64, "commit": "1" * 40}, 4: {"machine": gpu}, 6: {"row": "method9"}}.items():
        (folder / f"runs/other-{seed}.json").write_text(json.dumps(record | {"seed": seed} | change))
    printed = call(monkeypatch, folder)
    readme = (folder / "README.md").read_text()
    for text in (printed, readme):
        code = record["code"][:12]
        assert f"baseline-seed3: code 000000000000 instead of {code} (commit {'1' * 40})" in text
        assert "baseline-seed4: device cuda instead of cpu, dtype bfloat16 instead of float32" in text
        assert "other-6.json, whose row 'method9' this clone does not know" in text
    made = json.loads((folder / "results.json").read_text())
    assert made["rows"][0]["seeds"] == SEEDS and len(made["left_out"]) == 3
    assert json.loads(path.read_text()) == record  # nothing was changed

    merged = json.loads((folder / "runs/method3_2-seed2.json").read_text()) | {"seed": 3}
    merged["machine"] |= {"processor": "another", "torch": "2.0.0", "compile": True}
    (folder / "runs/method3_2-seed3.json").write_text(json.dumps(merged))  # these may differ
    call(monkeypatch, folder)
    assert json.loads((folder / "results.json").read_text())["rows"][1]["seeds"] == [1, 2, 3]
    assert "1 of 5 runs compiled" in (folder / "README.md").read_text()

    (folder / "runs/copy.json").write_text(json.dumps(merged))
    with pytest.raises(UserError, match="two records of method3_2 with one seed"):
        call(monkeypatch, folder)
    (folder / "runs/copy.json").unlink()
    merged["settings"]["learning_rate"] = 0.5
    (folder / "runs/method3_2-seed3.json").write_text(json.dumps(merged))
    with pytest.raises(UserError, match=r"learning_rate is 0\.5 there and 0\.002 here"):
        call(monkeypatch, folder)


def test_other_code_is_warned_of(calls, tmp_path, monkeypatch, forked, capsys):
    folder = copied(calls, tmp_path)
    for path in (folder / "runs").glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"code": "f" * 64}))
    no_pictures(monkeypatch)
    call(monkeypatch, *arguments(tmp_path, modes="baseline", seeds=3))
    assert "runs are of other code (ffffffffffff): new ones do not belong to them" in capsys.readouterr().err
    assert json.loads((folder / "results.json").read_text())["rows"][0]["seeds"] == SEEDS
    # likewise those of the search for learning rates
    (folder / "runs/tuning").mkdir()
    record = json.loads((folder / "runs/baseline-seed1.json").read_text()) | {"seed": 0, "code": "e" * 64}
    record["settings"] |= {"seed": 0, "learning_rate": 1e-3}
    (folder / "runs/tuning/baseline-lr0.001.json").write_text(json.dumps(record))
    call(monkeypatch, *arguments(tmp_path, modes="baseline", seeds=1, learning_rates="1e-3,1e-2", print=True))
    assert "runs/tuning are of other code (eeeeeeeeeeee): new ones do not belong" in capsys.readouterr().err
    # a half-made run of other code is not resumed: its record would say the hash of one of them
    out = shutil.copytree(calls.out / "baseline-seed1", tmp_path / "out/baseline-seed9")
    (out / "run.json").unlink()
    monkeypatch.setattr(runs, "code_hash", lambda: "f" * 64)
    with pytest.raises(UserError, match="was begun by other code"):
        runs.Run(scale(), "baseline", 1, 0.002, "baseline-seed9", tmp_path / "out", folder).check_folder()


def test_commands_for_a_job_array(tmp_path, monkeypatch, capsys):
    """One per line on stdout, nothing trained; a later call collects what they left."""
    no_pictures(monkeypatch)
    monkeypatch.setattr(runs, "start_process", None)
    args = arguments(tmp_path, modes="baseline,method3_2-1", seeds=1, print=True, max_steps=6, eval_every=6)
    lines = call(monkeypatch, *args).splitlines()
    assert len(lines) == 2 and all(line.startswith("python train.py --") for line in lines)
    assert (
        "--n_layer=2" in lines[0]
        and "--reruns=1" in lines[1]
        and f"--out_dir={tmp_path}/out/method3_2-1-seed1" in lines[1]
    )
    again = call(monkeypatch, *args, "--nproc=2").splitlines()
    assert again[0].startswith("torchrun --standalone --nproc_per_node=2 train.py ")
    for line in lines:
        assert run(*shlex.split(line)[1:]).status == 0
    assert call(monkeypatch, *args) == ""
    assert "| method3_2-1 " in capsys.readouterr().err
    assert record_files(tmp_path).keys() == {"baseline-seed1", "method3_2-1-seed1"}


def test_pretrained_modes(tmp_path, monkeypatch, forked):
    """Modes as fine-tunes of one model; depth is its own business."""
    from model import GPT, GPTConfig

    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "ffn_hidden": 32, "block_size": 8, "vocab_size": 320}
    GPT(GPTConfig(**shape)).save_pretrained(tmp_path / "hf")
    settings = {k: v for k, v in SMALL.items() if k not in shape} | {"max_steps": 4, "eval_every": 4}
    settings |= {"init_from": tmp_path / "hf", "dataset": dataset(), "name": "tiny", "seeds": 1}
    settings |= {"results_dir": tmp_path / "results", "out_dir": tmp_path / "out"}
    no_pictures(monkeypatch)
    call(monkeypatch, *options(**settings, modes="baseline,method3_2-own,longer"))
    record = json.loads((tmp_path / "results/runs/method3_2-own-seed1.json").read_text())
    assert record["settings"]["init_from"] == "hf" and str(tmp_path) not in json.dumps(record)
    assert (
        record["flops_per_token"]
        > json.loads((tmp_path / "results/runs/baseline-seed1.json").read_text())["flops_per_token"]
    )
    for row in ("deeper", "looped"):
        with pytest.raises(UserError, match=f"{row}: a pretrained model has the depth that it has"):
            call(monkeypatch, *options(**settings, modes=row))
    with pytest.raises(UserError, match="hf decides itself about n_layer"):
        call(monkeypatch, *options(**settings, modes="baseline", n_layer=3))


# --- learning rates ---------------------------------------------------------------------------------------------------


def test_a_grid_grows_where_its_edge_is_best():
    grid = (4e-3, 8e-3, 1.6e-2)
    assert tuning.rates_to_try(grid, {}) == list(grid)
    assert tuning.rates_to_try(grid, {8e-3: 1.0}) == [4e-3, 1.6e-2]
    middle = {4e-3: 1.2, 8e-3: 1.0, 1.6e-2: 1.1}
    assert tuning.rates_to_try(grid, middle) == [] and tuning.best_rate(middle) == 8e-3
    low = {4e-3: 1.0, 8e-3: 1.1, 1.6e-2: math.inf}  # one that diverged is the worst
    assert tuning.rates_to_try(grid, low) == [2e-3]
    assert tuning.rates_to_try(grid, low | {2e-3: 1.05}) == []
    assert tuning.rates_to_try(grid, low | {2e-3: 0.9}) == [1e-3]
    assert tuning.rates_to_try(grid, low | {2e-3: 0.9, 1e-3: 0.8}) == []  # at most twice
    high = {4e-3: 1.2, 8e-3: 1.1, 1.6e-2: 1.0}
    assert tuning.rates_to_try(grid, high) == [3.2e-2]
    assert tuning.rates_to_try(grid, high | {3.2e-2: 0.9}) == [6.4e-2]
    assert tuning.rates_to_try(grid, high | {3.2e-2: 0.9, 6.4e-2: 0.8}) == []
    assert tuning.rates_to_try(grid, dict.fromkeys(grid, math.inf)) == [2e-3]


def test_each_row_gets_the_best_of_its_rates(tmp_path, monkeypatch, forked, capsys):
    no_pictures(monkeypatch)
    settings = {"max_steps": 20, "eval_every": 20, "grad_clip": 0, "seeds": 1, "jobs": 2}
    settings |= {"modes": "baseline,method3_2-own", "learning_rates": "1e-3,1e-2,1e30"}
    stdout = call(monkeypatch, *arguments(tmp_path, **settings))
    tried = {path.stem for path in (tmp_path / "results/runs/tuning").glob("*.json")}
    assert {"baseline-lr0.001", "baseline-lr0.01", "baseline-lr1e+30", "method3_2-lr0.01"} <= tried
    assert not any("own" in name for name in tried)  # it takes its parent's
    assert re.search(r"baseline-lr1e\+30 diverged: step \d+: ", stdout)
    readme = (tmp_path / "results/README.md").read_text()
    table = readme.partition("## Learning rates")[2]
    for entry in json.loads((tmp_path / "results/results.json").read_text())["rows"]:
        row = entry["row"].removesuffix("-own")
        losses = {}
        for path in (tmp_path / "results/runs/tuning").glob(f"{row}-lr*.json"):
            record = json.loads(path.read_text())
            assert record["seed"] == 0 and record["row"] == row
            if "diverged" not in record:
                losses[record["settings"]["learning_rate"]] = record["loss"]
        best = min(losses, key=losses.get)
        assert entry["learning_rate"] == best and entry["seeds"] == [1]
        line = next(line for line in table.splitlines() if line.startswith(f"| {row} "))
        assert f"**{losses[best]:.4f}**" in line and "diverged" in line
    assert record_files(tmp_path).keys() == {"baseline-seed1", "method3_2-own-seed1"}

    # nothing is done twice; a record at another rate than the search's is refused
    monkeypatch.setattr(runs, "start_process", None)
    call(monkeypatch, *arguments(tmp_path, **settings))
    path, info = (
        tmp_path / "results/runs/tuning/baseline-lr1e+30.json",
        tmp_path / "out/tuning/baseline-lr1e+30/run.json",
    )
    before, text = path.read_bytes(), info.read_text()
    path.unlink()
    info.write_text(text.replace("--max_steps=20", "--max_steps=21"))  # another command's divergence is not ours
    assert "--learning_rate=1e+30" in call(monkeypatch, *arguments(tmp_path, **settings, print=True))
    assert not path.exists()
    info.write_text(text)
    call(monkeypatch, *arguments(tmp_path, **settings))
    assert path.read_bytes() == before
    path = tmp_path / "results/runs/baseline-seed1.json"
    record = json.loads(path.read_text())
    record["settings"]["learning_rate"] = 7.0
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"learning_rate is 7\.0 there and 0\.0"):
        call(monkeypatch, *arguments(tmp_path, **settings))

    # commands for a job array: first those of the search
    args = arguments(tmp_path / "array", **settings | {"learning_rates": "1e-3,1e-2"}, print=True)
    lines = call(monkeypatch, *args).splitlines()
    assert len(lines) == 4 and all("--seed=0" in line for line in lines)
    assert "without a learning rate: baseline, method3_2-own" in capsys.readouterr().err

    # a search that is not at its end shows what it has
    shutil.copytree(tmp_path / "results/runs/tuning", tmp_path / "begun/runs/tuning")
    stdout = call(monkeypatch, tmp_path / "begun")
    assert stdout.startswith("the search for learning rates, so far:") and f"**{losses[best]:.4f}**" in stdout

    # another comparison may take the rates that were found here
    found = tuning.known_rates(["method3_2-1"], tmp_path / "results")
    assert found == {"method3_2-1": entry["learning_rate"]}
    assert "warning" not in capsys.readouterr().err
    for path in (tmp_path / "begun/runs/tuning").glob("method3_2-lr*.json"):
        if json.loads(path.read_text())["settings"]["learning_rate"] > entry["learning_rate"]:
            path.unlink()
    assert tuning.known_rates(["method3_2-1"], tmp_path / "begun") == found
    assert "or is not at its end: method3_2-1\n" in capsys.readouterr().err
    with pytest.raises(UserError, match="has no learning rate of mudd"):
        call(monkeypatch, *arguments(tmp_path / "other", modes="mudd", rates_from=tmp_path / "results"))


def test_the_command_in_the_readme_says_what_was_chosen(monkeypatch):
    given = ["config/tuned.py", "--compile=True", "--jobs=2", "--contrasts=mudd,hc:mudd", "--learning_rates=1e-2,2e-2"]
    monkeypatch.setattr(sys, "argv", ["", *given])
    chosen = SimpleNamespace(name="x", rates_from=None, learning_rates=(0.01, 0.02), contrasts="mudd,hc:mudd")
    assert compare.command_text(chosen, ["mudd", "hc"], [1, 2]) == (
        "python -m tools.compare config/tuned.py --compile=True --modes=mudd,hc --seeds=1,2 --learning_rates=0.01,0.02 "
        "--contrasts=mudd,hc:mudd --name=x"
    )


def test_variants_take_their_parents_rate():
    for row, parent in {
        "method3_2-1": "method3_2",
        "method3_2-own": "method3_2",
        "method3_2-stored-own": "method3_2-stored",
        "method3_3-1": "method3_3",
        "method3_2-stored": "method3_2-stored",
        "deeper-method3_2-1": "deeper-method3_2-1",
        "longer": "longer",
        "baseline-x2": "baseline-x2",
    }.items():
        assert rows.row_to_tune(row) == parent


# --- rows and what they cost ------------------------------------------------------------------------------------------


def scale(**settings):
    given = configure(
        options(**SMALL | {"dataset": dataset(), "plan": False} | settings), compare.CompareConfig, *SETTINGS
    )
    return rows.open_scale(given, compare.OWN_KEYS)


def test_names_of_rows():
    for name in [*rows.DEFAULT_ROWS, "hc-fast", "method3_2-1-own-fast-x0.5", "deeper-method3_2-1", "looped-method4_2"]:
        assert str(parse(name)) == name
    assert str(parse("longer-method3_2")) == "longer" and str(parse("baseline-x1.0")) == "baseline"
    for name, words in {
        "x0-stored": "x0 runs nothing again",
        "hc-2": "hc runs nothing again",
        "baseline-fast": "has nothing that could learn faster",
        "method3_1-own": "weights under a softmax",
        "method3_2-stored-1": "contradicts recompute=False",
        "method3_2-own-stored": "in this order",
        "deeper-baseline": "a row of another mode",
        "deeper-deeper": "is not known: choose from baseline, method1",
        "baseline-x1000": "a hundredth to a hundred times",
    }.items():
        with pytest.raises(UserError, match=words):
            parse(name)


def test_what_rows_change():
    of = scale().changes
    assert of("method3_1-stored") == {"residual_mode": "method3_1", "recompute": False}
    assert of("method3_2-fast") == {"residual_mode": "method3_2", "residual_lr_scale": 10.0}
    assert of("method3_3-1-own") == {"residual_mode": "method3_3", "reruns": 1, "residual_start": "own"}
    assert of("baseline-x0.5") == {"residual_mode": "baseline", "max_steps": STEPS // 2}
    assert scale(max_steps=None, epochs=3.0).changes("baseline-x4")["epochs"] == 12.0


def test_controls_match_their_row():
    """Depth, length and loops, from the FLOPs of each matrix and each mixed sum."""
    d, ffn, vocab, length, n = 16, 32, 320, 8, 6
    attention = 4 * d * (length + 1) / 2
    layer = 2 * (4 * d * d + 3 * d * ffn) + attention
    rerun = 2 * (2 * d * d + 3 * d * ffn) + attention
    head, sums = 2 * d * vocab, sum(2 * (m + 1) * d for m in range(1, n))
    baseline, method = n * layer + head, n * layer + n * (n - 1) / 2 * rerun + sums + head
    one_rerun = n * layer + (n - 1) * rerun + sums + head
    at = scale(n_layer=n, max_steps=100)
    assert at.flops_per_token({}) == baseline and at.flops_per_token(at.changes("method3_2")) == method
    for name, flops in {"": method, "-method3_2-1": one_rerun}.items():
        depth = min(range(1, 100), key=lambda k, flops=flops: abs(k * layer + head - flops))
        loops = min(range(1, 100), key=lambda k, flops=flops: abs(k * n * layer + head - flops))
        assert depth > n and loops > 1
        assert at.changes(f"deeper{name}") == {"n_layer": depth}
        assert at.changes(f"looped{name}") == {"loops": loops}
        assert at.flops_per_token({"loops": loops}) == loops * n * layer + head
        assert at.changes(f"longer{name}") == {"max_steps": round(100 * flops / baseline)}
    in_epochs = scale(n_layer=n, max_steps=None, epochs=2.0)
    assert in_epochs.changes("longer") == {"epochs": pytest.approx(2 * method / baseline)}
    with pytest.raises(UserError, match=r"looped-method3_1-stored: at 1\.0.. of the baseline's FLOPs"):
        at.changes("looped-method3_1-stored")


def test_plan(tmp_path, monkeypatch):
    """From the FLOPs of each matrix; data that is not there yet is not needed where size and length are given."""
    layer, head = 2 * (4 * 768**2 + 3 * 768 * 2048) + 4 * 768 * 1025 / 2, 2 * 768 * 50304
    flops = 3 * (12 * layer + head) * 4768 * 524288
    args = ["config/fineweb_124m.py", "--modes=baseline,baseline-x2,method3_2-1", "--seeds=1,2", "--plan=True"]
    monkeypatch.chdir(ROOT)
    text = call(monkeypatch, *args, "--learning_rates=3e-4,6e-4,1.2e-3", "--flops_per_second=1.28e15")
    table = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in text.splitlines()[2:7]}
    amounts = [f"{5 * 4768 * 524288:.3g}", f"{5 * flops:.3g}", f"{5 * flops / 1.28e15 / 3600:.1f}"]
    assert table["baseline"] == ["5", "123,587,328", *amounts]
    assert float(table["baseline-x2"][3]) == pytest.approx(10 * flops, rel=0.01)
    assert [table[row][0] for row in ("method3_2-1", "method3_2", "sum")] == ["2", "3", "15"]  # its parent is tuned
    text = call(monkeypatch, *arguments(tmp_path, plan=True))
    assert "Hours missing: --measure=True measures this machine" in text and not list(tmp_path.iterdir())


# --- what the records say ---------------------------------------------------------------------------------------------


def record(row, seed, loss, best_loss=None, accuracy=0.5, flops=100, tokens=1000, n_layer=4):
    return {
        "row": row,
        "seed": seed,
        "settings": {"n_layer": n_layer, "learning_rate": 0.1, "seed": seed, "n_embd": 8},
        "data": {"val_tokens": 101, "val_bytes": 50},
        "parameters": 10 * n_layer,
        "flops_per_token": flops,
        "loss": loss,
        "best_loss": loss if best_loss is None else best_loss,
        "accuracy": accuracy,
        "bits_per_byte": loss * 100 / math.log(2) / 50,
        "curve": {"tokens": [tokens // 2, tokens], "flops": [1.5 * flops * tokens, 3 * flops * tokens]}
        | {"train_loss": [None, None]},
    }


def speed(**change):
    speed = {"tokens_per_second": 50.0, "relative": 0.25, "rounds": [0.2, 0.25], "memory": 3 * 2**20, "threads": 2}
    return speed | {"settings": {"n_embd": 8, "learning_rate": 0.2} | change}


def test_arithmetic_of_the_table():
    entries = analysis.summarize(
        [
            record("longer", 1, 1.5, 1.4, tokens=4500),
            record("baseline", 1, 2.0, 1.9, accuracy=0.4),
            record("baseline", 2, 2.2, 2.1, accuracy=0.5),
            record("baseline", 3, 2.4, 2.3, accuracy=0.6),
            record("method3_2", 1, 1.9, 1.9, flops=450),
            record("method3_2", 2, 2.05, 2.1, flops=450),
            record("method3_2", 3, 2.3, 2.4, flops=450),
            record("method3_2", 9, 7.0, 7.0, flops=450),  # no baseline has this seed: it is in no pair
        ],
        {"method3_2": speed(), "baseline": speed(n_embd=16)},
    )
    assert [entry["row"] for entry in entries] == ["baseline", "method3_2", "longer"]
    baseline, method, longer = entries
    assert baseline["loss"] == pytest.approx((2.2, 0.2)) and baseline["best_loss"] == pytest.approx((2.1, 0.2))
    assert baseline["accuracy"] == pytest.approx((0.5, 0.1))
    assert baseline["perplexity"] == pytest.approx(math.exp(2.2))  # not the mean of three perplexities
    assert baseline["bits_per_byte"] == pytest.approx(2.2 * 100 / 50 / math.log(2))
    assert baseline["difference"] is None and baseline["memory"] is None  # measured with another width

    # differences -0.1, -0.15, -0.1: mean -0.1167, deviation 0.0289, standard error 0.0167, times t = 4.303
    assert method["difference"]["mean"] == pytest.approx(-0.35 / 3)
    assert method["difference"]["error"] == pytest.approx(0.05 / 3)
    assert method["difference"]["half"] == pytest.approx(4.302653 * 0.05 / 3)
    assert method["difference"]["pairs"] == 3 and not method["difference"]["noise"]
    # 0, 0, 0.1: mean 0.0333, deviation 0.0577, standard error 0.0333
    assert method["best_difference"]["mean"] == pytest.approx(0.1 / 3)
    assert method["best_difference"]["error"] == pytest.approx(0.1 / 3) and method["best_difference"]["noise"]
    assert method["relative_flops"] == method["relative_training_flops"] == 4.5
    assert method["relative_speed"] == 0.25 and method["tokens_per_second"] == 50
    assert method["against"]["longer"]["mean"] == pytest.approx(0.4) and method["against"].keys() == {"longer"}

    assert longer["relative_flops"] == 1 and longer["relative_training_flops"] == 4.5
    assert longer["loss"] == (1.5, None) and longer["against"] == {}
    alone = {"each": [-0.5], "mean": -0.5, "error": None, "half": None, "pairs": 1, "noise": True}
    assert longer["difference"] == alone

    cells = {name: cell(method) for name, cell in tables.COLUMNS.items()}
    assert cells["Δ loss"] == "-0.1167 ± 0.0717" and cells["Δ best loss"] == "≈ +0.0333 ± 0.1434"
    assert (cells["FLOPs/token"], cells["tokens/s"], cells["peak MB"]) == ("4.50", "0.25", "3")
    cells = {name: cell(longer) for name, cell in tables.COLUMNS.items()}
    assert (cells["loss"], cells["Δ loss"], cells["tokens/s"]) == ("1.5000", "-0.5000", "–")
    assert tables.show_difference(analysis.estimate([-0.5, 0.25])) == "-0.5000, +0.2500"  # each stands for itself


def test_the_noise_of_all_rows_together():
    """Of a thousand rows it is what was put in, whatever the rows' and seeds' own means."""
    rng = np.random.default_rng(0)
    losses = rng.normal(0, 0.02, (1000, 4)) + rng.normal(0, 1, (1000, 1)) + rng.normal(0, 1, (1, 4))
    groups = {n: [record("method1", seed, loss) for seed, loss in enumerate(row)] for n, row in enumerate(losses)}
    assert analysis.paired_deviation(groups) == pytest.approx(0.02 * math.sqrt(2), rel=0.05)
    # of two rows it is that of their differences; seeds that one of them lacks do not count
    two = {0: groups[0], 1: [*groups[1], record("method1", 9, 5.0)]}
    assert analysis.paired_deviation(two) == pytest.approx(statistics.stdev(losses[0] - losses[1]))
    # nor do rows that have one seed so far
    assert analysis.paired_deviation(two | {2: groups[2][:1]}) == analysis.paired_deviation(two)
    assert analysis.paired_deviation({0: groups[0], 1: groups[1][:1]}) is None
    assert analysis.paired_deviation({0: groups[0], 1: groups[1][2:]}) == analysis.paired_deviation(
        {0: groups[0][2:], 1: groups[1]}
    )
    assert analysis.paired_deviation({0: groups[0][:2], 1: groups[1][2:]}) is None
    assert analysis.paired_deviation({0: groups[0]}) is None


@pytest.mark.parametrize("pairs", [3, 5, 10, 40])
def test_intervals_and_p_values_are_those_of_a_paired_t_test(pairs):
    rng = np.random.default_rng(pairs)
    ours, theirs = rng.normal(0.3, 1, pairs), rng.normal(0, 1, pairs)
    entry = analysis.difference(
        [record("method1", seed, loss) for seed, loss in enumerate(ours)],
        [record("baseline", seed, loss) for seed, loss in enumerate(theirs)],
    )
    test = scipy.stats.ttest_rel(ours, theirs)
    low, high = test.confidence_interval(0.95)
    assert (entry["mean"] - entry["half"], entry["mean"] + entry["half"]) == pytest.approx((low, high))
    assert analysis.p_value(entry) == pytest.approx(test.pvalue)
    assert entry["noise"] == (test.pvalue > 0.05)
    # beyond a margin: both one-sided tests at it, on the side where the mean lies
    away = (ours - theirs) * np.sign(entry["mean"])
    both = [scipy.stats.ttest_1samp(away, side, alternative="greater").pvalue for side in (-0.01, 0.01)]
    assert analysis.p_value(entry, 0.01) == pytest.approx(sum(both)) and analysis.p_value(entry, 0.01) > test.pvalue
    # noise ends where the interval does
    deviations = np.linspace(-1, 1, pairs)
    half = analysis.estimate(deviations)["half"]
    assert (
        analysis.estimate(deviations + 0.99 * half)["noise"]
        and not analysis.estimate(deviations + 1.01 * half)["noise"]
    )


def test_holm():
    """By hand: 0.005·4, 0.01·3, 0.03·2, and 0.04·1, which may not be below the one before."""
    assert analysis.holm([0.01, 0.04, 0.03, 0.005], 4) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert analysis.holm([0.6, 0.9], 2) == [1.0, 1.0] and analysis.holm([], 2) == []
    assert analysis.holm([0.01, 0.005], 4) == pytest.approx([0.03, 0.02])  # the other two are missing


def test_contrasts():
    losses = {"baseline": (2.0, 2.1, 2.2), "method3_2": (1.9, 2.0, 2.15), "looped": (1.8, 2.1, 2.1), "hc": (1.0,)}
    groups = {row: [record(row, seed, loss) for seed, loss in enumerate(of)] for row, of in losses.items()}
    groups["method1"] = groups["method3_2"][:2]
    named = [(row, "baseline") for row in ("method3_2", "hc", "mudd", "method1")] + [("method3_2", "looped")]
    first, second = analysis.contrasts(groups, named)  # one pair or two are no test, and mudd is not there
    p = [scipy.stats.ttest_rel(losses["method3_2"], losses[row]).pvalue for row in ("baseline", "looped")]
    assert (first["p"], second["p"]) == pytest.approx(p)
    # five were named, so that Holm's factors are 5 and 4
    assert (first["holm"], second["holm"]) == pytest.approx((5 * p[0], min(1, max(5 * p[0], 4 * p[1]))))
    margins = [first["p_margin"], second["p_margin"]]
    assert (first["holm_margin"], second["holm_margin"]) == pytest.approx((min(1, 5 * margins[0]), 1.0))
    assert 5 * margins[0] < 4 * margins[1]
    same = [record("method1", seed, 2.0) for seed in range(3)]
    assert analysis.p_value(analysis.difference(same, same)) == 1.0
    assert analysis.p_value(analysis.difference(same, [record("hc", seed, 1.0) for seed in range(3)]), 0.01) == 0.0
    *_, line = tables.contrast_table([first]).splitlines()
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[:3] == ["method3_2", "baseline", "3"] and float(cells[4]) == pytest.approx(p[0], rel=0.05)
    assert float(cells[7]) == pytest.approx(first["holm_margin"], rel=0.05)


def test_what_the_baseline_must_spend():
    """A loss that falls by 0.5 with each doubling: interpolation over the logarithm is exact."""
    points = [(cost, 3 - 0.5 * math.log2(cost)) for cost in (1, 2, 4, 8)]
    for cost in (1, 1.3, 2, 5, 8):
        assert analysis.reach(points, 3 - 0.5 * math.log2(cost)) == (pytest.approx(cost), "inside")
    assert analysis.reach(points, 3.1) == (1, "cheaper") and analysis.reach(points, 1.4) == (8, "dearer")
    # a curve that bends: between two lengths the cost lies between theirs, and more loss is never dearer
    bent = [(1, 3.0), (2, 2.0), (4, 1.7), (8, 1.65)]
    costs = [analysis.reach(bent, loss)[0] for loss in np.linspace(3.0, 1.65, 50)]
    assert all(a < b for a, b in itertools.pairwise(costs)) and 2 < analysis.reach(bent, 1.8)[0] < 4
    # a longer run that is no better, as when it fits the training data too closely, is left out of the curve; but what
    # it did not reach costs more
    assert analysis.reach([*points, (16, 1.8)], 1.6) == (pytest.approx(2**2.8), "inside")
    assert analysis.reach([*points, (16, 1.8)], 1.4) == (16, "dearer")


def test_worth():
    lengths = {"baseline-x0.5": 500, "baseline": 1000, "baseline-x2": 2000, "baseline-x4": 4000}
    baselines = [
        record(row, seed, 3 + seed / 100 - 0.5 * math.log2(tokens), tokens=tokens)
        for row, tokens in lengths.items()
        for seed in (1, 2, 3)
    ]

    def loss(factor, seed):
        """What the baseline of this seed reaches with so many times its FLOPs."""
        return 3 + seed / 100 - 0.5 * math.log2(1000 * factor)

    # it spent twice the FLOPs, and reached what the baseline would with 1.5, 2.5 and 3 times its own
    factors = {1: 1.5, 2: 2.5, 3: 3.0}
    method = [record("method3_2", seed, loss(factor, seed), flops=200) for seed, factor in factors.items()]
    entry = analysis.worth(method, baselines, analysis.training_flops)
    logs = [math.log(factor / 2) for factor in factors.values()]
    interval = scipy.stats.t.interval(0.95, 2, np.mean(logs), scipy.stats.sem(logs))
    assert entry["mean"] == pytest.approx(scipy.stats.gmean([factor / 2 for factor in factors.values()]))
    assert (entry["low"], entry["high"]) == pytest.approx(np.exp(interval))
    assert entry["bound"] is None and entry["outside"] == 0
    assert tables.show_worth(entry) == f"{entry['mean']:.2f} [{entry['low']:.2f}, {entry['high']:.2f}]"

    # a seed that lacks a length has another curve: it is left out
    lacking = [other for other in baselines if (other["row"], other["seed"]) != ("baseline-x4", 3)]
    fewer = analysis.worth(method, lacking, analysis.training_flops)
    assert fewer["seeds"] == 2 and fewer["mean"] == pytest.approx(scipy.stats.gmean([1.5 / 2, 2.5 / 2]))
    assert fewer["low"] is None and tables.show_worth(fewer) == "0.75, 1.25"

    # outside of what was measured there is a bound and no guess
    method[0] = record("method3_2", 1, loss(5, 1), flops=200)
    entry = analysis.worth(method, baselines, analysis.training_flops)
    assert entry["bound"] == "above" and entry["low"] is None and entry["outside"] == 1
    assert entry["mean"] == pytest.approx(scipy.stats.gmean([4 / 2, 2.5 / 2, 3 / 2]))
    assert tables.show_worth(entry) == f"> {entry['mean']:.2f} (1 of 3 outside)"
    method[1] = record("method3_2", 2, loss(0.3, 2), flops=200)
    both = analysis.worth(method, baselines, analysis.training_flops)
    assert both["bound"] == "both" and tables.show_worth(both) == "– (2 of 3 outside)"
    del method[0]
    below = analysis.worth(method, baselines, analysis.training_flops)
    assert below["bound"] == "below" and tables.show_worth(below) == "< 0.25, 1.50"
    assert analysis.worth(method, baselines[:3], analysis.training_flops) is None  # one length is no curve

    # in time: the method steps at 0.4 of the baseline's speed, whatever its FLOPs
    speeds = {"baseline": speed() | {"relative": 1.0}, "method3_2": speed() | {"relative": 0.4}}
    one = [record("method3_2", 1, loss(1.5, 1), flops=200)]
    entry = next(e for e in analysis.summarize([*baselines, *one], speeds) if e["row"] == "method3_2")
    assert entry["worth_time"]["mean"] == pytest.approx(1.5 * 0.4)
    assert entry["worth_flops"]["mean"] == pytest.approx(1.5 / 2)


def test_the_terminals_table_fits():
    name = "deeper-method3_2-stored-own"
    summary = analysis.summarize([record(name, seed, 1.9 + seed / 10) for seed in (1, 2)], {})
    header, cells = tables.full_table(summary)
    assert {"bits/byte", "perplexity", "accuracy", "best loss"} <= set(header)
    lines = tables.terminal_table(header, cells).splitlines()
    assert max(map(len, lines)) <= 120 and name in lines[2] and "loss" in lines[0]


def test_no_best_loss_where_evaluations_saw_a_part_of_the_text():
    records = [record(row, 1, 2.0) | {"best_loss": None} for row in ("baseline", "mudd")]
    header, _ = tables.full_table(analysis.summarize(records, {}))
    assert "Δ loss" in header and "best loss" not in header and "Δ best loss" not in header


# --- speed ------------------------------------------------------------------------------------------------------------


def read_speeds(folder):
    return json.loads((folder / "results/speed.json").read_text())


class WanderingMachine:
    """A Stepper on a machine that becomes 1 % slower with every turn; a step of method3_2 costs 2.5 others."""

    slowness = 0.001

    def __init__(self, row):
        self.row, self.turn_steps, self.memory = row, 4, 500
        self.machine = dict.fromkeys(measure.MACHINE_KEYS, "x") | {"device_type": "cpu"}

    def seconds_of(self, steps):
        WanderingMachine.slowness *= 1.01
        return WanderingMachine.slowness * (2.5 if self.row == "method3_2" else 1)


@pytest.fixture
def wandering(monkeypatch):
    monkeypatch.setattr(WanderingMachine, "slowness", WanderingMachine.slowness)
    monkeypatch.setattr(measure, "stepper", lambda scale, seed, s, row: contextlib.nullcontext(WanderingMachine(row)))


def test_measured_speed_is_relative_to_the_baseline_beside_it(tmp_path, monkeypatch, wandering):
    call(monkeypatch, *arguments(tmp_path, modes="method3_2,method3_2-x2,longer,baseline-x2", measure=True))
    speeds = read_speeds(tmp_path)
    assert WanderingMachine.slowness > 0.01  # ten times slower in the end than at first
    assert speeds.keys() == {"baseline", "method3_2"}  # length changes nothing in a step
    base, method = speeds["baseline"], speeds["method3_2"]
    assert method["relative"] == pytest.approx(0.4, rel=1e-4) and method["rounds"] == pytest.approx([0.4] * 3, rel=1e-4)
    assert base["relative"] == 1 and base["rounds"] == pytest.approx([1] * 3, rel=1e-4)  # beside another baseline
    assert method["memory"] == 500 and method["tokens_per_second"] == base["tokens_per_second"] * method["relative"]
    text = call(monkeypatch, *arguments(tmp_path, modes="baseline,method3_2", plan=True, max_steps=9000))
    hours = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in text.splitlines()[2:4]}
    assert hours == {row: f"{2 * 9000 * 64 / speeds[row]['tokens_per_second'] / 3600:.1f}" for row in speeds}
    assert "at the measured speeds" in text
    assert "Hours missing" in call(monkeypatch, *arguments(tmp_path, modes="baseline", plan=True, ffn_hidden=40))


def test_the_table_says_how_speeds_were_measured():
    records = [record("baseline", 1, 2.0), record("hc", 1, 1.9)]
    alone = tables.measured_text(analysis.summarize(records, {"hc": speed()}))
    assert alone.startswith("measured by `--measure=True`") and alone.endswith("OMP_NUM_THREADS=2")
    speeds = {"hc": speed(), "baseline": speed() | {"rounds": [1.0, 0.96, 1.024]}}
    both = tables.measured_text(analysis.summarize(records, speeds))
    assert both == alone + "; a second baseline came out at 0.96 to 1.02 in 3 rounds"


def test_measuring_a_row_again_keeps_the_others_speeds(tmp_path, monkeypatch, wandering):
    call(monkeypatch, *arguments(tmp_path, modes="method3_2", measure=True))
    before = read_speeds(tmp_path)
    call(monkeypatch, *arguments(tmp_path, modes="hc", measure=True))
    after = read_speeds(tmp_path)
    assert after.keys() == {"baseline", "method3_2", "hc"} and after["method3_2"] == before["method3_2"]


@pytest.mark.parametrize(("device", "at_once", "turns"), [("cpu", 2, measure.TURNS), ("cuda", 1, 1)])
def test_gpus_are_measured_one_after_the_other(device, at_once, turns, wandering):
    now, most = [], []

    @contextlib.contextmanager
    def start(row):
        now.append(row)
        most.append(len(now))
        one = WanderingMachine(row)
        one.machine["device_type"] = device
        yield one
        now.remove(row)

    pairs, stepper = measure.side_by_side(start, "method3_2")
    assert max(most) == at_once and len(pairs) == turns and stepper.row == "method3_2"
    assert measure.ratio(pairs) == pytest.approx(0.4, rel=0.02)


def test_a_stopped_measurement_leaves_no_process(tmp_path, monkeypatch):
    started = []

    def start_process(program, s, slot, log, stdin, stdout):
        waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        started.append(subprocess.Popen(waits, stdin=stdin, stdout=stdout))
        return started[-1]

    def interrupted(*_):
        raise KeyboardInterrupt  # while it starts and compiles

    monkeypatch.setattr(measure, "start_process", start_process)
    monkeypatch.setattr(measure, "Stepper", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(monkeypatch, *arguments(tmp_path, measure=True))
    (process,) = started
    assert process.returncode is not None and process.stdin.closed and process.stdout.closed


def test_out_of_memory_while_measuring(tmp_path):
    full = "import tools.compare.steps as steps\ndef full(*_, **__): raise MemoryError\nsteps.start_training = full"
    keys = options(**TINY | {"dataset": dataset(), "out_dir": tmp_path})
    check_error(run("tools.compare.steps", *keys, before=full), "out of memory: use a smaller micro_batch")


@pytest.mark.parametrize("nproc", [1, 2])
def test_measuring_really(nproc, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "TURNS", 2)
    monkeypatch.setattr(measure, "TURN_SECONDS", 0.01)
    call(monkeypatch, *arguments(tmp_path, modes="method3_2", nproc=nproc, measure=True))
    speeds = read_speeds(tmp_path)
    assert speeds.keys() == {"baseline", "method3_2"}
    for entry in speeds.values():
        assert entry["tokens_per_second"] > 0 and len(entry["rounds"]) == 1
        assert entry["memory"] > 50 * 2**20  # of a process that has loaded torch
        assert (entry["machine"]["processes"], entry["machine"]["dtype"]) == (nproc, "float32")


def test_what_cannot_be_measured(tmp_path):
    process = run("tools.compare.__main__", *arguments(tmp_path, measure=True, batch_tokens=60))
    assert process.status == 1 and "Traceback" not in process.stderr
    assert process.stderr.splitlines()[-1].startswith("error: baseline could not be measured: batch_tokens=60 must be")
    assert not (tmp_path / "results/speed.json").exists()


def test_a_job_gets_its_share_of_the_machine(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(runs.subprocess, "Popen", lambda command, **rest: started.append((command, rest["env"])))
    monkeypatch.setattr(runs.os, "cpu_count", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for gpus, jobs, nproc in [(0, 3, 1), (4, 2, 2), (2, 2, 1)]:
        if jobs == 2 and nproc == 1:  # a cluster's choice
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
        monkeypatch.setattr(runs.torch.cuda, "device_count", lambda gpus=gpus: gpus)
        program = [str(ROOT / "train.py"), "--seed=1"]
        runs.start_process(program, SimpleNamespace(jobs=jobs, nproc=nproc), jobs - 1, tmp_path / "log")
    (alone, cpu), (torchrun, gpu), (_, given) = started
    assert given["CUDA_VISIBLE_DEVICES"] == "7"
    assert alone[1:] == [str(ROOT / "train.py"), "--seed=1"]
    assert cpu["OMP_NUM_THREADS"] == "4" and "CUDA_VISIBLE_DEVICES" not in cpu
    assert torchrun[2] == "torch.distributed.run" and "--nproc_per_node=2" in torchrun
    assert gpu["OMP_NUM_THREADS"] == "3" and gpu["CUDA_VISIBLE_DEVICES"] == "2,3"


# --- the results in the repository ------------------------------------------------------------------------------------

RESULTS = sorted(path.parent for path in (ROOT / "results").glob("*/results.json") if (path.parent / "runs").is_dir())


@pytest.mark.parametrize("folder", RESULTS, ids=lambda folder: folder.name)
def test_results_are_made_from_their_records(folder, tmp_path, monkeypatch):
    """The tables in the repository, made again."""
    no_pictures(monkeypatch)
    copy = shutil.copytree(folder, tmp_path / folder.name)
    assert call(monkeypatch, copy).startswith("| row ")
    for name in ("README.md", "results.json", "results.csv"):
        assert (copy / name).read_bytes() == (folder / name).read_bytes(), name


def test_the_readme_prints_what_the_results_say():
    """Every cell of a table of rows in README.md is that of the results which its section names first."""
    checked = 0
    for section in (ROOT / "README.md").read_text().split("\n## "):
        named = [folder for folder in re.findall(r"results/(\w+)", section) if ROOT / "results" / folder in RESULTS]
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
        if not named or not lines or lines[0][0] != "row":
            continue
        header, _, *cells = lines
        entries = json.loads((ROOT / "results" / named[0] / "results.json").read_text())["rows"]
        for line in cells:
            (entry,) = (entry for entry in entries if tables.row_cell(entry) == line[0])
            known = {name: cell for name, cell in zip(header, line, strict=True) if name in tables.COLUMNS}
            assert known == {name: tables.COLUMNS[name](entry) for name in known} and len(known) > 2
            checked += 1
    assert checked
