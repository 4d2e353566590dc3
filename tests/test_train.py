"""train.py from outside: what it learns, writes and says, for one process, two, and a run in several calls."""

import contextlib
import json
import math
import re
import shlex
import shutil
import signal
import socket
import time
from functools import partial
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ROOT,
    TINY,
    TORCHRUN,
    assert_same_run,
    check_error,
    command,
    dataset,
    evaluation,
    good,
    metrics,
    options,
    parameters,
    read_checkpoint,
    run,
    snapshot,
    start,
    start_two,
    steps_done,
    tiny,
    wait_until,
    write_checkpoint,
)
from test_data import byte_level, save_tokenizer

from configurator import configure
from data.dataset import load_meta, load_tokens
from data.prepare import write_dataset
from data.tokenizer import load_tokenizer
from lib.checkpoint import load_checkpoint
from lib.machine import StopSignals, memory_size
from lib.mixing import depth_mixing
from lib.reports import show_sample
from lib.start import new_model
from model import GPT, GPTConfig, ResidualMode
from sample import SampleConfig
from train import SETTINGS, check_settings

CONFIGS = sorted((ROOT / "config").glob("*.py"))
MODEL = {key: TINY[key] for key in ("n_layer", "n_head", "n_embd", "ffn_hidden", "block_size")}


# what one command does


def test_the_whole_command(tmp_path):
    """As a shell starts it: progress, the evaluation block, a sample, the learned weights, the files."""
    process = command("train.py", "config/method3_2.py", *tiny(tmp_path / "run", sample_tokens=20))
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "6/6" in stderr and "loss" in stderr and "tokens/s" in stderr and "Warning" not in stderr
    shown = stdout[stdout.index("***** eval metrics *****") :].splitlines()
    results = json.loads((tmp_path / "run/eval_results.json").read_text())
    assert [line.split()[0] for line in shown[1:10]] == list(results)
    assert (
        list(results)
        == (
            "epoch eval_accuracy eval_loss eval_perplexity eval_bits_per_byte eval_runtime eval_samples "
            "eval_samples_per_second eval_steps_per_second"
        ).split()
    )
    assert str(round(results["eval_loss"], 4)) in shown[3]
    assert math.isclose(results["eval_perplexity"], math.exp(results["eval_loss"]))
    meta = load_meta(dataset())
    bits = results["eval_loss"] * (meta.val_tokens - 1) / math.log(2) / meta.val_bytes
    assert math.isclose(results["eval_bits_per_byte"], bits)
    assert "***** sample *****" in stdout and "on cpu, float32, not compiled, 1 process" in stdout

    report = json.loads((tmp_path / "run/residual_weights.json").read_text())
    state = parameters(tmp_path / "run")
    assert report[0] == {"layer": 0, "weights": None}
    for layer in (1, 2):
        raw = state[f"h.{layer}.residual_weight"]
        assert report[layer]["weights"] == {"raw": raw.tolist(), "normalized": raw.softmax(0).tolist()}
        for value in (*raw.tolist(), *raw.softmax(0).tolist()):
            assert f"{value:.4f}" in stdout and f"{value:.4f}" in (tmp_path / "run/residual_weights.txt").read_text()

    mixing = json.loads((tmp_path / "run/depth_mixing.json").read_text())
    assert mixing["rows"][0] == "attention 0" and mixing["columns"][0] == "embedding"
    assert [len(row) for row in mixing["matrix"]] == [7] * 7
    model = load_checkpoint(tmp_path / "run/ckpt.safetensors").model
    tokens = torch.tensor(load_tokens(dataset(), "val").astype(np.int64))
    n = (len(tokens) - 1) // 8 * 8
    assert n < 2048 and mixing == depth_mixing(model, tokens[:n].view(-1, 8))

    # the same again
    before = snapshot(tmp_path / "run")
    stdout = good("train.py", "config/method3_2.py", *tiny(tmp_path / "run"))
    assert "finished, at step 6 of 6" in stdout and f"sample.py {tmp_path}" in stdout and "--overwrite=True" in stdout
    assert snapshot(tmp_path / "run") == before


def test_metrics(tmp_path):
    good("train.py", *tiny(tmp_path, max_steps=8, warmup=0.25, min_lr=1e-4, learning_rate=1e-2, log_every=2))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [2, 4, 6, 8]
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6, 8]
    n_full = (load_meta(dataset()).train_tokens - 1) // 8
    for line in steps:
        assert line["tokens"] == line["step"] * 64 and line["epoch"] == line["step"] * 8 / n_full
        assert line["grad_norm"] > 0 and line["tokens_per_sec"] > 0 and line["memory"] > 1e7 and line["seconds"] > 0
    # two steps of warm-up, then half a cosine that would reach min_lr at step 9
    cosine = [1e-4 + 9.9e-3 * (1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)]
    wanted = [5e-3, 1e-2, *cosine]
    assert [line["lr"] for line in steps] == pytest.approx([wanted[line["step"] - 1] for line in steps])


def test_lengths(tmp_path):
    """In steps or in epochs; stop_at ends a call without touching the schedule."""
    n_full = (load_meta(dataset()).train_tokens - 1) // 8
    steps = math.ceil(0.05 * n_full / 8)
    stdout = good("train.py", *tiny(tmp_path / "a", max_steps=None, epochs=0.05))
    assert f"{steps} steps of 64 tokens" in stdout and metrics(tmp_path / "a")[-1]["step"] == steps
    assert "stopped after step 3 of 6; the same command" in good("train.py", *tiny(tmp_path / "b", stop_at=3))
    assert "at stop_at=3" in good("train.py", *tiny(tmp_path / "b", stop_at=3))
    good("train.py", *tiny(tmp_path / "c"))
    assert metrics(tmp_path / "b") == metrics(tmp_path / "c")[:4]  # three steps and an evaluation


def test_the_same_command_twice(tmp_path):
    for name in ("a", "b"):
        good("train.py", "config/method3_2.py", *tiny(tmp_path / name, dropout=0.1))
    assert_same_run(tmp_path / "a", tmp_path / "b")
    good("train.py", "config/method3_2.py", *tiny(tmp_path / "c", dropout=0.1, seed=2))
    assert metrics(tmp_path / "a") != metrics(tmp_path / "c")


# several calls


@pytest.mark.parametrize(
    "settings",
    [
        {"residual_mode": "method3_2", "dropout": 0.1, "residual_lr_scale": 3.0},
        {"residual_mode": "method2", "dtype": "float16", "position": "learned"},
        {"residual_mode": "method4_2", "recompute": False, "norm": "batchnorm", "tie_weights": True},
    ],
    ids=lambda settings: settings["residual_mode"],
)
def test_resuming_changes_nothing(settings, tmp_path):
    """2N steps at once are N steps, a new process, N more: bit for bit."""
    good("train.py", *tiny(tmp_path / "once", **settings))
    for stop_at in (3, 5, None):  # in the middle, between two checkpoints, to the end
        good("train.py", *tiny(tmp_path / "often", stop_at=stop_at, **settings))
    assert_same_run(tmp_path / "once", tmp_path / "often")
    assert metrics(tmp_path / "once")[-2]["step"] == 6

    # with --init_from=resume everything that is not said is as it was
    good("train.py", *tiny(tmp_path / "short", stop_at=3, **settings))
    dtype = options(dtype=settings.get("dtype"))  # is said in each call
    good("train.py", *options(init_from="resume", out_dir=tmp_path / "short", device="cpu"), *dtype)
    assert_same_run(tmp_path / "once", tmp_path / "short")


