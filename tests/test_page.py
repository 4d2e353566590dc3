"""The page of tools/page: what is in its data, and what a real browser shows of it."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import ROOT, check_error, good, snapshot, start, tiny

from tools import page as tool

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking".split()
FLAGS += ["--disable-component-update", "--disable-sync"]
HOSTILE = "</script><img src=x onerror=hacked()>\"'`\\\u2028 & <b>%{x}"


# --- made-up runs -----------------------------------------------------------------------------------------------------


def train_line(step, **changes):
    numbers = {"step": step, "tokens": 64 * step, "epoch": step / 100, "loss": 5 - step / 1000, "lr": 1e-3}
    numbers |= {"grad_norm": 1.0, "tokens_per_sec": 5e3, "memory": 2**29, "seconds": step / 10}
    return json.dumps(numbers | changes) + "\n"


def eval_line(step, loss):
    numbers = {
        "step": step,
        "tokens": 64 * step,
        "seconds": step / 10,
        "eval_loss": loss,
        "eval_bits_per_byte": 2 * loss,
    }
    return json.dumps(numbers) + "\n"


def make_run(folder, lines=None, **changes):
    about = {"steps": 100, "state": "finished", "error": None, "host": socket.gethostname(), "pid": os.getpid()}
    about |= {"mode": "baseline", "parameters": 12345, "flops_per_token": 1e4, "dataset": "text", "started": 1.0}
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(about | changes))
    if lines is None:
        lines = [train_line(step) for step in range(1, 51)] + [eval_line(25, 4.5), eval_line(50, 4.75)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    mixing = {"rows": ["a0", "f0", "head"], "columns": ["e", "a0", "f0"], "matrix": [[1, 0, 0], [1, 0.5, 0], [1, 1, 2]]}
    (folder / "depth_mixing.json").write_text(json.dumps(mixing))
    return folder


ROWS = ["baseline", "method1", "method2", "method3_1", "method3_2", "method4_1", "method4_2", "x0", "mudd", "longer"]


def make_comparison(folder):
    """Ten rows with three seeds each; the baseline and longer, which costs three times as much, are the frontier."""
    (folder / "runs").mkdir(parents=True)
    rows = []
    for n, row in enumerate(ROWS):
        flops, mean = 1.0 + n % 4 if row != "longer" else 3.0, 2 + n / 100 if row != "longer" else 1.5
        for seed in (1, 2, 3):
            loss = mean + 0.05 * (seed - 2)
            curve = {"tokens": [640, 1280], "flops": [flops, 2 * flops], "seconds": [10, 20], "loss": [loss + 1, loss]}
            record = {"row": row, "seed": seed, "settings": {"batch_tokens": 64}, "code": "", "parameters": 900}
            record |= {"data": {"val_tokens": 101, "val_bytes": 200, "source": "a text"}, "curve": curve}
            record |= {"flops_per_token": 1e4, "loss": loss, "best_loss": loss, "weights": None, "depth_mixing": None}
            record["bits_per_byte"] = loss * 100 / math.log(2) / 200
            (folder / f"runs/{row}-seed{seed}.json").write_text(json.dumps(record))
        numbers = {"tokens": 1280, "parameters": 900, "n_layer": 4, "loops": 1, "learning_rate": 0.004, "memory": None}
        numbers |= {"relative_training_flops": flops, "relative_flops": flops, "relative_speed": 1 / flops}
        numbers |= {
            "tokens_per_second": 64 / flops,
            "bits_per_byte": 1.5,
            "accuracy": [0.5, 0.01],
            "loss": [mean, 0.05],
        }
        difference = {"mean": mean - 2, "error": 0.005, "half": 0.0125, "pairs": 3, "noise": abs(mean - 2) < 0.05}
        worth = {"mean": 0.5, "low": None, "high": None, "seeds": 3, "bound": "below", "outside": 1}
        entry = {"row": row, "seeds": [1, 2, 3], "difference": difference if n else None, "worth_flops": worth}
        rows.append(entry | numbers)
    results = {
        "commands": ["python -m tools.compare"],
        "rows": rows,
        "left_out": ["Left out: one"],
        "failed": {"x": "y"},
    }
    (folder / "results.json").write_text(json.dumps(results))
    return rows


def append(folder, *lines):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("".join(lines))


def command(*args, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "tools.page", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        **options,
    )


def run_page(*args, **options):
    """Its exit status, stdout and stderr as check_error expects them."""
    process = command(*args, **options)
    process.stdout, process.stderr = process.communicate(timeout=60)
    process.status = process.returncode
    return process


def write(folder, *args):
    """The page of these arguments in this folder: what its data.js says."""
    process = run_page(*args, f"--out_dir={folder}")
    assert (process.status, process.stderr) == (0, "")
    assert process.stdout == f"{(folder / 'index.html').as_uri()}\n"
    assert sorted(path.name for path in folder.iterdir()) == ["data.js", "index.html", "plotly.min.js"]
    return read_data(folder / "data.js")


def read_data(path):
    content = path.read_bytes()
    assert content.isascii() and b"<" not in content
    return json.loads(content.removeprefix(b"receive(").removesuffix(b");\n"))


def by_name(data):
    return {os.path.basename(run["name"]): run for run in data["runs"]}


def look(watcher):
    return by_name(json.loads("{" + watcher.look() + "}"))


# --- the data ---------------------------------------------------------------------------------------------------------


def test_says_what_the_files_say(tmp_path):
    make_run(tmp_path / "out/a", state="training", mode="method3_2")
    make_run(tmp_path / "out/deep/er/b", lines=[train_line(2), eval_line(4, 3.0), train_line(5)])
    (tmp_path / "out/deep/er/b/eval_results.json").write_text(json.dumps({"eval_loss": 3.5, "eval_bits_per_byte": 1}))
    before = snapshot(tmp_path / "out")
    data = write(tmp_path / "page", tmp_path / "out")
    assert snapshot(tmp_path / "out") == before
    runs = by_name(data)
    assert [run["name"] for run in data["runs"]] == [f"{tmp_path}/out/a", f"{tmp_path}/out/deep/er/b"]
    assert data["watch"] == 0 and abs(time.time() - data["written"]) < 100
    numbers = {"progress": 0.5, "seconds": 5, "train_loss": 4.95, "loss": 4.75, "best_loss": 4.5, "bits_per_byte": 9.5}
    numbers |= {"tokens_per_second": 5e3, "memory": 2**29, "parameters": 12345, "flops_per_token": 1e4}
    texts = {"mode": "method3_2", "dataset": "text", "state": "training", "note": "", "silent_since": None}
    assert {key: runs["a"][key] for key in numbers | texts} == numbers | texts
    val = {
        "step": [25, 50],
        "tokens": [1600, 3200],
        "seconds": [2.5, 5],
        "loss": [4.5, 4.75],
        "bits_per_byte": [9, 9.5],
    }
    assert runs["a"]["val"] == val
    assert runs["a"]["train"]["loss"] == pytest.approx([5 - step / 1000 for step in range(1, 51)])
    assert runs["a"]["mixing"]["matrix"] == [[1, 0, 0], [1, 0.5, 0], [1, 1, 2]]
    # progress is the last line's, and a finished run's loss is that of its last evaluation, which is of all the text
    assert (runs["b"]["progress"], runs["b"]["loss"], runs["b"]["best_loss"]) == (0.05, 3.5, 3.0)


def test_long_curves_are_means(tmp_path):
    rng = np.random.default_rng(0)
    losses, evals = rng.normal(size=5000), rng.normal(size=1300)
    lines = [train_line(step + 1, loss=loss) for step, loss in enumerate(losses)]
    make_run(tmp_path / "run", lines + [eval_line(step, loss) for step, loss in enumerate(evals)])
    run = look(tool.Watcher([tmp_path]))["run"]
    assert 300 <= len(run["train"]["loss"]) <= 600
    stride = math.ceil(5000 / len(run["train"]["loss"]))
    means = [losses[i : i + stride].mean() for i in range(0, 5000, stride)]
    assert run["train"]["loss"] == pytest.approx(means, rel=1e-5)
    assert run["train"]["step"][0] == (1 + stride) / 2
    assert run["best_loss"] == evals.min() and run["loss"] == evals[-1]  # not those of the thinned curve


def test_state(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    make_run(tmp_path / "alive", state="training")
    make_run(tmp_path / "gone", state="training", pid=gone.pid)
    make_run(tmp_path / "elsewhere", state="training", pid=gone.pid, host="another")
    make_run(tmp_path / "silent", state="training", pid=gone.pid, host="another")
    make_run(tmp_path / "failed", state="failed", error="loss nan")
    make_run(tmp_path / "odd-pid", state="training", pid="7")
    for path in (tmp_path / "silent").iterdir():
        os.utime(path, (0, time.time() - 700))
    runs = look(tool.Watcher([tmp_path]))
    states = {name: run["state"] for name, run in runs.items()}
    assert states == {
        "alive": "training",
        "elsewhere": "training",
        "silent": "training",
        "gone": "stopped",
        "odd-pid": "stopped",
        "failed": "failed",
    }
    assert [name for name, run in runs.items() if run["silent_since"]] == ["silent"]
    assert runs["failed"]["note"] == "loss nan"


def test_a_process_that_ends_is_noticed_though_no_file_changes(tmp_path):
    process = subprocess.Popen(["sleep", "100"])
    make_run(tmp_path / "run", state="training", pid=process.pid)
    watcher = tool.Watcher([tmp_path])
    assert look(watcher)["run"]["state"] == "training"
    process.kill()
    process.wait()
    assert look(watcher)["run"]["state"] == "stopped"


def test_reads_only_what_was_appended(tmp_path):
    folder = make_run(tmp_path / "run")
    watcher = tool.Watcher([tmp_path])
    first = look(watcher)["run"]["train"]["loss"]
    path = folder / "metrics.jsonl"
    with open(path, "r+b") as file:  # a change that only a second reading would see
        file.write(b"x" * 20)
    append(folder, train_line(51, loss=2.0), train_line(52, loss=1.0)[:30])
    run = look(watcher)["run"]
    assert run["train"]["loss"] == [*first, 2.0] and run["note"] == ""  # a half-written line waits
    append(folder, train_line(52, loss=1.0)[30:])
    assert look(watcher)["run"]["train"]["loss"] == [*first, 2.0, 1.0]


@pytest.mark.parametrize("how", ["replaced", "cut"])
def test_a_run_that_resumes_is_read_anew(tmp_path, how):
    folder = make_run(tmp_path / "run")
    watcher = tool.Watcher([tmp_path])
    look(watcher)
    lines = [train_line(step, loss=1.5) for step in range(1, 80)]  # longer than before
    if how == "replaced":
        (folder / "new").write_text("".join(lines))
        (folder / "new").rename(folder / "metrics.jsonl")
    else:
        (folder / "metrics.jsonl").write_text("".join(lines))
    run = look(watcher)["run"]
    assert run["train"]["loss"] == [1.5] * 79 and run["val"]["loss"] == []


def test_records_and_comparisons(tmp_path):
    rows = make_comparison(tmp_path / "results/mine")
    data = write(tmp_path / "page", tmp_path / "results")
    (comparison,) = data["comparisons"]
    assert comparison["command"] == "python -m tools.compare"
    assert comparison["note"] == "Left out: one\nfailed: x: y"
    same = "row loss accuracy bits_per_byte relative_training_flops relative_speed parameters".split()
    assert [[row[key] for key in same] for row in comparison["rows"]] == [[row[key] for key in same] for row in rows]
    assert comparison["rows"][1]["difference"] == [pytest.approx(0.01), 0.0125] and comparison["rows"][1]["noise"]
    assert comparison["rows"][1]["worth_flops"] == [0.5, "below"] and comparison["rows"][1]["seeds"] == 3
    run = by_name(data)["method3_2-seed3"]
    assert (run["state"], run["mode"], run["dataset"], run["progress"]) == ("finished", "method3_2", "a text", 1)
    assert run["val"]["loss"] == [pytest.approx(3.09), pytest.approx(2.09)] and run["val"]["tokens"] == [640, 1280]
    assert run["val"]["step"] == [10, 20] and run["val"]["seconds"] == [10, 20]
    # a loss is the mean over all tokens but the first
    assert run["bits_per_byte"] == pytest.approx(2.09 * 100 / math.log(2) / 200) == run["val"]["bits_per_byte"][-1]


def test_shows_the_results_of_this_repository(tmp_path):
    data = write(tmp_path / "page", ROOT / "results")
    runs = {run["name"]: run for run in data["runs"]}
    for path in (ROOT / "results").glob("*/runs/*.json"):
        record, run = json.loads(path.read_text()), runs[str(path.with_suffix(""))]
        assert (run["state"], run["note"], run["loss"]) == ("finished", "", record["loss"])
        assert run["val"]["loss"] == record["curve"]["loss"]
    for path in (ROOT / "results").glob("*/results.json"):
        (comparison,) = [one for one in data["comparisons"] if one["name"] == str(path.parent)]
        expected = [(row["row"], row["loss"][0]) for row in json.loads(path.read_text())["rows"]]
        assert [(row["row"], row["loss"][0]) for row in comparison["rows"]] == expected


def test_a_finished_run_stands_for_its_record(tmp_path):
    make_comparison(tmp_path / "results/mine")
    make_run(tmp_path / "out/compare/mine/baseline-seed1")
    make_run(tmp_path / "out/compare/mine/baseline-seed2", state="stopped")
    make_run(tmp_path / "out/compare/mine/tuning/baseline-lr0.004")
    tuning, other = tmp_path / "results/mine/runs/tuning", tmp_path / "results/other/runs"
    tuning.mkdir()
    shutil.copy(tuning.parent / "baseline-seed1.json", tuning / "baseline-lr0.004.json")
    diverged = {"row": "baseline", "seed": 0, "settings": {"learning_rate": 1.0}, "diverged": "step 7: loss nan"}
    (tuning / "baseline-lr1.json").write_text(json.dumps(diverged))
    other.mkdir(parents=True)
    shutil.copy(tuning.parent / "baseline-seed1.json", other / "baseline-seed1.json")
    runs = json.loads("{" + tool.Watcher([tmp_path]).look() + "}")["runs"]

    def folders(name):
        return sorted(os.path.dirname(run["name"]) for run in runs if run["name"].endswith("/" + name))

    assert folders("baseline-seed1") == [f"{tmp_path}/out/compare/mine", f"{other}"]
    assert folders("baseline-seed2") == [f"{tmp_path}/out/compare/mine", f"{tuning.parent}"]
    assert folders("baseline-lr0.004") == [f"{tmp_path}/out/compare/mine/tuning"]
    (bad,) = [run for run in runs if run["state"] == "failed"]
    assert bad["name"].endswith("baseline-lr1") and bad["note"] == "step 7: loss nan"


DAMAGE = [b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"state": ["training"], "rows": 7}', b"[" * 100_000]


@pytest.mark.parametrize("content", DAMAGE)
@pytest.mark.parametrize("name", ["run.json", "depth_mixing.json", "eval_results.json"])
def test_a_damaged_file_is_one_row_that_says_so(tmp_path, name, content):
    folder = make_run(tmp_path / "out/run")
    make_run(tmp_path / "out/other")
    (folder / name).write_bytes(content)
    runs = look(tool.Watcher([tmp_path / "out"]))
    assert runs["other"]["state"] == "finished" and runs["other"]["note"] == ""
    if content == DAMAGE[5] and name == "eval_results.json":
        assert runs["run"]["note"] == ""  # an object without what is looked for
    elif content == DAMAGE[5] and name == "run.json":
        assert runs["run"]["state"] == "damaged"
    else:
        assert name in runs["run"]["note"]
        assert runs["run"]["state"] == ("damaged" if name == "run.json" else "finished")
    assert len(runs["run"]["train"]["loss"]) == 50


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 3',
        b"[3]",
        b"3",
        b"\xff",
        b'{"step": 3, "loss": "<b>"}',
        b'{"step": 3, "loss": 1' + b"0" * 400 + b"}",
        b'{"step": 3, "loss": null}',
        b'{"step": 3, "loss": 1}, {"step": 4, "loss": 1}',
        b"{" + b'"a":[' * 100_000,
    ],
)
def test_a_damaged_line_is_named_and_left_out(tmp_path, line):
    folder = make_run(tmp_path / "run", [train_line(1, loss=4.0), train_line(2, loss=3.0)])
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(line + b"\n" + train_line(4, loss=2.0).encode())
    run = look(tool.Watcher([tmp_path]))["run"]
    assert run["note"] == f"line 3 of {folder}/metrics.jsonl is damaged"
    assert run["train"]["loss"] == [4.0, 3.0, 2.0]


def test_numbers_that_are_none(tmp_path):
    make_run(
        tmp_path / "run", [train_line(1, loss=math.nan, memory=10**400)], parameters="many", steps=-1, mode=[HOSTILE]
    )
    run = look(tool.Watcher([tmp_path]))["run"]
    assert run["train"]["loss"] == [None] and run["memory"] is run["parameters"] is None and run["mode"] == ""


@pytest.mark.parametrize("content", [*DAMAGE, b'{"row": "x", "curve": {"tokens": 3}}'])
def test_damaged_records_and_results(tmp_path, content):
    make_comparison(tmp_path / "results/mine")
    (tmp_path / "results/mine/runs/longer-seed1.json").write_bytes(content)
    (tmp_path / "results/mine/results.json").write_bytes(content)
    data = json.loads("{" + tool.Watcher([tmp_path]).look() + "}")
    bad = [run for run in data["runs"] if run["state"] != "finished"]
    assert [(os.path.basename(run["name"]), run["state"]) for run in bad] == [("longer-seed1.json", "damaged")]
    assert "longer-seed1.json" in bad[0]["note"]
    assert "results.json" in data["comparisons"][0]["note"] and data["comparisons"][0]["rows"] == []


def test_no_run_yet_and_what_is_no_run(tmp_path):
    (tmp_path / "out/empty").mkdir(parents=True)
    os.mkfifo(tmp_path / "out/empty/metrics.jsonl")
    make_run(tmp_path / "out/pipe")
    (tmp_path / "out/pipe/metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "out/pipe/metrics.jsonl")
    make_run(tmp_path / "out/broken", ["{\n"])
    (tmp_path / "out/broken/run.json").write_text("{")
    (tmp_path / "out/loop").symlink_to(tmp_path / "out")
    data = write(tmp_path / "page", tmp_path / "out")
    states = {name: run["state"] for name, run in by_name(data).items()}
    assert states == {"pipe": "finished", "broken": "damaged"} and data["comparisons"] == []


def test_runs_that_disappear(tmp_path, monkeypatch):
    for name in "abc":
        make_run(tmp_path / name)
    watcher = tool.Watcher([tmp_path])
    assert len(look(watcher)) == 3
    shutil.rmtree(tmp_path / "a")
    assert list(look(watcher)) == ["b", "c"]
    (tmp_path / "b/run.json").touch()

    def read_json(path, real=tool.read_json):  # the folder goes while it is read
        shutil.rmtree(path.parent, ignore_errors=True)
        return real(path)

    monkeypatch.setattr(tool, "read_json", read_json)
    for run in look(watcher).values():
        assert "cannot" not in run["note"]
    assert look(watcher) == {}


def test_hostile_texts_are_escaped(tmp_path):
    make_run(tmp_path / "out" / HOSTILE.replace("/", "|"), mode=HOSTILE, error=HOSTILE, state=HOSTILE, dataset=HOSTILE)
    data = write(tmp_path / "page", tmp_path / "out")  # which checks that there is no < in data.js
    (run,) = data["runs"]
    assert run["mode"] == run["note"] == run["dataset"] == run["state"] == HOSTILE
    os.mkdir(os.fsencode(tmp_path / "out") + b"/\xff\xfe")
    (tmp_path / "out/\udcff\udcfe/run.json").write_text("{}")  # a name that is not UTF-8
    assert len(write(tmp_path / "page", tmp_path / "out")["runs"]) == 2


# --- the command ------------------------------------------------------------------------------------------------------


def test_user_errors(tmp_path):
    make_run(tmp_path / "out/run")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/index.html").write_text("my home page")
    (tmp_path / "link").symlink_to(tmp_path / "site")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "none").mkdir()
    (tmp_path / "none/plotly.py").write_text("raise ImportError")
    before, out = snapshot(tmp_path), tmp_path / "out"
    check_error(run_page(tmp_path / "nowhere"), "there is no folder", "nowhere")
    check_error(run_page(out, "--watch=0", f"--out_dir={tmp_path / 'page'}"), "watch")
    check_error(run_page(out, "--watch=1", f"--save={tmp_path / 'page.html'}"), "--save")
    check_error(run_page(out, f"--out_dir={tmp_path / 'site'}"), "index.html", "choose another")
    check_error(run_page(out, f"--out_dir={tmp_path / 'link'}"), "link")
    check_error(run_page(out, f"--out_dir={tmp_path / 'file'}"), "cannot write")
    check_error(run_page(out, f"--save={tmp_path / 'file'}"), "choose another")
    check_error(run_page(out, f"--save={out}"), "cannot write")
    check_error(run_page(out, "--wach=3"), "did you mean watch?")
    no_plotly = {"PYTHONPATH": str(tmp_path / "none"), "PYTHONDONTWRITEBYTECODE": "1"}
    check_error(run_page(out, env=os.environ | no_plotly), "pip install", "requirements-page")
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "page").exists()


def test_links_are_replaced_not_followed(tmp_path):
    make_run(tmp_path / "out/run")
    (tmp_path / "page").mkdir()
    for name in ("index.html", "data.js", "plotly.min.js"):
        (tmp_path / f"precious {name}").write_text("precious")
        (tmp_path / "page" / name).symlink_to(tmp_path / f"precious {name}")
        assert (tmp_path / "page" / name).read_text() == "precious"
    write(tmp_path / "page", tmp_path / "out")
    (tmp_path / "page.html").symlink_to(tmp_path / "precious data.js")
    assert run_page(tmp_path / "out", f"--save={tmp_path / 'page.html'}").status == 0
    for name in ("index.html", "data.js", "plotly.min.js"):
        assert (tmp_path / f"precious {name}").read_text() == "precious"
        assert not (tmp_path / "page" / name).is_symlink()
    assert not (tmp_path / "page.html").is_symlink()


def test_needs_no_torch(tmp_path):
    make_run(tmp_path / "out/run")
    code = "import sys; sys.modules |= dict.fromkeys(['torch', 'model', 'numpy']); import tools.page as p; p.main()"
    arguments = [tmp_path / "out", f"--out_dir={tmp_path / 'page'}"]
    subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, check=True, capture_output=True)


@contextlib.contextmanager
def watching(folder, *args):
    process = command(*args, f"--out_dir={folder}", "--watch=0.2")
    try:
        assert process.stdout.readline() == f"{(folder / 'index.html').as_uri()}\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(condition, timeout=60):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_watching_writes_when_something_has_changed(tmp_path):
    folder, page = make_run(tmp_path / "out/run"), tmp_path / "page"
    with watching(page, tmp_path / "out") as process:
        first = (page / "data.js").stat()
        assert read_data(page / "data.js")["watch"] == 0.2
        append(folder, train_line(51, loss=0.5))
        wait_until(lambda: by_name(read_data(page / "data.js"))["run"]["train_loss"] == 0.5)
        make_run(tmp_path / "out/new")
        wait_until(lambda: set(by_name(read_data(page / "data.js"))) == {"run", "new"})
        shutil.rmtree(folder)
        wait_until(lambda: set(by_name(read_data(page / "data.js"))) == {"new"})
        last = (page / "data.js").stat()
        assert first.st_ino != last.st_ino
        time.sleep(1)  # several looks at nothing new
        assert (page / "data.js").stat() == last
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130 and process.stderr.read() == ""


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("no browser: install Debian's chromium, or Chrome")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Opens a page. In the end: no word in the console, no request but for the page's own files."""
    opened = []

    def open_page(path, width=1366, dark=False):
        page = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light")
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("#val .main-svg")
        opened.append((page, path, said, asked))
        return page

    yield open_page
    for page, path, said, asked in opened:
        page.close()
        own = {path.as_uri()}
        if path.name == "index.html":
            own |= {path.with_name(name).as_uri() for name in ("plotly.min.js", "data.js")}
        assert said == [] and {url.split("?")[0] for url in asked if not url.startswith("data:,")} == own


