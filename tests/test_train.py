"""train.py from outside: what it learns, writes and says, for one process, two, and a run in several sittings."""

import json
import math
import re
import shlex
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

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
    run,
    snapshot,
    start,
    tiny,
)

import train
from compare import CompareConfig
from configurator import configure
from data.common import load_meta, load_tokenizer, load_tokens
from model import GPT, GPTConfig
from sample import SampleConfig
from train import Blocks, TrainConfig, load_checkpoint

CONFIGS = sorted((ROOT / "config").glob("*.py"))
MODEL = {key: TINY[key] for key in ("n_layer", "n_head", "n_embd", "ffn_hidden", "block_size")}


def start_two(*args, **options):
    """Two processes, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [start("train.py", *args, env=world | {"RANK": str(r), "LOCAL_RANK": str(r)}, **options) for r in range(2)]


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

    # the same again
    before = snapshot(tmp_path / "run")
    stdout = good("train.py", "config/method3_2.py", *tiny(tmp_path / "run"))
    assert "finished, at step 6 of 6" in stdout and "sample.py --out_dir=" in stdout and "--overwrite=True" in stdout
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
    """In steps or in epochs; stop_at ends a sitting without touching the schedule."""
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


# several sittings


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
    dtype = options(dtype=settings.get("dtype"))  # belongs to the sitting
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
    blocks = (load_meta(dataset()).train_tokens - 1) // TINY["block_size"]
    good("train.py", *resume, *options(epochs=12 * 8 / blocks))
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
    import shutil

    shutil.copytree(dataset(), tmp_path / "data")
    args = tiny(tmp_path / "run", dataset=tmp_path / "data")
    good("train.py", *args, "--stop_at=2")
    meta = json.loads((tmp_path / "data/meta.json").read_text())
    (tmp_path / "data/meta.json").write_text(json.dumps(meta | {"source_sha256": "0" * 64}))
    before = snapshot(tmp_path)
    check_error(run("train.py", *args), "is not the data of the run", "source_sha256 was")
    assert snapshot(tmp_path) == before


def test_overwrite(tmp_path):
    """A new run, and nothing of the old one is left that could be taken for it."""
    good("train.py", *tiny(tmp_path / "a", residual_mode="method3_2"))
    good("train.py", *tiny(tmp_path / "a", overwrite=True, checkpoint_every=10, eval_every=10))
    good("train.py", *tiny(tmp_path / "b", checkpoint_every=10, eval_every=10))
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {path.name for path in (tmp_path / "b").iterdir()}
    # whoever gives the same command after an interruption would start anew: it says what to give instead
    stdout = good("train.py", *tiny(tmp_path / "a", overwrite=True, stop_at=2))
    assert "--overwrite=False --init_from=resume goes on from there" in stdout
    good("train.py", *tiny(tmp_path / "a", overwrite=True), *options(overwrite=False, init_from="resume"))
    assert [line["step"] for line in metrics(tmp_path / "a") if "loss" in line] == [1, 2, 3, 4, 5, 6]


def test_changed_code_warns(tmp_path):
    good("train.py", *tiny(tmp_path, stop_at=2))
    quiet = run("train.py", *tiny(tmp_path, stop_at=4))
    assert "warning" not in quiet.stderr
    changed = run("train.py", *tiny(tmp_path), before="import train; train.code_hash = lambda: 'another'")
    assert changed.status == 0 and "warning: model.py or train.py has changed" in changed.stderr


# batches


RECORD = """
import json, os, train
batch = train.Blocks.batch
def recorded(self, blocks, rows, device):
    x, y = batch(self, blocks, rows, device)
    if "train.bin" in self.tokens.filename.name:
        with open(f"{os.environ['RECORD']}.{os.environ.get('RANK', '0')}", "a") as file:
            file.write(json.dumps([x.tolist(), y.tolist()]) + chr(10))
    return x, y