def test_what_may_change_when_resuming(tmp_path):
    good("train.py", *tiny(tmp_path, stop_at=2))
    resume = options(out_dir=tmp_path, init_from="resume", device="cpu")
    good("train.py", *resume, *options(max_steps=9, eval_every=4, learning_rate=1e-4, micro_batch=8))
    assert [line["step"] for line in metrics(tmp_path) if "eval_loss" in line] == [4, 8, 9]
    lrs = {line["step"]: line["lr"] for line in metrics(tmp_path) if "loss" in line}
    assert max(lrs[step] for step in range(3, 10)) <= 1e-4 < lrs[2]
    good("train.py", *resume, *options(weight_decay=0.0, max_steps=10))
    # n_kv_head was given as None, which meant 2: both are no contradiction
    good("train.py", *resume, *options(n_kv_head=2, n_layer=3, max_steps=11))
    # epochs takes the place of the max_steps that was
    windows = (load_meta(dataset()).train_tokens - 1) // TINY["block_size"]
    good("train.py", *resume, *options(epochs=12 * 8 / windows))
    assert metrics(tmp_path)[-1]["step"] == 12


def test_a_changed_schedule_uses_its_own_decay(tmp_path):
    """The optimizer's settings are those of the command, not those in the checkpoint."""
    for decay in (0.0, 0.5):
        good("train.py", *tiny(tmp_path / str(decay), stop_at=3, learning_rate=0.1))
        good("train.py", *tiny(tmp_path / str(decay), init_from="resume", weight_decay=decay, learning_rate=0.1))
    norms = [parameters(tmp_path / str(decay))["wte.weight"].norm() for decay in (0.0, 0.5)]
    assert norms[1] < norms[0]


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"n_layer": 4}, "n_layer is 3 there and 4 here"),
        ({"residual_mode": "method1"}, "residual_mode is baseline there and method1 here"),
        ({"seed": 2}, "seed is 1 there and 2 here"),
        ({"dataset": "elsewhere/data"}, "there and elsewhere/data here"),
        ({"learning_rate": 0.5}, "learning_rate is 0.002 there and 0.5 here"),
        ({"batch_tokens": 128, "n_embd": 32}, "batch_tokens is 64 there and 128 here, n_embd is 16 there and 32 here"),
    ],
)
def test_another_run_is_not_overwritten(settings, words, tmp_path):
    good("train.py", *tiny(tmp_path, stop_at=2))
    before = snapshot(tmp_path)
    check_error(run("train.py", *tiny(tmp_path, **settings)), tmp_path, "holds another run", words, "--overwrite=True")
    if "learning_rate" not in settings and "batch_tokens" not in settings:
        check_error(run("train.py", *tiny(tmp_path, init_from="resume", **settings)), "holds another run", words)
    assert snapshot(tmp_path) == before


def test_other_data_under_the_same_name(tmp_path):
    shutil.copytree(dataset(), tmp_path / "data")
    args = tiny(tmp_path / "run", dataset=tmp_path / "data")
    good("train.py", *args, "--stop_at=2")
    meta = json.loads((tmp_path / "data/meta.json").read_text())
    (tmp_path / "data/meta.json").write_text(json.dumps(meta | {"source_sha256": "0" * 64}))
    before = snapshot(tmp_path)
    check_error(run("train.py", *args), "is not the data of the run", "source_sha256 was")
    assert snapshot(tmp_path) == before
    # the same text, told differently
    (tmp_path / "data/meta.json").write_text(json.dumps(meta | {"source": "the same from elsewhere"}))
    good("train.py", *args)


def test_overwrite(tmp_path):
    """A new run, and nothing of the old one is left that could be taken for it."""
    good("train.py", *tiny(tmp_path / "a", residual_mode="method3_2"))
    good("train.py", *tiny(tmp_path / "a", overwrite=True, checkpoint_every=10, eval_every=10))
    good("train.py", *tiny(tmp_path / "b", checkpoint_every=10, eval_every=10))
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {path.name for path in (tmp_path / "b").iterdir()}
    # whoever gives the same command after an interruption would start anew: it says what to give instead
    stdout = good("train.py", *tiny(tmp_path / "a", overwrite=True, stop_at=2))
    assert "--overwrite=False --init_from=resume resumes from there" in stdout
    good("train.py", *tiny(tmp_path / "a", overwrite=True), *options(overwrite=False, init_from="resume"))
    assert [line["step"] for line in metrics(tmp_path / "a") if "loss" in line] == [1, 2, 3, 4, 5, 6]


def test_changed_code_warns(tmp_path):
    good("train.py", *tiny(tmp_path, stop_at=2))
    quiet = run("train.py", *tiny(tmp_path, stop_at=4))
    assert "warning" not in quiet.stderr
    changed = run("train.py", *tiny(tmp_path), before="import lib.run; lib.run.code_hash = lambda: 'another'")
    assert changed.status == 0 and "warning: the code has changed" in changed.stderr


# batches


RECORD = """
import json, os
from data.dataset import Windows
batch = Windows.batch
def recorded(self, windows, rows, device):
    x, y = batch(self, windows, rows, device)
    if "train.bin" in self.tokens.filename.name:
        with open(f"{os.environ['RECORD']}.{os.environ.get('RANK', '0')}", "a") as file:
            file.write(json.dumps([x.tolist(), y.tolist()]) + chr(10))
    return x, y
Windows.batch = recorded
"""


def recorded(path, rank=0):
    """(inputs, targets) of each sequence that a process trained on, in order."""
    batches = [json.loads(line) for line in Path(f"{path}.{rank}").read_text().splitlines()]
    return [sequence for x, y in batches for sequence in zip(x, y, strict=True)]