def names(page):
    """The runs in the table, from top to bottom."""
    return page.eval_on_selector_all("#runs tbody input", "boxes => boxes.map(box => box.name.split('/').pop())")


def plotted(page, chart="val"):
    """{name: (x, y)} of the curves in a chart, the faint ones left out."""
    script = "id => $(id).data.filter(one => one.top).map(one => [one.name, Array.from(one.x), Array.from(one.y)])"
    return {name: (x, y) for name, x, y in page.evaluate(script, chart)}


def lines(folder, key):
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if key in line]


@pytest.fixture(scope="module")
def real_runs(tmp_path_factory):
    """Two small runs through train.py."""
    folder = tmp_path_factory.mktemp("real") / "out"
    for mode in ("baseline", "method3_2"):
        good("train.py", *tiny(folder / mode, residual_mode=mode, max_steps=40, eval_every=10))
    return folder


def test_browser_selects_sorts_filters_and_switches(visit, real_runs, tmp_path):
    make_comparison(tmp_path / "results/mine")
    write(tmp_path / "page", real_runs, tmp_path / "results")
    page = visit(tmp_path / "page/index.html")
    assert page.locator("#runs tbody tr").count() == 2 + 3 * len(ROWS)
    buttons = page.eval_on_selector_all(".modebar-btn", "buttons => buttons.map(one => one.dataset.title)")
    assert buttons and not [
        title for title in buttons if "loud" in title or "hare" in title
    ]  # plotly's own would upload
    # filter by words and by state
    page.fill("#filter", "method3 SEED2")
    assert sorted(names(page)) == ["method3_1-seed2", "method3_2-seed2"]
    page.fill("#filter", str(real_runs))
    assert sorted(names(page)) == ["baseline", "method3_2"]
    page.click("#states button:has-text('finished')")
    assert sorted(names(page)) == ["baseline", "method3_2"]
    row = page.locator("#runs tbody tr", has_text="method3_2").first.inner_text()
    last = lines(real_runs / "method3_2", "eval_loss")[-1]
    assert "finished" in row and "100 %" in row and f"{last['eval_loss']:.4f}" in row
    # sort, up and down
    page.fill("#filter", "mine baseline")
    for _ in range(2):
        page.click("#runs th:has-text('val loss') button")
    assert names(page) == ["baseline-seed3", "baseline-seed2", "baseline-seed1"]
    page.click("#runs th:has-text('run') button")
    assert names(page) == ["baseline-seed1", "baseline-seed2", "baseline-seed3"]
    # select
    page.fill("#filter", "")
    page.click("#plot-none")
    assert plotted(page) == {} and page.locator("#chips button").count() == 0
    for mode in ("baseline", "method3_2"):
        page.check(f"input[name='{real_runs / mode}']")
    assert set(plotted(page)) == set(plotted(page, "train")) == {"baseline", "method3_2"}
    # axes
    run, about = lines(real_runs / "baseline", "eval_loss"), json.loads((real_runs / "baseline/run.json").read_text())
    for axis, values in {
        "tokens": [line["tokens"] for line in run],
        "steps": [10, 20, 30, 40],
        "FLOPs": [3 * about["flops_per_token"] * line["tokens"] for line in run],
        "time": [line["seconds"] for line in run],
    }.items():
        page.click(f"#axis button:text-is('{axis}')")
        x, y = plotted(page)["baseline"]
        assert x == pytest.approx(values, rel=1e-5) and y == pytest.approx(
            [line["eval_loss"] for line in run], rel=1e-5
        )
    page.click("#measure button:text-is('bits/byte')")
    assert plotted(page)["baseline"][1] == pytest.approx([line["eval_bits_per_byte"] for line in run], rel=1e-5)
    # smoothing: none is the losses themselves, full one weighs them by their distance
    losses, n = np.array([line["loss"] for line in lines(real_runs / "baseline", "loss")]), 40
    weights = (2 / 3) ** np.abs(np.arange(n)[:, None] - np.arange(n))
    for value, expected in (("0", losses), ("1", weights @ losses / weights.sum(axis=1))):
        page.fill("#smoothing", value)
        assert plotted(page, "train")["baseline"][1] == pytest.approx(list(expected), rel=1e-5)
    for box in ("#log-x", "#log-y", "#crop"):
        page.click(box)
    assert page.evaluate("[$('val').layout.xaxis.type, $('val').layout.yaxis.type]") == ["log", "log"]
    # runs of other data: a warning, but for bits per byte
    page.check("input[name$='mine/runs/baseline-seed1']")
    assert page.inner_text("#warning") == ""
    page.click("#measure button:text-is('loss')")
    assert "different data" in page.inner_text("#warning")
    page.click("#chips button:has-text('baseline-seed1')")
    assert set(plotted(page)) == {"baseline", "method3_2"} and page.inner_text("#warning") == ""
    page.click("#plot-all")
    assert page.evaluate("chosen.size") == 21  # as many as there are looks