train.Blocks.batch = recorded
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
    assert record("c") == wanted  # its file has both sittings
    assert record("d", seed=2) != wanted

    env = {"RECORD": str(tmp_path / "two")}
    with_env = RECORD.replace("import json, os, train", f"import json, os, train; os.environ.update({env})")
    for process in start_two(*tiny(tmp_path / "e", micro_batch=2), before=with_env):
        assert process.wait().status == 0, process.stderr
    for step in range(6):
        ours = [sequence for rank in (0, 1) for sequence in recorded(env["RECORD"], rank)[4 * step : 4 * step + 4]]
        assert sorted(ours) == sorted(wanted[8 * step : 8 * step + 8])

    tokens = load_tokens(dataset(), "train").tolist()
    for x, y in wanted:
        assert x[1:] == y[:-1]
        assert any(tokens[i : i + 9] == [*x, y[-1]] for i in range(0, len(tokens), 8))


def test_an_epoch_is_one_shuffled_pass():
    tokens = np.arange(1000, 1000 + 8 * 10 + 4, dtype=np.uint16)  # ten full blocks and a tail of three targets
    blocks = Blocks(tokens, 8, 2000, seed=1)
    assert (blocks.n_full, blocks.n_all) == (10, 11)
    first, second = blocks.shuffled(0, 10), blocks.shuffled(10, 20)
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert blocks.shuffled(8, 13) == [*first[8:], *second[:3]]  # on across the end of an epoch
    assert Blocks(tokens, 8, 2000, seed=1).shuffled(13, 17) == second[3:7]  # no state
    x, y = blocks.batch([0, 10], 2, torch.device("cpu"))
    assert x[0].tolist() == list(range(1000, 1008)) and y[0].tolist() == list(range(1001, 1009))
    assert y[1].tolist() == [1081, 1082, 1083, -1, -1, -1, -1, -1] and x[1, :4].tolist() == [1080, 1081, 1082, 1083]


def test_accumulation_is_one_big_batch(tmp_path):
    for micro_batch in (8, 4, 1):
        good("train.py", "config/method3_2.py", *tiny(tmp_path / str(micro_batch), micro_batch=micro_batch))
    for other in ("4", "1"):
        for a, b in zip(metrics(tmp_path / "8"), metrics(tmp_path / other), strict=True):
            assert a == pytest.approx(b, abs=1e-5)


def test_several_first_runs_prepare_the_corpus_once(tmp_path, monkeypatch):
    calls, folder = [], tmp_path / "data/pydocs"
    folder.mkdir(parents=True)

    def prepare(folder, tokenizer):
        calls.append(folder)
        time.sleep(0.2)
        (folder / "meta.json").touch()

    monkeypatch.setattr(train, "ROOT", tmp_path)
    monkeypatch.setattr("data.pydocs.prepare.prepare", prepare)
    settings, alone = SimpleNamespace(dataset="pydocs"), SimpleNamespace(rank=0, wait_for_all=lambda: None)
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(lambda _: train.dataset_folder(settings, alone), range(3))] == [folder] * 3
    assert calls == [folder]


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
    before = "import os, train\nif os.environ['RANK'] == '1': train.dataset_folder = lambda *_: '/nowhere'"
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

    tokens = torch.tensor(load_tokens(dataset(), "val").astype(np.int64))
    assert (len(tokens) - 1) % 8, "the last block should be a short one"
    model = load_checkpoint(tmp_path / "ckpt.pt")["model"].eval()
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
    steps = {name: load_checkpoint(tmp_path / f"{name}.pt")["step"] for name in ("best", "ckpt", "ckpt_prev")}
    assert steps == {"best": best, "ckpt": 12, "ckpt_prev": 11}
    check_error(run("train.py", *options(out_dir=tmp_path / "x", init_from="resume_best")), "resume_best")


# config files


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_trains(path, tmp_path):
    tiny_size = {"max_steps": 2, "n_kv_head": 1}
    if path.stem == "finetune_gpt2":
        torch.manual_seed(0)
        gpt2 = GPT(GPTConfig(**MODEL | {"ffn_hidden": 64}, **gpt2_layer()))
        gpt2.save_pretrained(tmp_path / "hf")
        tiny_size |= {"init_from": tmp_path / "hf"}
        not_ours = {*MODEL, "n_kv_head"} - {"block_size"}
        args = [a for a in tiny(tmp_path / "run", **tiny_size) if a.split("=")[0][2:] not in not_ours]
    else:
        args = tiny(tmp_path / "run", **tiny_size)
    good("train.py", path, *args)
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1, 2]


def gpt2_layer():
    names = {}
    exec((ROOT / "config/gpt2.py").read_text(), names)
    return {key: value for key, value in names.items() if not key.startswith("_")}