def test_batches_depend_on_seed_and_step_alone(tmp_path):
    def record(name, **settings):
        env = {"RECORD": str(tmp_path / f"{name}.batches")}
        good("train.py", *tiny(tmp_path / name, **settings), before=RECORD, env=env)
        return recorded(env["RECORD"])

    wanted = record("a", residual_mode="method3_2")
    assert len(wanted) == 6 * 8
    assert record("b", residual_mode="method2", recompute=False, n_layer=2, micro_batch=1, dropout=0.2) == wanted
    record("c", stop_at=3)
    assert record("c") == wanted  # its file has both calls
    assert record("d", seed=2) != wanted

    env = {"RECORD": str(tmp_path / "two")}
    with_env = RECORD.replace("import json, os", f"import json, os; os.environ.update({env})")
    for process in start_two(*tiny(tmp_path / "e", micro_batch=2), before=with_env):
        assert process.wait().status == 0, process.stderr
    for step in range(6):
        ours = [sequence for rank in (0, 1) for sequence in recorded(env["RECORD"], rank)[4 * step : 4 * step + 4]]
        assert sorted(ours) == sorted(wanted[8 * step : 8 * step + 8])

    tokens = load_tokens(dataset(), "train").tolist()
    for x, y in wanted:
        assert x[1:] == y[:-1]
        assert any(tokens[i : i + 9] == [*x, y[-1]] for i in range(0, len(tokens), 8))


def test_accumulation_is_one_big_batch(tmp_path):
    for micro_batch in (8, 4, 1):
        good("train.py", "config/method3_2.py", *tiny(tmp_path / str(micro_batch), micro_batch=micro_batch))
    for other in ("4", "1"):
        for a, b in zip(metrics(tmp_path / "8"), metrics(tmp_path / other), strict=True):
            assert a == pytest.approx(b, abs=1e-5)


# two processes


@pytest.mark.parametrize("mode", ["method3_2", "method2"])
def test_two_processes_are_one(mode, tmp_path):
    """torchrun … --device=cpu and one process: the same losses step by step, the same evaluation."""
    good("train.py", f"config/{mode}.py", *tiny(tmp_path / "one"))
    args = f"config/{mode}.py", *tiny(tmp_path / "two", micro_batch=2)
    if mode == "method3_2":
        process = command(*TORCHRUN, "train.py", *args)
        stdout, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr
        assert "2 processes" in stdout and stdout.count("***** eval metrics *****") == 1
        assert "Traceback" not in stderr and "destroy" not in stderr
    else:
        for process in start_two(*args):
            assert process.wait().status == 0, process.stderr
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [sorted(line) for line in one] == [sorted(line) for line in two]
    for a, b in zip(one, two, strict=True):
        for key in a.keys() - {"eval_perplexity"}:
            assert a[key] == pytest.approx(b[key], abs=1e-5, rel=0), (a["step"], key)

    # the evaluation of the same parameters is the same to 1e-6
    for process in start_two(*args, "--eval_only=True"):
        assert process.wait().status == 0, process.stderr
    by_two = evaluation(tmp_path / "two")
    good("train.py", *args, "--eval_only=True")
    assert evaluation(tmp_path / "two") == pytest.approx(by_two, abs=1e-6, rel=0)


def test_two_processes_evaluate_one_batchnorm(tmp_path):
    """Running statistics differ between processes; the evaluation is of those that the checkpoint holds."""
    args = tiny(tmp_path, micro_batch=2, norm="batchnorm")
    for process in start_two(*args):
        assert process.wait().status == 0, process.stderr
    by_two = evaluation(tmp_path)
    good("train.py", *args, "--eval_only=True")
    assert evaluation(tmp_path) == pytest.approx(by_two, abs=1e-6, rel=0)


def test_a_mistake_that_one_process_sees_is_told(tmp_path):
    """Rank 0 is silent then: it waits for the other until torchrun ends it."""
    before = "import os, lib.start\nif os.environ['RANK'] == '1': lib.start.dataset_folder = lambda *_: '/nowhere'"
    first, second = start_two(*tiny(tmp_path / "run"), before=before)
    check_error(second.wait(), "no prepared dataset in /nowhere")
    first.kill()
    first.wait()


# evaluation


def test_evaluation(tmp_path):
    """The same for every batch size, and what a plain computation gives; the run is left alone."""
    good("train.py", "config/method4_2.py", *tiny(tmp_path))
    before = snapshot(tmp_path)
    trained = evaluation(tmp_path)
    for batch in (1, 3, 16):
        (tmp_path / "eval_results.json").unlink()
        stdout = good("train.py", "config/method4_2.py", *tiny(tmp_path, eval_only=True, eval_batch=batch))
        assert "***** eval metrics *****" in stdout
        assert evaluation(tmp_path) == pytest.approx(trained, abs=1e-6, rel=0)
    changed = {path.name for path, content in snapshot(tmp_path).items() if content != before[path]}
    assert changed <= {"eval_results.json"}
    check_error(run("train.py", *tiny(tmp_path / "typo", eval_only=True)), "eval_only needs a run", tmp_path / "typo")
    assert not (tmp_path / "typo").exists()

    tokens = torch.tensor(load_tokens(dataset(), "val").astype(np.int64))
    assert (len(tokens) - 1) % 8, "the last window should be a short one"
    model = load_checkpoint(tmp_path / "ckpt.safetensors").model.eval()
    losses, correct = [], 0
    for i in range(0, len(tokens) - 1, 8):
        x, y = tokens[i : i + 8][: len(tokens) - 1 - i], tokens[i + 1 : i + 9]
        logits = model(x[None], y[None])[0][0].detach().double()
        losses += F.cross_entropy(logits, y, reduction="none").tolist()
        correct += (logits.argmax(1) == y).sum().item()
    assert len(losses) == len(tokens) - 1
    assert trained["eval_loss"] == pytest.approx(np.mean(losses), abs=1e-6)
    assert trained["eval_accuracy"] == correct / len(losses)


def test_best_and_latest(tmp_path):
    """With a rate that becomes far too high some evaluation in the middle is the best."""
    good("train.py", *tiny(tmp_path, eval_every=1, checkpoint_every=1))
    resume = {"init_from": "resume", "max_steps": 12, "learning_rate": 100.0}
    good("train.py", *tiny(tmp_path, eval_every=1, checkpoint_every=1, **resume))
    losses = {line["step"]: line["eval_loss"] for line in metrics(tmp_path) if "eval_loss" in line}
    best = min(losses, key=losses.get)
    assert best != 12
    steps = {name: load_checkpoint(tmp_path / f"{name}.safetensors").step for name in ("best", "ckpt", "ckpt_prev")}
    assert steps == {"best": best, "ckpt": 12, "ckpt_prev": 11}
    check_error(run("train.py", *options(out_dir=tmp_path / "x", init_from="resume_best")), "resume_best")