def test_browser_shows_matrix_table_and_frontier(visit, real_runs, tmp_path):
    rows = {row["row"]: row for row in make_comparison(tmp_path / "results/mine")}
    write(tmp_path / "page", real_runs, tmp_path / "results")
    page = visit(tmp_path / "page/index.html")
    page.select_option("#mixing select >> nth=0", str(real_runs / "method3_2"))
    shown = page.evaluate("$('mixing').querySelector('.chart').data[0].z")
    mixing = json.loads((real_runs / "method3_2/depth_mixing.json").read_text())
    for i, (ours, theirs) in enumerate(zip(shown, mixing["matrix"], strict=True)):
        assert ours[: i + 1] == theirs[: i + 1] and set(ours[i + 1 :]) <= {None}
    table = page.inner_text("#rows")
    for name, row in rows.items():
        assert name in table and f"{row['loss'][0]:.4f} ± 0.0500" in table
    assert "≈ +0.0100 ± 0.0125" in table and "\t+0.0600 ± 0.0125" in table and "-0.5000 ± 0.0125" in table
    assert "< 0.50" in table and "memory" not in table  # which no row has
    assert "Left out: one" in page.inner_text("#comparison-note")
    points = page.evaluate("$('frontier').data[1]")
    shown = {name: (x, y) for name, x, y in zip(points["customdata"], points["x"], points["y"], strict=True)}
    assert shown == {name: (row["relative_training_flops"], row["loss"][0]) for name, row in rows.items()}
    assert page.evaluate("[$('frontier').data[0].x, $('frontier').data[0].y]") == [[1, 3, 4], [2, 1.5, 1.5]]
    page.click("#cost button:text-is('time')")  # the baseline's 1280 tokens at 64 per second
    assert min(page.evaluate("$('frontier').data[1].x")) == pytest.approx(20 / 60)