def test_method_files_hold_the_mode_and_nothing_else():
    wanted = {
        **{name: (name, True) for name in "baseline method1 method2 method3_1 method3_2 method4_1 method4_2".split()},
        "v2_method1": ("method3_1", False),
        "v2_method2": ("method4_1", False),
        "v2_method3": ("method3_2", False),
    }
    for name, (mode, recompute) in wanted.items():
        names = {}
        exec((ROOT / f"config/{name}.py").read_text(), names)
        del names["__builtins__"]
        assert names == {"residual_mode": mode, "recompute": recompute}
    others = "gpt2 llama primer_ez postnorm sandwich deepnorm shakespeare wikitext103 wikitext103_12 finetune_gpt2"
    assert {path.stem for path in CONFIGS} == {*wanted, *others.split()}


def test_out_dir_follows_from_the_files(tmp_path):
    elsewhere = f"import pathlib, train; train.ROOT = pathlib.Path({str(tmp_path)!r}); train.code_hash = lambda: ''"
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
    assert "finished" not in good("train.py", *args)  # the same command goes on
    assert "finished" in good("train.py", *args)
    config = load_checkpoint(tmp_path / "run/ckpt.pt")["model"].config
    assert (config.vocab_size, config.residual_mode, config.dropout) == (300, "method3_1", 0.1)
    check_error(run("train.py", *args, f"--out_dir={tmp_path}/x", "--init_from=no/such/folder"), "no/such/folder")


def test_another_vocabulary(tmp_path):
    """The vocabulary follows from the data; the same command still goes on, and an explicit one is obeyed."""
    from data.common import load_tokenizer, write_dataset

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
    train.show_sample(model, load_tokenizer("bytes", None), 3, torch.device("cpu"))
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
    scripts = {"train.py": [TrainConfig, GPTConfig], "sample.py": [SampleConfig]}
    scripts["compare.py"] = [CompareConfig, TrainConfig, GPTConfig]
    seen = []
    for words in (shlex.split(line, comments=True) for line in text.splitlines()):
        script = next((word for word in words if word in scripts), None)
        if script:
            before, arguments = words[: words.index(script)], words[words.index(script) + 1 :]
            s = configure([f"{ROOT}/{a}" if a.startswith("config/") else a for a in arguments], *scripts[script])
            seen.append(script)
            if script == "train.py":
                processes = re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", " ".join(before))
                assert s.batch_tokens % (s.block_size * s.micro_batch * math.prod(map(int, processes))) == 0, words
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
        ({"micro_batch": 3}, "batch_tokens=64 must be a multiple of block_size × micro_batch × processes = 8 × 3 × 1"),
        ({"batch_tokens": 60}, "batch_tokens=60 must be a multiple"),
        ({"batch_tokens": 4}, "batch_tokens=4 must be a multiple"),
        ({"block_size": 100_000, "batch_tokens": 400_000}, "shorter than one block of 100000 tokens"),
        ({"n_head": 3}, "n_embd=16 must be a multiple of n_head=3"),
        ({"n_layer": 0}, "n_layer must be at least 1"),
        ({"n_layer": 10**12}, "does not fit into this machine's memory"),
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
        ({"out_dir": "/proc/nowhere/run"}, "cannot be written to"),
        ({"out_dir": "README/" * 900}, "cannot be written to: File name too long"),
        ({"init_from": "resume"}, "there is no"),
        ({"init_from": "resume_prev"}, "ckpt_prev.pt"),
        ({"n_layr": 3}, "unknown key 'n_layr': did you mean n_layer?"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mistakes(settings, words, tmp_path):
    check_error(run("train.py", *tiny(tmp_path / "run", **settings)), words)
    left = {path.name for path in (tmp_path / "run").glob("*")}
    assert left <= {"lock"}


def test_a_checkpoint_of_another_shape(tmp_path):
    good("train.py", *tiny(tmp_path / "a"))
    path = tmp_path / "a/ckpt.pt"
    content = torch.load(path, weights_only=True)
    content["model"]["h.1.attn.q.weight"] = torch.zeros(16, 15)
    torch.save(content, path)
    before = snapshot(tmp_path)
    check_error(run("train.py", *tiny(tmp_path / "a")), "ckpt.pt", "h.1.attn.q.weight should be (16, 16), is (16, 15)")
    assert snapshot(tmp_path) == before


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