def test_evaluations_of_a_part(tmp_path):
    """The same windows each time, spread over the split; the best is the best of these; the end has a whole one."""
    good("train.py", *tiny(tmp_path / "part", eval_tokens=20, eval_every=2))
    good("train.py", *tiny(tmp_path / "whole", eval_every=2))
    for name in ("ckpt.safetensors", "best.safetensors"):
        ours, theirs = (parameters(tmp_path / run, name) for run in ("part", "whole"))
        assert name.startswith("best") or all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert evaluation(tmp_path / "part") == evaluation(tmp_path / "whole")
    lines = [line for line in metrics(tmp_path / "part") if "eval_loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6] and {line["eval_samples"] for line in lines} == {3}

    tokens = torch.tensor(load_tokens(dataset(), "val").astype(np.int64))
    n_all = math.ceil((len(tokens) - 1) / 8)
    starts = [8 * (i * n_all // 3) for i in range(3)]
    x, y = (torch.stack([tokens[start + shift :][:8] for start in starts]) for shift in (0, 1))
    checkpoint = load_checkpoint(tmp_path / "part/ckpt.safetensors")
    loss = checkpoint.model.eval()(x, y)[1].item()
    assert lines[-1]["eval_loss"] == pytest.approx(loss, abs=1e-6)
    assert checkpoint.best_loss == min(line["eval_loss"] for line in lines)
    meta = load_meta(dataset())
    bits = loss / math.log(2) * (meta.val_tokens - 1) / meta.val_bytes
    assert lines[-1]["eval_bits_per_byte"] == pytest.approx(bits, abs=1e-6)


def test_progress_of_a_long_evaluation(tmp_path):
    fast = "import itertools, tqdm.std; tqdm.std.time = itertools.count(0, 20).__next__"  # 20 seconds from look to look
    assert "window/s" in run("train.py", *tiny(tmp_path, max_steps=1), before=fast).stderr
    assert "window" not in run("train.py", *tiny(tmp_path, eval_only=True)).stderr


def test_eval_only_asks_nothing_of_the_batch(tmp_path):
    good("train.py", *tiny(tmp_path))
    wanted = evaluation(tmp_path)
    for process in start_two(*tiny(tmp_path, eval_only=True, init_from="resume", batch_tokens=72)):
        assert process.wait().status == 0, process.stderr
    assert evaluation(tmp_path) == pytest.approx(wanted | {"epoch": wanted["epoch"] * 72 / 64}, abs=1e-6, rel=0)


# what else there is to see


def test_layer_norms(tmp_path):
    """Of each layer, every second step; they change nothing."""
    args = {"residual_mode": "method3_2", "dropout": 0.1}
    good("train.py", *tiny(tmp_path / "seen", log_layers_every=2, grad_clip=1e-3, max_steps=4, **args))
    good("train.py", *tiny(tmp_path / "plain", grad_clip=1e-3, max_steps=4, **args))
    lines = metrics(tmp_path / "seen")
    layers = {line["step"]: line["layers"] for line in lines if "layers" in line}
    assert list(layers) == [2, 4] and [line for line in lines if "layers" not in line] == metrics(tmp_path / "plain")
    for of in layers.values():
        assert of.keys() == {"grad_norm", "stream_norm"} and [len(norms) for norms in of.values()] == [3, 3]
    # before clipping, and less than the whole model's
    whole = {line["step"]: line["grad_norm"] for line in lines if "loss" in line}
    for step, of in layers.items():
        assert 1e-3 < math.hypot(*of["grad_norm"]) < whole[step]
    # what the first layer reads is the embedding, before the step that was just made
    good("train.py", *tiny(tmp_path / "before", stop_at=3, max_steps=4, grad_clip=1e-3, **args))
    wte = parameters(tmp_path / "before")["wte.weight"].norm(dim=1)
    assert wte.min() <= layers[4]["stream_norm"][0] <= wte.max()


def test_run_json(tmp_path):
    """What those who watch are told, at the start, in the end and when it fails."""

    def told(name):
        return json.loads((tmp_path / name / "run.json").read_text())

    process = start("train.py", "config/v2_method3.py", *tiny(tmp_path / "a", max_steps=3000, eval_every=3000))
    wait_until(lambda: steps_done(tmp_path / "a") > 0)
    about = told("a")
    assert (about["state"], about["error"], about["steps"], about["pid"]) == ("training", None, 3000, process.pid)
    assert about["host"] == socket.gethostname() and abs(time.time() - about["started"]) < 600
    process.kill(signal.SIGTERM)
    assert process.wait().status == 143 and told("a") == about | {"state": "stopped"}
    model = load_checkpoint(tmp_path / "a/ckpt.safetensors").model
    assert (about["mode"], about["dataset"]) == ("method3_2-stored", str(dataset()))
    assert (about["parameters"], about["flops_per_token"]) == (model.num_params(), model.flops_per_token(8))
    good("train.py", *tiny(tmp_path / "b", max_steps=2))
    assert told("b")["state"] == "finished" and told("b")["mode"] == "baseline"
    process = run("train.py", *tiny(tmp_path / "c", learning_rate=1e30))
    check_error(process, "stopped", status=1)
    assert told("c")["state"] == "failed" and f"error: {told('c')['error']}" in process.stderr
    broken = "import lib.run\ndef bad(*_): raise KeyError('oops')\nlib.run.RunFolder.save = bad"
    assert run("train.py", *tiny(tmp_path / "d"), before=broken).status == 1
    assert told("d")["state"] == "failed" and "oops" in told("d")["error"]


@pytest.mark.parametrize("mode", ["method3_3", "mudd", "attnres", "realformer"])
def test_what_other_residuals_learn(mode, tmp_path):
    """Small tensors whole, of large ones the norm; in the file and at the end of the output."""
    stdout = good("train.py", f"config/{mode}.py", *tiny(tmp_path))
    learned = {name: t for name, t in parameters(tmp_path).items() if "residual_" in name}
    if mode == "realformer":
        assert not learned and not (tmp_path / "residual_weights.json").exists() and "learned residual" not in stdout
        return
    report = json.loads((tmp_path / "residual_weights.json").read_text())
    text = (tmp_path / "residual_weights.txt").read_text()
    assert text in stdout
    if mode == "method3_3":
        assert [entry["layer"] for entry in report] == [0, 1, 2] and report[0]["weights"] is None
        raw = learned.pop("h.2.residual_weight")
        assert report[2]["weights"] == {"raw": raw.tolist(), "normalized": raw.softmax(0).tolist()}
        learned.pop("h.1.residual_weight")
        report = report[1]["tensors"] | report[2]["tensors"]
    assert report.keys() == learned.keys()
    assert {t.numel() <= 64 for t in learned.values()} == {True, False} if mode == "mudd" else True
    for name, tensor in learned.items():
        large = tensor.numel() > 64
        assert report[name] == (pytest.approx({"norm": tensor.norm().item()}) if large else tensor.tolist())
        assert f"{tensor.norm() if large else tensor.flatten()[0]:.4f}" in text


def test_tensorboard(tmp_path):
    """The event files hold what metrics.jsonl holds, no step twice, however the run was interrupted."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = tiny(tmp_path, residual_mode="method3_2", tensorboard=True, log_layers_every=3)
    killed = "import os, lib.run; save = lib.run.RunFolder.save\ndef die(self, t):\n    save(self, t)\n"
    killed += "    if t.step == 4:\n        self.loggers[0].close()\n        os._exit(9)\nlib.run.RunFolder.save = die"
    good("train.py", *args, "--stop_at=3", "--checkpoint_every=100")
    assert run("train.py", *args, "--checkpoint_every=2", before=killed).status == 9
    (tmp_path / "ckpt.safetensors").unlink()  # so that step 4 is made and logged twice
    good("train.py", *args, "--init_from=resume_prev")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    lines = metrics(tmp_path)
    for key in ("loss", "lr", "grad_norm", "eval_loss", "eval_accuracy"):
        wanted = [(line["step"], pytest.approx(line[key])) for line in lines if key in line]
        assert [(event.step, event.value) for event in events.Scalars(key)] == wanted, key
    norms = [line["layers"]["stream_norm"][1] for line in lines if "layers" in line]
    assert [event.value for event in events.Scalars("layers/stream_norm/1")] == pytest.approx(norms)
    texts = events.Tensors("residual_weights/text_summary")
    assert [event.step for event in texts] == [3, 6]
    last = texts[-1].tensor_proto.string_val[0].decode()
    assert last.replace("    ", "", 1).replace("\n    ", "\n") in (tmp_path / "residual_weights.txt").read_text()
    # a new run begins with empty files
    good("train.py", *args, "--overwrite=True", "--max_steps=1")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1]


def test_wandb(tmp_path):
    """With a package in its place: it is told the run's name and settings, and every line of metrics.jsonl."""
    (tmp_path / "wandb.py").write_text(
        "import json\nclass Run:\n    summary = {}\n"
        "    def log(self, values, step):\n        assert step == values['step']\n        told.append(values)\n"
        "    def finish(self):\n        json.dump([about, told], open(TOLD, 'w'))\n"
        "def init(**options):\n    about.update(options)\n    return Run()\n"
        f"about, told, TOLD = {{}}, [], '{tmp_path}/told'"
    )
    before = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    good("train.py", *tiny(tmp_path / "run", wandb_project="mine", log_layers_every=3), before=before)
    about, told = json.loads((tmp_path / "told").read_text())
    assert told == [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert (about["project"], about["name"], about["config"]["n_embd"]) == ("mine", "run", TINY["n_embd"])


def test_a_missing_logger(tmp_path):
    hide = "import importlib.util; importlib.util.find_spec = lambda name: None"
    check_error(run("train.py", *tiny(tmp_path / "a", tensorboard=True), before=hide), "pip install tensorboard")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("clock", ["lambda: 5.0", "iter(range(10**6, 0, -1)).__next__"])
def test_a_clock_that_stands_still_or_goes_back(clock, tmp_path):
    """Speeds are numbers, and neither negative nor infinite."""
    good("train.py", *tiny(tmp_path), before=f"import time; time.time = time.perf_counter = {clock}")
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        line = json.loads(line)
        for key in {*helpers.TIMES} & line.keys():
            assert 0 < line[key] < 1e15, key


# config files


def assigned(path):
    names = {}
    exec(path.read_text(), names)
    return {key: value for key, value in names.items() if not key.startswith("_")}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config(path):
    """Its settings are known, in range, and those of a model and a batch that go together."""
    s = configure([str(path)], *SETTINGS)
    check_settings(s)
    assert s.given == assigned(path).keys() and s.batch_tokens % s.block_size == 0
    if s.init_from == "scratch":
        with torch.device("meta"):
            model = new_model(s, 257)
        assert all(getattr(model.config, key) == value for key, value in assigned(path).items() if key in MODEL)


@pytest.mark.parametrize(
    "name", ["method4_2", "hc", "v2_method3", "primer_ez", "deepnorm", "shakespeare", "wikitext103"]
)
def test_configs_train(name, tmp_path):
    """One of each kind through the command."""
    good("train.py", f"config/{name}.py", *tiny(tmp_path, max_steps=2, n_kv_head=1))
    assert [line["step"] for line in metrics(tmp_path) if "loss" in line] == [1, 2]


def test_finetune_config_trains(tmp_path):
    torch.manual_seed(0)
    gpt2 = GPT(GPTConfig(**MODEL | {"ffn_hidden": 64}, **assigned(ROOT / "config/gpt2.py")))
    gpt2.save_pretrained(tmp_path / "hf")
    args = tiny(tmp_path / "run", max_steps=2, init_from=tmp_path / "hf")
    args = [a for a in args if a.split("=")[0][2:] not in MODEL.keys() - {"block_size"}]
    good("train.py", "config/finetune_gpt2.py", *args)
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1, 2]


@pytest.mark.parametrize("mode", [mode.value for mode in ResidualMode])
def test_every_mode_has_a_file_that_holds_it_and_nothing_else(mode):
    assert {"recompute": True} | assigned(ROOT / f"config/{mode}.py") == {"residual_mode": mode, "recompute": True}


@pytest.mark.parametrize(
    "name, mode", [("v2_method1", "method3_1"), ("v2_method2", "method4_1"), ("v2_method3", "method3_2")]
)
def test_files_of_the_second_version(name, mode):
    assert assigned(ROOT / f"config/{name}.py") == {"residual_mode": mode, "recompute": False}


def test_out_dir_follows_from_the_files(tmp_path):
    elsewhere = f"import pathlib, train; train.ROOT = pathlib.Path({str(tmp_path)!r})"
    args = tiny(None, max_steps=1, n_kv_head=1)
    assert "wikitext103-method3_2: method3_2" in good(
        "train.py", "config/wikitext103.py", "config/method3_2.py", *args, before=elsewhere
    )
    good("train.py", *args, before=elsewhere)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"wikitext103-method3_2", "default"}


def test_residual_lr_scale(tmp_path):
    for scale in (0.0, 1.0, 5.0):
        good("train.py", "config/method3_2.py", *tiny(tmp_path / str(scale), residual_lr_scale=scale, max_steps=1))
    moved = [(parameters(tmp_path / str(s))["h.1.residual_weight"] - 1).abs().max().item() for s in (0.0, 1.0, 5.0)]
    assert moved[0] == 0 and moved[1] == pytest.approx(2e-3, rel=1e-3) and moved[2] == pytest.approx(1e-2, rel=1e-3)
    assert torch.equal(*(parameters(tmp_path / s)["wte.weight"] for s in ("0.0", "5.0")))


# where it starts from, numbers and compilation


def test_from_a_hugging_face_folder(tmp_path):
    torch.manual_seed(0)
    llama = GPT(GPTConfig(**MODEL, vocab_size=300))
    llama.save_pretrained(tmp_path / "hf")
    args = [a for a in tiny(tmp_path / "run", init_from=tmp_path / "hf") if a.split("=")[0][2:] not in MODEL]
    args += options(residual_mode="method3_1", dropout=0.1)
    check_error(run("train.py", *args, "--n_layer=2"), "n_layer")
    good("train.py", *args, "--eval_only=True", "--residual_mode=baseline", "--dropout=0.0")
    tokens = torch.tensor(load_tokens(dataset(), "val").astype(np.int64))
    n = (len(tokens) - 1) // 8 * 8
    _, loss = llama.eval()(tokens[:n].view(-1, 8), tokens[1 : n + 1].view(-1, 8))
    total = loss.item() * n + llama(tokens[None, n:-1], tokens[None, n + 1 :])[1].item() * (len(tokens) - 1 - n)
    assert evaluation(tmp_path / "run")["eval_loss"] == pytest.approx(total / (len(tokens) - 1), abs=1e-5)

    good("train.py", *args, "--stop_at=3")
    assert "finished" not in good("train.py", *args)  # the same command resumes
    assert "finished" in good("train.py", *args)
    config = load_checkpoint(tmp_path / "run/ckpt.safetensors").config
    assert (config.vocab_size, config.residual_mode, config.dropout) == (300, "method3_1", 0.1)
    check_error(run("train.py", *args, f"--out_dir={tmp_path}/x", "--init_from=no/such/folder"), "no/such/folder")


def test_a_pretrained_model_with_another_tokenizer(tmp_path):
    """Refused with the command that prepares the data for it; with its own it trains, without one it is warned."""
    torch.manual_seed(0)
    texts = {"train": ["naïve café 😀 — " * 40], "val": ["naïve café " * 9]}
    for name in ("a", "b", "none", "small"):
        GPT(GPTConfig(**MODEL, vocab_size=270 if name == "small" else 512)).save_pretrained(tmp_path / name)
    save_tokenizer(byte_level(), tmp_path / "a")
    save_tokenizer(byte_level(n_extra=5), tmp_path / "b")
    own = load_tokenizer("hf", tmp_path / "a")
    assert own.vocab_size == load_meta(dataset()).vocab_size  # but its ids are others
    with contextlib.redirect_stdout(None):
        write_dataset(tmp_path / "data", texts, own, source="a test")

    def fine_tune(name, data):
        args = tiny(tmp_path / "run", init_from=tmp_path / name, dataset=data, max_steps=1)
        return run("train.py", *(a for a in args if a.split("=")[0][2:] not in MODEL), "--block_size=8")

    for name, data in (("a", dataset()), ("b", tmp_path / "data")):
        check_error(
            fine_tune(name, data), "another tokenizer", f"prepare.py PATH... --out {data.name}", f"hf:{tmp_path}"
        )
        assert not (tmp_path / "run").exists()
    process = fine_tune("a", tmp_path / "data")
    assert process.status == 0 and "warning" not in process.stderr
    shutil.rmtree(tmp_path / "run")
    process = fine_tune("none", dataset())
    assert process.status == 0 and "warning: " in process.stderr and "a vocabulary of 512" in process.stderr
    shutil.rmtree(tmp_path / "run")
    assert "warning" not in fine_tune("small", dataset()).stderr


def test_another_vocabulary(tmp_path):
    """The vocabulary follows from the data; the same command still resumes, and an explicit one is obeyed."""
    tokenizer = load_tokenizer("bytes", None)
    tokenizer.vocab_size = 1000
    write_dataset(tmp_path / "data", {"train": ["abc" * 200], "val": ["abc" * 20]}, tokenizer, source="a test")
    args = tiny(tmp_path / "run", dataset=tmp_path / "data")
    good("train.py", *args, "--stop_at=3")
    good("train.py", *args)
    assert parameters(tmp_path / "run")["wte.weight"].shape == (1024, 16)
    good("train.py", *args, f"--out_dir={tmp_path / 'exact'}", "--vocab_size=1000")
    assert parameters(tmp_path / "exact")["wte.weight"].shape == (1000, 16)
    check_error(run("train.py", *args, f"--out_dir={tmp_path / 'x'}", "--vocab_size=999"), "999", "1000")


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"checkpoint_recompute": True}])
def test_number_formats_and_memory(settings, tmp_path):
    good("train.py", "config/method3_2.py", *tiny(tmp_path / "plain"))
    good("train.py", "config/method3_2.py", *tiny(tmp_path / "other", **settings))
    assert parameters(tmp_path / "other")["wte.weight"].dtype == torch.float32
    for a, b in zip(metrics(tmp_path / "plain"), metrics(tmp_path / "other"), strict=True):
        for key in {"loss", "eval_loss"} & a.keys():
            assert a[key] == pytest.approx(b[key], abs=0.02 if "dtype" in settings else 1e-5)