def test_browser_follows_a_run_that_is_training(visit, real_runs, tmp_path):
    shutil.copytree(real_runs, tmp_path / "out")
    make_comparison(tmp_path / "out/mine")  # something to scroll
    folder = tmp_path / "out/live"
    process = start("train.py", *tiny(folder, max_steps=10**6, eval_every=100, checkpoint_every=100, epochs=10**6))
    try:
        wait_until(lambda: (folder / "metrics.jsonl").exists() and len(lines(folder, "loss")) > 20)
        with watching(tmp_path / "page", tmp_path / "out"):
            page = visit(tmp_path / "page/index.html")
            assert names(page)[0] == "live"  # what is training comes first
            assert "training" in page.locator("#runs tbody tr").first.inner_text()
            page.click("#plot-none")
            page.check(f"input[name='{folder}']")
            page.locator("#train").scroll_into_view_if_needed()
            box = page.locator("#train .nsewdrag").bounding_box()
            page.mouse.move(box["x"] + 100, box["y"] + 60)
            page.mouse.down()
            page.mouse.move(box["x"] + 300, box["y"] + 150, steps=4)
            page.mouse.up()
            page.evaluate("scrollTo(0, 150); document.querySelector('.scroll').scrollTop = 40; $('runs').kept = true")
            state = (
                "[scrollY, document.querySelector('.scroll').scrollTop, $('runs').kept, $('train').layout.xaxis.range]"
            )
            before = page.evaluate(state)
            for _ in range(2):  # it grows by itself
                points = len(plotted(page, "train")["live"][0])
                written = page.evaluate("data.written")
                grown = f"data.written > {written} && $('train').data.at(-1).x.at(-1) > 64 * {points}"
                wait_until(lambda grown=grown: page.evaluate(grown))
            assert page.evaluate(state) == before
            assert list(plotted(page)) == ["live"]
            good("train.py", *tiny(tmp_path / "out/late"))
            page.wait_for_selector("#runs input[name$='/late']")
            process.kill(signal.SIGTERM)
            page.wait_for_selector("#runs tr:has(input[name$='/live']) .stopped")
    finally:
        process.kill()
        process.wait()


