"""
Nothing lost, nothing let in: kills, signals, full disks, damaged and hostile files, nonsense as input. A few of each;
tests/soak.py does it by the hundred.
"""

import json
import os
import random
import shutil
import signal
import struct
import time
from dataclasses import fields
from types import NoneType
from typing import get_args

import pytest
import soak
import torch
from helpers import (
    TORCHRUN,
    assert_same_run,
    check_error,
    command,
    dataset,
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
from hypothesis import given, settings
from hypothesis import strategies as st

from configurator import configure
from lib.activations import ACTIVATIONS
from lib.checkpoint import load_checkpoint, read_run
from lib.errors import UserError
from model import GPT, NORMS, GPTConfig, ResidualMode
from train import SETTINGS

LEARNED = {"residual_mode": "method3_2", "dropout": 0.1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    good("train.py", *tiny(folder, **LEARNED))
    return folder


# kill -9


@pytest.mark.parametrize("part", ["train", "resume", "two", "prepare"])
def test_random_kills(part, tmp_path):
    assert soak.do_case(part, 1, tmp_path) == "killed"


# Count the moments at which files change, and die at one: before each new name, and in the middle of each file.
DIE = """
import builtins, os, signal, lib.files
moments = 0
def moment():
    global moments
    moments += 1
    if moments == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
def around(function):
    def replacement(*args):
        moment()
        return function(*args)
    return replacement
for name in ("replace", "link", "unlink"):
    setattr(os, name, around(getattr(os, name)))
class HalfWritten:
    def __init__(self, *args):
        self.file, self.first = builtins.open(*args), True
    def write(self, content):
        content = bytes(content)
        if self.first:
            self.file.write(content[: len(content) // 2])
            self.file.flush()
            moment()
            content = content[len(content) // 2 :]
        self.first = False
        return self.file.write(content)
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.file.close()
    def __getattr__(self, name):
        return getattr(self.file, name)
lib.files.open = HalfWritten
"""


def test_a_kill_at_moments_of_writing(whole, tmp_path):
    """All of the first, which make the folder, then every third."""
    number, kills = 0, 0
    while True:
        number += 1 if number < 12 else 3
        out_dir = tmp_path / str(number)
        process = run("train.py", *tiny(out_dir, **LEARNED), before=DIE.format(number=number))
        if process.status == 0:  # there is no n-th moment
            break
        assert process.status == -9, process.stderr
        good("train.py", *tiny(out_dir, **LEARNED))
        assert_same_run(whole, out_dir)
        assert {path.name for path in out_dir.iterdir()} == {path.name for path in whole.iterdir()}
        kills += 1
    assert kills > 25


def test_kills_while_going_back(whole, tmp_path):
    """The same for a run whose latest checkpoint is damaged, and which resumes from the one before."""
    good("train.py", *tiny(tmp_path / "base", stop_at=4, **LEARNED))
    (tmp_path / "base/ckpt.safetensors").write_bytes(b"damaged")
    number = 0
    while True:
        number += 1 if number < 4 else 3
        out_dir = tmp_path / str(number)
        shutil.copytree(tmp_path / "base", out_dir)
        back = tiny(out_dir, init_from="resume_prev", stop_at=3, checkpoint_every=1, **LEARNED)
        process = run("train.py", *back, before=DIE.format(number=number))
        again = run("train.py", *tiny(out_dir, **LEARNED))
        if again.status:  # killed before it went back
            check_error(again, "ckpt.safetensors is damaged", "--init_from=resume_prev")
            good("train.py", *tiny(out_dir, init_from="resume_prev", **LEARNED))
        assert_same_run(whole, out_dir)
        if process.status == 0:
            break
    assert number > 5


# signals


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_after_the_step(number, status, tmp_path):
    args = tiny(tmp_path / "run", max_steps=400, checkpoint_every=1000, eval_every=1000, **LEARNED)
    process = start("train.py", *args)
    wait_until(lambda: steps_done(tmp_path / "run") > 3)
    process.kill(number)
    assert process.wait().status == status, process.stderr
    assert "Traceback" not in process.stderr
    step = steps_done(tmp_path / "run")
    assert step < 400 and f"stopped after step {step} of 400; the same command resumes from there" in process.stdout
    assert read_run(tmp_path / "run/ckpt.safetensors")["step"] == step
    good("train.py", *args, f"--stop_at={step + 5}")
    good("train.py", *tiny(tmp_path / "whole", max_steps=400, eval_every=1000, stop_at=step + 5, **LEARNED))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    ours, theirs = parameters(tmp_path / "run"), parameters(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_signal_to_torchrun(tmp_path):
    """As a scheduler sends it: to torchrun, which passes it on; and Ctrl-C, which every process gets."""
    args = tiny(tmp_path / "run", max_steps=3000, checkpoint_every=10**4, eval_every=10**4, micro_batch=2)
    process = command(*TORCHRUN, "train.py", *args)
    wait_until(lambda: steps_done(tmp_path / "run") > 3)
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "the same command resumes from there" in stdout
    step = steps_done(tmp_path / "run")
    assert read_run(tmp_path / "run/ckpt.safetensors")["step"] == step < 3000

    both = start_two(*args)
    wait_until(lambda: steps_done(tmp_path / "run") > step + 3)
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGCONT):  # one that hears of it late may have ended already
        for process in both:
            process.kill(number)
    assert [process.wait().status for process in both] == [130, 130]
    assert read_run(tmp_path / "run/ckpt.safetensors")["step"] == steps_done(tmp_path / "run") < 3000


def test_a_worker_is_killed(tmp_path):
    """All end, soon and not with 0, and the run is resumed by one process or two."""
    args = tiny(tmp_path / "run", max_steps=3000, checkpoint_every=5, eval_every=10**4, micro_batch=2)
    process = command(*TORCHRUN, "train.py", *args)
    wait_until(lambda: steps_done(tmp_path / "run") > 8)
    workers = [int(pid) for pid in os.popen(f"pgrep -P {process.pid}").read().split()]
    ranks = {}
    for pid in workers:
        with open(f"/proc/{pid}/environ") as file:
            ranks |= {int(item[5:]): pid for item in file.read().split("\0") if item.startswith("RANK=")}
    started = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0 and time.monotonic() - started < 60
    wait_until(lambda: not os.path.exists(f"/proc/{ranks[0]}"))

    step = read_run(tmp_path / "run/ckpt.safetensors")["step"]
    assert step >= 5
    for process in start_two(*args, f"--stop_at={step + 2}"):
        assert process.wait().status == 0, process.stderr
    good("train.py", *args, f"--stop_at={step + 4}")
    good("train.py", *tiny(tmp_path / "whole", max_steps=3000, eval_every=10**4, micro_batch=2, stop_at=step + 4))
    for a, b in zip(metrics(tmp_path / "run"), metrics(tmp_path / "whole"), strict=True):
        assert a == pytest.approx(b, abs=1e-5)


# disks and damaged files


def test_a_full_disk(whole, tmp_path):
    """At whichever file it becomes full: one line, and the run is resumed from the last whole checkpoint."""
    good("train.py", *tiny(tmp_path / "base", stop_at=2, **LEARNED))
    size = (tmp_path / "base/ckpt.safetensors").stat().st_size
    for limit in (1500, 5000, size // 3, size // 2, size - 1):  # metrics.jsonl, best.safetensors, ckpt.safetensors
        out_dir = tmp_path / str(limit)
        shutil.copytree(tmp_path / "base", out_dir)
        before = snapshot(out_dir)
        process = run("train.py", *tiny(out_dir, **LEARNED), limit=limit)
        check_error(process, "could not be read or written", "File too large", "make room", status=1)
        assert (out_dir / "ckpt.safetensors").read_bytes() == before[out_dir / "ckpt.safetensors"]
        assert not list(out_dir.glob("*.tmp"))
        good("train.py", *tiny(out_dir, **LEARNED))
        assert_same_run(whole, out_dir)


def test_damaged_checkpoints(whole, tmp_path):
    """Cut or with a flipped bit: recognised and named; where it is not, the bit carries nothing."""
    out_dir = tmp_path / "run"
    good("train.py", *tiny(out_dir, stop_at=4, **LEARNED))
    content = (out_dir / "ckpt.safetensors").read_bytes()
    chance = random.Random(1)
    some = [chance.randrange(len(content)) for _ in range(20)]
    for length in (0, 1, 100, len(content) // 2, len(content) - 1, *some):
        (tmp_path / "cut.safetensors").write_bytes(content[:length])
        with pytest.raises(UserError, match=r"cut\.safetensors is damaged or not a checkpoint"):
            load_checkpoint(tmp_path / "cut.safetensors")
    good_one = load_checkpoint(out_dir / "ckpt.safetensors")
    noticed, header = 0, struct.unpack("<Q", content[:8])[0]
    places = [chance.randrange(8 + header) for _ in range(60)]
    places += [chance.randrange(8 + header, len(content)) for _ in range(60)]
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << chance.randrange(8)
        (tmp_path / "flipped.safetensors").write_bytes(flipped)
        try:
            loaded = load_checkpoint(tmp_path / "flipped.safetensors")
        except UserError as error:
            assert "flipped.safetensors is damaged or not a checkpoint" in str(error)
            noticed += 1
        else:
            assert soak.same_checkpoint(loaded, good_one), place
    assert noticed > 110  # of 120: a bit of a space or of a letter's case may carry nothing

    before = snapshot(out_dir)
    (out_dir / "ckpt.safetensors").write_bytes(content[:-1])
    check_error(run("train.py", *tiny(out_dir, **LEARNED)), "ckpt.safetensors is damaged", "--init_from=resume_prev")
    assert snapshot(out_dir) | {out_dir / "ckpt.safetensors": content} == before
    stdout = good("train.py", *tiny(out_dir, init_from="resume_prev", stop_at=5, **LEARNED))
    assert "--init_from=resume resumes from there" in stdout
    good("train.py", *tiny(out_dir, **LEARNED))
    assert_same_run(whole, out_dir)


def test_a_lost_checkpoint(whole, tmp_path):
    """Someone deletes ckpt.safetensors: the same command would start anew over what is left, so it does not."""
    good("train.py", *tiny(tmp_path, stop_at=4, **LEARNED))
    (tmp_path / "ckpt.safetensors").unlink()
    before = snapshot(tmp_path)
    check_error(run("train.py", *tiny(tmp_path, **LEARNED)), "lost its ckpt.safetensors", "--init_from=resume_prev")
    assert snapshot(tmp_path) == before
    good("train.py", *tiny(tmp_path, init_from="resume_prev", **LEARNED))
    assert_same_run(whole, tmp_path)


def test_damaged_metrics(tmp_path):
    good("train.py", *tiny(tmp_path, stop_at=4))
    path = tmp_path / "metrics.jsonl"
    text = path.read_text()
    for damaged in ("nonsense\n", "[]\n", '{"step": "x"}\n', "{}\n", "[" * 10**5 + "\n"):
        path.write_text(damaged + text)
        check_error(run("train.py", *tiny(tmp_path)), "metrics.jsonl, line 1, is not a metrics line")
        assert path.read_text() == damaged + text
    path.write_text(text + '{"step": 5, "los')  # torn
    good("train.py", *tiny(tmp_path, stop_at=5))
    assert path.read_text().startswith(text) and steps_done(tmp_path) == 5
    path.unlink()
    good("train.py", *tiny(tmp_path))
    assert [line["step"] for line in metrics(tmp_path)] == [6, 6]


def test_two_runs_on_one_folder(tmp_path):
    first = start("train.py", *tiny(tmp_path, max_steps=3000, eval_every=3000))
    wait_until(lambda: steps_done(tmp_path) > 0)
    for more in ([], ["--overwrite=True"], ["--init_from=resume"], ["--eval_only=True"]):
        check_error(run("train.py", *tiny(tmp_path, max_steps=3000), *more), "another run is writing to", tmp_path)
    assert first.poll() is None
    first.kill()
    first.wait()
    good("train.py", *tiny(tmp_path, max_steps=3000, stop_at=steps_done(tmp_path) + 5))


# numbers that are not finite


def test_a_rate_that_explodes(tmp_path):
    """Stops at that step; what was written before is still there, and is what it names."""
    good("train.py", *tiny(tmp_path, stop_at=4))
    before = snapshot(tmp_path)
    args = tiny(tmp_path, init_from="resume", learning_rate=1e30, checkpoint_every=100, eval_every=100)
    process = run("train.py", *args)
    check_error(process, "error: step 6: loss", f"the last good checkpoint is {tmp_path}/ckpt.safetensors", status=1)
    assert "--init_from=resume resumes" in process.stderr
    # a checkpoint of the step before has the bad parameters already: then it is the one before that
    process = run("train.py", *args, "--checkpoint_every=1")
    check_error(
        process, "error: step 6: loss", f"the last good checkpoint is {tmp_path}/ckpt_prev.safetensors", status=1
    )
    assert (tmp_path / "ckpt_prev.safetensors").read_bytes() == before[tmp_path / "ckpt.safetensors"]
    good("train.py", *tiny(tmp_path, init_from="resume_prev"))

    check_error(run("train.py", *tiny(tmp_path / "new", learning_rate=1e30)), "no checkpoint before it", status=1)


@pytest.mark.parametrize("where", ["parameters", "evaluation"])
def test_bad_parameters_are_not_saved(where, tmp_path):
    """nan comes from the update itself, at a step that ends with a checkpoint, or with an evaluation and one."""
    every = {"checkpoint_every": 1, "eval_every": 1 if where == "evaluation" else 100}
    good("train.py", *tiny(tmp_path, stop_at=2, **every))
    before = snapshot(tmp_path)
    poison = "import torch; step = torch.optim.AdamW.step\ndef bad(self, *a, **k):\n    step(self, *a, **k)\n"
    poison += "    self.param_groups[0]['params'][0].data[0, 0] = float('nan')\ntorch.optim.AdamW.step = bad"
    process = run("train.py", *tiny(tmp_path, **every), before=poison)
    check_error(process, "error: step 3: ", where[:5] if where == "parameters" else "validation loss nan", status=1)
    assert f"{tmp_path}/ckpt.safetensors" in process.stderr
    after = snapshot(tmp_path)
    assert {path.name for path in before if after[path] != before[path]} == {"metrics.jsonl", "run.json"}


def test_a_poisoned_checkpoint(tmp_path):
    good("train.py", *tiny(tmp_path, stop_at=4))
    tensors, about = read_checkpoint(tmp_path / "ckpt.safetensors")
    tensors["model.h.1.norm1.weight"][0] = float("nan")
    write_checkpoint(tmp_path / "ckpt.safetensors", tensors, about)
    before = snapshot(tmp_path)
    process = run("train.py", *tiny(tmp_path))
    check_error(process, "step 5: loss nan", f"{tmp_path}/ckpt_prev.safetensors", "resume_prev", status=1)
    after = snapshot(tmp_path)
    unchanged = [path for path in before if path.name != "run.json"]  # which says that it failed
    assert all(after[path] == before[path] for path in unchanged)


# hostile files


@pytest.fixture
def run_folder(tmp_path):
    shutil.copytree(soak.good_runs()[0], tmp_path / "run")
    return tmp_path / "run"


def refused_checkpoint(folder, content, *words):
    """By both programs, soon and without much memory; and nothing is overwritten."""
    for name in ("ckpt.safetensors", "best.safetensors"):
        (folder / name).write_bytes(content)
    before = snapshot(folder)
    for script, *args in (("train.py", *tiny(folder, **soak.LEARNED)), ("sample.py", folder)):
        process = start(script, *args, before=soak.LIMITS).wait(soak.PATIENCE)
        check_error(process, "is damaged or not a checkpoint", *words)
    assert snapshot(folder) == before


def test_hostile_checkpoints(run_folder):
    """With the right checksum each time. Nothing is allocated that the file does not hold, and nothing takes long."""
    header, about, data = soak.read_parts(run_folder / "ckpt.safetensors")
    name = "model.h.1.mlp.up.weight"
    entry, nothing = header[name], {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}

    def refused(*words, header=header, run=about, length=None):
        refused_checkpoint(run_folder, soak.join_parts(header, run, data, length), *words)

    # sizes that the file does not hold
    for key, value in (("vocab_size", 10**8), ("n_layer", 10**9), ("n_embd", 2 * 10**18), ("ffn_hidden", 10**18)):
        refused(run=about | {"config": about["config"] | {key: value}})
    refused(header=header | {name: entry | {"shape": [10**9, 10**9]}})
    refused(header=header | {name: entry | {"data_offsets": [0, 10**18]}})
    refused(length=10**15)
    refused(length=2**64 - 1)
    many = {f"model.h.{i // 12}.{i % 12}": nothing for i in range(2400)}  # as many as so deep a model has
    refused(header=header | many, run=about | {"config": about["config"] | {"n_layer": 200}})
    # names and types
    other = json.dumps(header["model.h.0.mlp.up.weight"])
    refused(header=json.dumps(header)[:-1] + f', "{name}": {other}}}')  # a name twice
    for dtype in ("I32", "F16", "x", 7):
        refused(header=header | {name: entry | {"dtype": dtype}})
    refused("absent", header=header | {"model.more": nothing})
    refused("optimizer", header=header | {"more": nothing})
    refused("absent", header={key.replace("norm_f", "norm_g"): value for key, value in header.items()})
    refused(header={key: value for key, value in header.items() if key != "__metadata__"})
    for metadata in (
        {},
        None,
        {"run": json.dumps(about)},
        header["__metadata__"] | {"more": "x"},
        {"run": 1, "crc32": 2},
    ):
        refused(header=json.dumps(header | {"__metadata__": metadata}))
    # JSON
    refused(header="[" * 10**6)
    for bomb in ("[" * 10**6, '{"a":' * 10**5, "9" * 10**6, f'"{"x" * 10**7}"', "", "null", "[]"):
        refused(run=bomb)
    for number in ("1" + "0" * 400, "NaN", "-Infinity", "1e400", "0.5", "true", '"6"'):
        assert '"step": 6' in json.dumps(about)
        refused(run=json.dumps(about).replace('"step": 6', f'"step": {number}'))


def test_odd_checkpoints(run_folder):
    """Everything in `run` replaced by something else, one by one: refused, or it makes no difference."""
    tensors, about = read_checkpoint(run_folder / "ckpt.safetensors")
    path = run_folder / "odd.safetensors"
    odd = (None, True, -1, 10**30, 0.5, float("nan"), "x", "", [], {}, {"x": 1}, {"a": {"b": {}}}, [[]])
    cases = [about | {key: value} for key in about for value in odd]
    cases += [{k: v for k, v in about.items() if k != key} for key in about]
    for part in ("settings", "config", "data"):
        for key in about[part]:
            cases.append(about | {part: about[part] | {key: random.Random(key).choice(odd)}})
            cases.append(about | {part: {k: v for k, v in about[part].items() if k != key}})
        cases.append(about | {part: about[part] | {"more": 1}})
    cases += [about | {"more": 1}, [], "x", "null", 7]
    refused = 0
    for case in cases:
        write_checkpoint(path, tensors, case)
        try:
            assert isinstance(load_checkpoint(path).model, GPT)
        except UserError as error:
            refused += 1
            assert "odd.safetensors is damaged or not a checkpoint" in str(error)
    assert refused > len(about) * len(odd) * 0.6
    # what load_checkpoint lets through, the programs must bear
    for case in random.Random(1).sample(cases, 12):
        for name in ("ckpt.safetensors", "best.safetensors"):
            write_checkpoint(run_folder / name, tensors, case)
        for process in (
            run("train.py", *options(out_dir=run_folder, init_from="resume", max_steps=8, sample_tokens=0)),
            run("sample.py", run_folder, "--max_new_tokens=3"),
        ):
            if process.status:
                check_error(process)


def test_a_hostile_tokenizer_name(run_folder):
    """A name is looked up among three; it is never a path."""
    tensors, about = read_checkpoint(run_folder / "best.safetensors")
    for name in ("../../etc/passwd", "hf:/etc", "cl100k_base", "", 7, None, [], {}):
        changed = about | {"data": about["data"] | {"tokenizer": name}}
        write_checkpoint(run_folder / "best.safetensors", tensors, changed)
        check_error(run("sample.py", run_folder), "unknown tokenizer")


# datasets


def test_odd_datasets(tmp_path):
    """Random bytes as meta.json, bins of odd length, ids beyond the vocabulary, no text, one line of text."""
    chance = random.Random(1)
    meta = json.loads((dataset() / "meta.json").read_text())
    folder = tmp_path / "data"
    shutil.copytree(dataset(), folder)

    def refused(*words):
        check_error(run("train.py", *tiny(tmp_path / "run", dataset=folder)), *words)

    contents = [chance.randbytes(n) for n in (0, 1, 10, 1000, 10**6)]
    contents += [b"null", b"[]", b"{}", b"[" * 10**5, b'"\\ud800"', json.dumps(meta).encode()[:-1]]
    contents += [json.dumps(meta | {"val_bytes": 0}).encode(), json.dumps(meta | {"vocab_size": 10**18}).encode()]
    for content in contents:
        (folder / "meta.json").write_bytes(content)
        refused(folder)
    for tokenizer in ("../x", "hf", "klingon", "\ud800"):
        (folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": tokenizer}))
        refused("tokenizer")
    (folder / "meta.json").write_text(json.dumps(meta))

    for split in ("train", "val"):
        content = (folder / f"{split}.bin").read_bytes()
        for damaged in (b"", content[:-1], content[:-2], content + b"x", content + b"xy"):
            (folder / f"{split}.bin").write_bytes(damaged)
            refused(f"{split}.bin")
        (folder / f"{split}.bin").unlink()
        refused(f"{split}.bin")
        (folder / f"{split}.bin").mkdir()
        refused(f"{split}.bin")
        (folder / f"{split}.bin").rmdir()
        (folder / f"{split}.bin").write_bytes(struct.pack("<H", 257) * (len(content) // 2))
        shutil.rmtree(tmp_path / "run", ignore_errors=True)  # some of these are seen before there is a folder
        refused(f"{split}.bin holds token 257, but the vocabulary is 257")
        (folder / f"{split}.bin").write_bytes(content)


@pytest.mark.parametrize("text", ["", "\n", "x", "one line\n", "x\0\n" * 3, "\ufeff", "two\nlines\n"])
def test_tiny_corpora(text, tmp_path):
    """Through prepare.py and train.py: each works or says why not."""
    (tmp_path / "corpus.txt").write_text(text)
    prepare = command("data/text/prepare.py", tmp_path / "corpus.txt", "--data-dir", tmp_path, "--out", "tiny")
    prepare.folder, (_, stderr) = None, prepare.communicate(timeout=60)
    if prepare.returncode:
        assert prepare.returncode == 2 and stderr.startswith("error: ") and stderr.count("\n") == 1
        return
    for block_size in (1, 8):
        args = tiny(tmp_path / str(block_size), dataset=tmp_path / "tiny", block_size=block_size, micro_batch=1)
        process = run("train.py", *args, "--batch_tokens=8")
        if process.status:
            check_error(process, "shorter than one window")


# bad input by the thousand


TEXT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", "None", "True", "false", "nan", "-inf", "1e999", "0x10", "1_0", "٣", "\ud800", "=", "--", "a\nb"]
    ),
    st.integers(-(10**30), 10**30).map(str),
    st.floats().map(str),
)
VALUE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.binary(max_size=5), st.just([1, {}])
)
KEY = st.one_of(st.sampled_from([f.name for cls in SETTINGS for f in fields(cls)]), st.text(max_size=20))


def one_line(error):
    assert error.status == 2 and "\n" not in str(error) and 0 < len(str(error)) <= 1010


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.tuples(KEY, TEXT).map(lambda kv: f"--{kv[0]}={kv[1]}"), TEXT), max_size=4))
def test_any_command_line(arguments):
    """Every key has a value of its type then, or there is a UserError."""
    if "-h" in arguments or "--help" in arguments:
        return
    try:
        s = configure(arguments, *SETTINGS)
    except UserError as error:
        return one_line(error)
    for key, kind in s.types.items():
        assert type(getattr(s, key)) in (get_args(kind) or (kind,))


@settings(max_examples=100, deadline=None)
@given(assignments=st.lists(st.tuples(KEY, VALUE), max_size=3), text=st.one_of(st.none(), st.text(max_size=40)))
def test_any_config_file(tmp_path_factory, assignments, text):
    path = tmp_path_factory.getbasetemp() / "any_config.py"
    lines = [f"{key} = {value!r}" for key, value in assignments] if text is None else [text]
    source = "\n".join(lines).replace("nan", "float('nan')").replace("inf", "float('inf')")
    path.write_text(source, encoding="utf-8", errors="surrogatepass")
    try:
        s = configure([str(path)], *SETTINGS)
    except UserError as error:
        one_line(error)
        assert str(path) in str(error)
    else:
        assert all(type(getattr(s, key)) in (get_args(kind) or (kind,)) for key, kind in s.types.items())


WORDS = {
    "norm": NORMS,
    "norm_position": ("pre", "post", "sandwich", "deepnorm"),
    "activation": ACTIVATIONS,
    "position": ("rope", "learned"),
    "residual_mode": [mode.value for mode in ResidualMode],
    "residual_start": ("even", "own"),
}
KINDS = {
    int: st.one_of(st.integers(1, 4), st.integers(-1, 9), st.sampled_from([16, 2**31, 2**62, -(2**63)])),
    float: st.one_of(st.sampled_from([0.0, 0.1, 1e-30, 1e30]), st.floats(allow_nan=False)),
    bool: st.booleans(),
    NoneType: st.none(),
    tuple: st.one_of(st.just((8.0, 1.0, 4.0, 32.0)), st.lists(st.floats(allow_nan=False), max_size=5).map(tuple)),
}


def values_of(field):
    if field.name in WORDS:
        return st.sampled_from([*WORDS[field.name], "x"])
    return st.one_of(st.just(field.default), *(KINDS[kind] for kind in get_args(field.type) or (field.type,)))


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({}, optional={field.name: values_of(field) for field in fields(GPTConfig)}))
def test_any_model_settings(values):
    """A GPTConfig, or a ValueError of one line; where it is a small one, the model trains a step."""
    try:
        config = GPTConfig(**values)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    small = config.n_embd <= 32 and config.depth <= 16 and config.ffn_hidden <= 512 and config.block_size <= 128
    if small and config.vocab_size <= 512 and config.n_head <= 32:
        idx = torch.zeros(2, min(2, config.block_size), dtype=torch.long)
        _, loss = GPT(config)(idx, idx, return_logits=False)
        loss.backward()


@pytest.mark.parametrize(
    ("part", "cases"),
    [
        ("checkpoints", 60),
        ("datasets", 60),
        ("checkpoint_commands", 8),
        ("dataset_commands", 8),
        ("command_lines", 30),
    ],
)
def test_a_little_of_the_soak(part, cases, tmp_path):
    """Damaged files and random command lines: each works, or ends with one error line."""
    outcomes = set()
    for seed in range(cases):
        (tmp_path / str(seed)).mkdir()
        outcomes.add(soak.do_case(part, seed, tmp_path / str(seed)))
    assert "refused" in outcomes and outcomes <= {"refused", "accepted"}