def test_compiled(tmp_path):
    good("train.py", "config/method3_2.py", *tiny(tmp_path / "plain", n_layer=2, max_steps=3))
    args = tiny(tmp_path / "compiled", n_layer=2, max_steps=3, compile=True)
    assert ", compiled," in helpers.start("train.py", "config/method3_2.py", *args).wait(timeout=300).stdout
    for a, b in zip(metrics(tmp_path / "plain"), metrics(tmp_path / "compiled"), strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    assert parameters(tmp_path / "plain").keys() == parameters(tmp_path / "compiled").keys()


def test_the_closing_sample_compiles_nothing(monkeypatch, capsys):
    graphs = []
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend=lambda graph, _: graphs.append(graph) or graph)
    )
    model = GPT(GPTConfig(**MODEL))
    model.compile_layers()
    show_sample(model, load_tokenizer("bytes", None), 3, StopSignals())
    assert graphs == [] and "***** sample *****" in capsys.readouterr().out
    model.score(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))
    assert graphs  # so it would have been


def test_an_overflow_is_left_out_and_logged_as_json(tmp_path):
    before = (
        "import functools, torch\ntorch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**40)"
    )
    good("train.py", *tiny(tmp_path, dtype="float16", max_steps=2), before=before)
    assert metrics(tmp_path)[0]["grad_norm"] is None
    assert not re.search("NaN|Infinity", (tmp_path / "metrics.jsonl").read_text())