def test_browser_shows_hostile_texts_as_texts(visit, tmp_path):
    name = HOSTILE.replace("/", "|")
    texts = {"mode": HOSTILE, "error": HOSTILE, "state": HOSTILE, "dataset": HOSTILE}
    folder = make_run(tmp_path / "out" / name, **texts)
    mixing = {"rows": [HOSTILE], "columns": [HOSTILE], "matrix": [[2]]}
    (folder / "depth_mixing.json").write_text(json.dumps(mixing))
    make_comparison(tmp_path / "out/mine")
    results = json.loads((tmp_path / "out/mine/results.json").read_text())
    results["rows"][-1]["row"] = HOSTILE  # it is on the frontier
    results |= {"commands": [HOSTILE], "left_out": [HOSTILE], "failed": {HOSTILE: HOSTILE}}
    (tmp_path / "out/mine/results.json").write_text(json.dumps(results))
    write(tmp_path / "page", tmp_path / "out")
    assert run_page(tmp_path / "out", f"--save={tmp_path / 'saved.html'}").status == 0
    for path in (tmp_path / "page/index.html", tmp_path / "saved.html"):
        page = visit(path)
        assert page.evaluate("typeof hacked") == "undefined"
        assert page.locator("img, b, #runs script").count() == 0
        page.click("#plot-none")
        row = page.locator("#runs tbody tr").last  # a state of its own comes last
        row.locator("input").check()
        assert row.locator("label").evaluate("label => label.childNodes[1].data") == name
        assert row.locator(".note").evaluate("note => note.textContent") == HOSTILE
        assert row.locator("td").nth(1).evaluate("cell => cell.textContent") == HOSTILE
        assert page.evaluate("$('chips').textContent") == name
        page.evaluate("Plotly.Fx.hover('val', [{curveNumber: 0, pointNumber: 1}])")
        page.wait_for_selector("#val .hovertext")
        assert name[:20] in page.locator("#val .hovertext").evaluate("one => one.textContent")
        assert HOSTILE in page.evaluate(
            "$('frontier').querySelector('.textpoint, .textlayer').parentElement.textContent"
        )
        assert page.locator("img, b, svg a").count() == 0


def test_browser_saved_page_is_one_file(visit, real_runs, tmp_path):
    good_page = run_page(real_runs, f"--save={tmp_path / 'alone/page.html'}")
    check_error(good_page, "cannot write")  # folders are not made for it
    (tmp_path / "alone").mkdir()
    saved = run_page(real_runs, f"--save={tmp_path / 'alone/page.html'}")
    assert saved.stdout == f"{(tmp_path / 'alone/page.html').as_uri()}\n"
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["page.html"]
    (tmp_path / "mailed").mkdir()
    (tmp_path / "alone/page.html").rename(tmp_path / "mailed/other name.html")
    page = visit(tmp_path / "mailed/other name.html")
    assert sorted(names(page)) == ["baseline", "method3_2"]
    assert set(plotted(page)) == {"baseline", "method3_2"}
    assert run_page(real_runs, f"--save={tmp_path / 'mailed/other name.html'}").status == 0  # again, over our own


def test_browser_says_how_old_the_data_is(visit, tmp_path):
    make_run(tmp_path / "out/run", state="training", host="another")
    for path in (tmp_path / "out/run").iterdir():
        os.utime(path, (0, time.time() - 700))
    write(tmp_path / "page", tmp_path / "out")
    page = visit(tmp_path / "page/index.html")
    assert page.inner_text("#age") == "up to date"
    assert "silent since" in page.inner_text("#runs tbody")
    data = tmp_path / "page/data.js"
    data.write_text(re.sub(r'"written":[\d.]+', f'"written":{time.time() - 300}', data.read_text()))
    page = visit(tmp_path / "page/index.html")
    assert page.inner_text("#age").startswith("data is 5 min old")