def test_the_commands_of_the_readme():
    """Every key is known, and the batch of every training divides among its processes."""
    text = "\n".join(re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)).replace("\\\n", "")
    scripts = {"train.py": SETTINGS, "sample.py": [SampleConfig]}
    seen = []
    for words in (shlex.split(line, comments=True) for line in text.splitlines()):
        script = next((word for word in words if word in scripts), None)
        if script:
            before, arguments = words[: words.index(script)], words[words.index(script) + 1 :]
            arguments = [f"{ROOT}/{a}" if a.startswith("config/") else a for a in arguments]
            s = configure(arguments, *scripts[script], folders=script == "sample.py")
            seen.append(script)
            if script == "train.py":
                processes = re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", " ".join(before))
                assert s.batch_tokens % (s.block_size * math.prod(map(int, processes))) == 0, words
    assert set(seen) == set(scripts)


# mistakes


def test_missing_data(tmp_path):
    for name, prepare in {
        "nosuch": "data/text/prepare.py PATH... --out nosuch",
        "wikitext103": "data/wikitext103/prepare.py",
        f"{tmp_path}/mine": f"data/text/prepare.py PATH... --out mine --data-dir {tmp_path}",
    }.items():
        process = run("train.py", *tiny(tmp_path / "run", dataset=name))
        check_error(process, "no prepared dataset", f"python {prepare}")
    process = command("train.py", "--dataset=nosuch", f"--out_dir={tmp_path / 'run'}")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2 and stderr.startswith("error: ") and stderr.count("\n") == 1


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"batch_tokens": 60}, "batch_tokens=60 must be a multiple of block_size × processes = 8 × 1"),
        ({"batch_tokens": 4}, "batch_tokens=4 must be a multiple"),
        ({"block_size": 100_000, "batch_tokens": 400_000}, "shorter than one window of 100000 tokens"),
        ({"n_head": 3}, "n_embd=16 must be a multiple of n_head=3"),
        ({"n_layer": 0}, "n_layer must be at least 1"),
        ({"n_layer": 10**12}, "does not fit into this machine's memory"),
        ({"loops": 10**12}, "does not fit into this machine's memory"),
        ({"n_embd": 2 * 10**9}, "does not fit into this machine's memory"),
        ({"micro_batch": 10**15, "batch_tokens": 8 * 10**15}, "micro_batch=1000000000000000 does not fit"),
        ({"residual_mode": "method9"}, "method9"),
        ({"norm": "instancenorm"}, "future"),
        ({"vocab_size": 100}, "vocab_size=100 is less than the data's vocabulary of 257"),
        ({"dropout": 1.0}, "dropout"),
        ({"eval_every": 0}, "eval_every must be at least 1"),
        ({"seed": -1}, "seed must not be negative"),
        ({"beta2": 1.0}, "beta2 must be at least 0 and less than 1"),
        ({"max_steps": 0}, "max_steps must be more than 0"),
        ({"epochs": 1e300}, "epochs must be at most"),
        ({"device": "abacus"}, "device abacus cannot be used"),
        ({"device": "meta"}, "device meta cannot be used: choose cuda, mps or cpu"),
        ({"device": "cuda"}, "device cuda cannot be used"),
        ({"dtype": "float8"}, "dtype float8 is not known: choose bfloat16, float16 or float32"),
        ({"wandb_project": "x"}, "pip install wandb"),
        ({"eval_tokens": 0}, "eval_tokens must be more than 0"),
        ({"log_layers_every": -1}, "log_layers_every must be more than 0"),
        ({"out_dir": "/proc/nowhere/run"}, "cannot be written to"),
        ({"out_dir": "README/" * 900}, "cannot be written to: File name too long"),
        ({"init_from": "resume"}, "there is no"),
        ({"init_from": "resume_prev"}, "ckpt_prev.safetensors"),
        ({"n_layr": 3}, "unknown key 'n_layr': did you mean n_layer?"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mistakes(settings, words, tmp_path):
    check_error(run("train.py", *tiny(tmp_path / "run", **settings)), words)
    assert not list(tmp_path.iterdir())  # no folder with a lock in it, for one


def test_a_checkpoint_of_another_shape(tmp_path):
    good("train.py", *tiny(tmp_path / "a"))
    path = tmp_path / "a/ckpt.safetensors"
    tensors, about = read_checkpoint(path)
    write_checkpoint(path, tensors | {"model.h.1.attn.q.weight": torch.zeros(16, 15)}, about)
    before = snapshot(tmp_path)
    check_error(run("train.py", *tiny(tmp_path / "a")), path, "h.1.attn.q.weight should be (16, 16), is (16, 15)")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "env, words",
    [
        ({"RANK": "x"}, "RANK must be a whole number, not 'x'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE must be a whole number"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE must be a whole number"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE must be a whole number"),
        ({"WORLD_SIZE": "0"}, "RANK=0 must be less than WORLD_SIZE=0"),
        ({"LOCAL_RANK": "1.5"}, "LOCAL_RANK must be a whole number"),
        ({"RANK": "1"}, "RANK=1 must be less than WORLD_SIZE=1"),
        ({"WORLD_SIZE": "2"}, "the 2 processes cannot be connected"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_environment(env, words, tmp_path):
    check_error(run("train.py", *tiny(tmp_path / "run"), env=env), words)
    assert not list(tmp_path.iterdir())


def test_depth_is_bounded_by_memory(tmp_path):
    """A layer is also Python objects; torch alone would notice when the memory is full."""
    n_layer = memory_size() // 130_000 + 1
    check_error(run("train.py", *tiny(tmp_path / "run", n_layer=n_layer, n_embd=4, ffn_hidden=1)), "does not fit")


def test_the_largest_micro_batch_that_divides(tmp_path):
    for name, micro_batch in {"asked": 3, "right": 2, "much": 1000, "all": 8}.items():
        stdout = good("train.py", *tiny(tmp_path / name, micro_batch=micro_batch, dropout=0.1))
        taken = {3: 2, 1000: 8}.get(micro_batch)
        why = {3: "the largest up to 3 that divides the 8 sequences of each process", 1000: "all that there are"}
        said = f"micro_batch is {taken}, {why.get(micro_batch)}"
        assert (said in stdout) == (taken is not None) == ("micro_batch is" in stdout)
    assert_same_run(tmp_path / "asked", tmp_path / "right")
    assert_same_run(tmp_path / "much", tmp_path / "all")


def test_settings_of_a_checkpoint_are_checked_as_typed_ones(tmp_path):
    good("train.py", *tiny(tmp_path / "run", stop_at=2))
    path = tmp_path / "run/ckpt.safetensors"
    tensors, about = read_checkpoint(path)
    resume = options(out_dir=tmp_path / "run", init_from="resume", device="cpu")
    for change, words in (
        ({"eval_every": 0}, "eval_every must be at least 1, not 0"),
        ({"learning_rate": -1.0}, "learning_rate must not be negative"),
        ({"beta2": 1.5}, "beta2 must be at least 0 and less than 1"),
        ({"max_steps": -3}, "max_steps must be more than 0"),
        ({"log_every": "often"}, "log_every must be int, not 'often'"),
        ({"eval_batch": True}, "eval_batch must be int"),
        ({"n_layr": 3}, "unknown key 'n_layr'"),
        ({"eval_every": [1]}, "eval_every must be int"),
    ):
        write_checkpoint(path, tensors, about | {"settings": about["settings"] | change})
        before = snapshot(tmp_path)
        check_error(run("train.py", *resume), words)
        assert snapshot(tmp_path) == before
    for step in (10**400, 2**63, -1, 1.5, True, "x", None):
        write_checkpoint(path, tensors, about | {"step": step})
        check_error(run("train.py", *resume), "is damaged or not a checkpoint", "--init_from=resume_prev")


def test_what_is_said_anew_is_not_taken_from_a_checkpoint(tmp_path):
    good("train.py", *tiny(tmp_path / "run", stop_at=2))
    path = tmp_path / "run/ckpt.safetensors"
    tensors, about = read_checkpoint(path)
    said = {"out_dir": "/nowhere", "wandb_project": "x", "tensorboard": True, "device": "abacus", "stop_at": 3}
    said |= {"overwrite": True, "eval_only": True, "init_from": "resume_prev", "dtype": 7, "compile": []}
    write_checkpoint(path, tensors, about | {"settings": about["settings"] | said})
    good("train.py", *options(out_dir=tmp_path / "run", init_from="resume", device="cpu"))
    good("train.py", *tiny(tmp_path / "whole"))
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert not (tmp_path / "run/tensorboard").exists()


def test_a_run_of_the_old_kind(tmp_path):
    """It is named, not overwritten, and not taken for an empty folder."""
    for name in ("ckpt.pt", "best.pt"):
        (tmp_path / name).write_bytes(b"pickled")
    before = snapshot(tmp_path)
    for more in ([], ["--init_from=resume"], ["--init_from=resume_prev"], ["--eval_only=True"]):
        check_error(run("train.py", *tiny(tmp_path), *more), "older version (ckpt.pt, best.pt)", "--out_dir")
    check_error(run("sample.py", tmp_path), "older version")
    assert snapshot(tmp_path) == before
    good("train.py", *tiny(tmp_path, overwrite=True, max_steps=1))
    assert not list(tmp_path.glob("*.pt"))


def test_links_are_not_followed(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/lock").symlink_to(tmp_path / "mine")
    check_error(run("train.py", *tiny(tmp_path / "run")), "lock is a symbolic link")
    (tmp_path / "run/lock").unlink()
    (tmp_path / "run/lock").hardlink_to(tmp_path / "mine")
    (tmp_path / "run/metrics.jsonl").symlink_to(tmp_path / "mine")
    (tmp_path / "run/run.json").symlink_to(tmp_path / "mine")
    (tmp_path / "board").mkdir()
    (tmp_path / "board/events.out.tfevents.1").write_text("precious")
    (tmp_path / "run/tensorboard").symlink_to(tmp_path / "board")
    good("train.py", *tiny(tmp_path / "run", tensorboard=True))
    assert (tmp_path / "mine").read_text() == "precious"
    assert [path.read_text() for path in (tmp_path / "board").iterdir()] == ["precious"]


def test_a_folder_that_another_run_fills_meanwhile(tmp_path):
    """Checks come first and the folder is made last: a run that was made in between is noticed."""
    good("train.py", *tiny(tmp_path / "other"))
    meanwhile = "import shutil, train; start = train.start_training\ndef late(*args):\n"
    meanwhile += (
        f"    shutil.copytree({str(tmp_path / 'other')!r}, {str(tmp_path / 'run')!r})\n    return start(*args)\n"
    )
    meanwhile += "train.start_training = late"
    check_error(run("train.py", *tiny(tmp_path / "run"), before=meanwhile), "another run has just written to")
    assert [path.read_bytes() for path in (tmp_path / "run").glob("*.safetensors")] == [
        path.read_bytes() for path in (tmp_path / "other").glob("*.safetensors")
    ]


# signals


def test_signals_end_the_closing_sample(tmp_path):
    """Also when it would go on for hours; the run is finished all the same."""
    process = start("train.py", *tiny(tmp_path, sample_tokens=10**9))
    wait_until(lambda: "***** sample *****" in process.stdout)
    process.kill(signal.SIGINT)
    assert process.wait(timeout=60).status == 130 and "Traceback" not in process.stderr
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "finished"
    assert "finished" in good("train.py", *tiny(tmp_path))


@pytest.mark.parametrize("step, capped", [(3, False), (6, False), (6, True)])
def test_a_signal_within_an_evaluation(step, capped, tmp_path):
    """It ends at once; the checkpoint is of this step, and the next call makes the evaluation first."""
    args = {"residual_mode": "method3_2", "dropout": 0.1, "eval_tokens": 16 if capped else None, "eval_batch": 1000}
    good("train.py", *tiny(tmp_path / "whole", **args))
    stop = "import os, signal; from model import GPT; score, calls = GPT.score, []\ndef stopped(self, x, y):\n"
    stop += f"    calls.append(0)\n    if len(calls) == {3 if capped else 2 if step == 6 else 1}:\n"
    stop += "        os.kill(os.getpid(), signal.SIGTERM)\n    return score(self, x, y)\nGPT.score = stopped"
    process = run("train.py", *tiny(tmp_path / "run", **args), before=stop)
    assert process.status == 143 and f"stopped after step {step} of 6" in process.stdout, process.stderr
    assert load_checkpoint(tmp_path / "run/ckpt.safetensors").step == step
    assert json.loads((tmp_path / "run/run.json").read_text())["state"] == "stopped"
    assert (tmp_path / "run/eval_results.json").exists() == (step == 6 and not capped)
    good("train.py", *tiny(tmp_path / "run", **args))
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert load_checkpoint(tmp_path / "run/ckpt_prev.safetensors").step == 4
    assert "finished" in good("train.py", *tiny(tmp_path / "run", **args))


def test_a_kill_behind_the_evaluation_that_a_signal_had_cut_short(tmp_path):
    """The line is written, the checkpoint with the new best loss is not yet: it is known all the same."""
    stop = "import os, signal; from model import GPT; score = GPT.score\ndef stopped(self, x, y):\n"
    stop += "    os.kill(os.getpid(), signal.SIGTERM)\n    return score(self, x, y)\nGPT.score = stopped"
    assert run("train.py", *tiny(tmp_path), before=stop).status == 143
    killed = "import os, lib.run\nlib.run.RunFolder.save = lambda *_: os._exit(9)"
    assert run("train.py", *tiny(tmp_path), before=killed).status == 9
    good("train.py", *tiny(tmp_path, stop_at=4))
    (loss,) = [line["eval_loss"] for line in metrics(tmp_path) if "eval_loss" in line]
    assert load_checkpoint(tmp_path / "ckpt.safetensors").best_loss == loss


# learning


def test_it_learns_more_than_bigrams(tmp_path):
    """A smaller and shorter form of the default, with method3_2, on the built-in corpus."""
    size = {"n_layer": 2, "n_embd": 64, "block_size": 32, "batch_tokens": 1024, "max_steps": 300}
    args = options(**size, learning_rate=4e-3, eval_every=300, device="cpu", out_dir=tmp_path)
    helpers.start("train.py", "config/method3_2.py", *args).wait(timeout=300)
    assert evaluation(tmp_path)["eval_loss"] < bigram_loss(ROOT / "data/pydocs") - 0.3


def bigram_loss(folder):
    """Cross-entropy in nats of a bigram model of the bytes, counts plus one, on the validation split."""
    train, val = (load_tokens(folder, split).astype(np.int64) for split in ("train", "val"))
    n = load_meta(folder).vocab_size
    counts = np.bincount(train[:-1] * n + train[1:], minlength=n * n).reshape(n, n) + 1
    return -np.log(counts / counts.sum(1, keepdims=True))[val[:-1], val[1:]].mean()