@pytest.mark.parametrize("width", [390, 1366])
@pytest.mark.parametrize("dark", [False, True])
def test_browser_fits_a_phone_and_the_dark(visit, real_runs, tmp_path, width, dark):
    make_comparison(tmp_path / "results/mine")
    write(tmp_path / "page", real_runs, tmp_path / "results")
    page = visit(tmp_path / "page/index.html", width=width, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    tops = page.evaluate("['train', 'val'].map(id => $(id).getBoundingClientRect().top)")
    assert (tops[0] == tops[1]) == (width > 1000)  # beside each other, or one below the other
    for element in ("body", "#runs td", "#runs th", "#age", ".finished", "p", "#states button[aria-pressed=true]"):
        assert contrast(page, element) > 4.5, element
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(background) < 0.1) == dark
    for chart in ("#train", "#frontier"):
        assert contrast(page, f"{chart} .xtick text", background) > 4.5


def luminance(colour):
    """Of rgb(r, g, b), as WCAG has it."""
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(page, selector, background=None):
    script = """element => {
        const style = getComputedStyle(element), text = element.tagName == "text" ? style.fill : style.color;
        let behind = element;
        while (getComputedStyle(behind).backgroundColor == "rgba(0, 0, 0, 0)") behind = behind.parentElement;
        return [text, getComputedStyle(behind).backgroundColor];
    }"""
    text, behind = page.locator(selector).first.evaluate(script)
    light, dark = sorted([luminance(text), luminance(background or behind)], reverse=True)
    return (light + 0.05) / (dark + 0.05)
