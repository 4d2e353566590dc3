"""Nothing lost, nothing let in: kills, signals, full disks, damaged and hostile files, bad input by the thousand."""

import json
import os
import pickle
import random
import shutil
import signal
import struct
import time
import zipfile
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
    run,
    snapshot,
    start,
    tiny,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import start_two

from configurator import UserError, configure
from model import GPT, GPTConfig
from sample import SampleConfig
from train import TrainConfig, load_checkpoint

LEARNED = {"residual_mode": "method3_2", "dropout": 0.1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    good("train.py", *tiny(folder, **LEARNED))
    return folder


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def steps_done(out_dir):
    path = out_dir / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


# kill -9


def test_random_kills(tmp_path):
    soak.kill_and_resume(tmp_path, kills=6, seed=1)


# Count the moments at which files change, and die at the n-th: before each new name, and in the middle of a file.
DIE = """
import io, os, signal, torch
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
save = torch.save
def save_in_two(content, file):
    whole = io.BytesIO()
    save(content, whole)
    whole = whole.getvalue()
    file.write(whole[: len(whole) // 2])
    file.flush()
    moment()
    file.write(whole[len(whole) // 2 :])
torch.save = save_in_two
"""


def test_a_kill_at_every_moment_of_writing(whole, tmp_path):
    number = 0
    while True:
        number += 1
        out_dir = tmp_path / str(number)
        process = run("train.py", *tiny(out_dir, **LEARNED), before=DIE.format(number=number))
        if process.status == 0:  # there is no n-th moment
            break
        assert process.status == -9, process.stderr
        good("train.py", *tiny(out_dir, **LEARNED))
        assert_same_run(whole, out_dir)
        assert {path.name for path in out_dir.iterdir()} == {path.name for path in whole.iterdir()}
    assert number > 25


def test_kills_while_going_back(whole, tmp_path):
    """The same for a run whose latest checkpoint is damaged, and which goes on from the one before."""
    good("train.py", *tiny(tmp_path / "base", stop_at=4, **LEARNED))
    (tmp_path / "base/ckpt.pt").write_bytes(b"damaged")
    number = 0
    while True:
        number += 1
        out_dir = tmp_path / str(number)
        shutil.copytree(tmp_path / "base", out_dir)
        back = tiny(out_dir, init_from="resume_prev", stop_at=3, checkpoint_every=1, **LEARNED)
        process = run("train.py", *back, before=DIE.format(number=number))
        again = run("train.py", *tiny(out_dir, **LEARNED))
        if again.status:  # killed before it went back
            check_error(again, "ckpt.pt is damaged", "--init_from=resume_prev")
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
    assert step < 400 and f"stopped after step {step} of 400; the same command goes on from there" in process.stdout
    assert load_checkpoint(tmp_path / "run/ckpt.pt")["step"] == step
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
    assert process.returncode != 0 and "the same command goes on from there" in stdout
    step = steps_done(tmp_path / "run")
    assert load_checkpoint(tmp_path / "run/ckpt.pt")["step"] == step < 3000

    both = start_two(*args)
    wait_until(lambda: steps_done(tmp_path / "run") > step + 3)
    for process in both:
        process.kill(signal.SIGINT)
    assert [process.wait().status for process in both] == [130, 130]
    assert load_checkpoint(tmp_path / "run/ckpt.pt")["step"] == steps_done(tmp_path / "run") < 3000


def test_a_worker_is_killed(tmp_path):
    """All end, soon and not with 0, and the run goes on with one process or two."""
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

    step = load_checkpoint(tmp_path / "run/ckpt.pt")["step"]
    assert step >= 5
    for process in start_two(*args, f"--stop_at={step + 2}"):
        assert process.wait().status == 0, process.stderr
    good("train.py", *args, f"--stop_at={step + 4}")
    good("train.py", *tiny(tmp_path / "whole", max_steps=3000, eval_every=10**4, micro_batch=2, stop_at=step + 4))
    for a, b in zip(metrics(tmp_path / "run"), metrics(tmp_path / "whole"), strict=True):
        assert a == pytest.approx(b, abs=1e-5)


# disks and damaged files


def test_a_full_disk(whole, tmp_path):
    """At whichever file it becomes full: one line, and the run goes on from the last whole checkpoint."""
    good("train.py", *tiny(tmp_path / "base", stop_at=2, **LEARNED))
    size = (tmp_path / "base/ckpt.pt").stat().st_size
    for limit in (1500, 5000, size // 3, size // 2, size - 1):  # metrics.jsonl, best.pt, ckpt.pt
        out_dir = tmp_path / str(limit)
        shutil.copytree(tmp_path / "base", out_dir)
        before = snapshot(out_dir)
        process = run("train.py", *tiny(out_dir, **LEARNED), limit=limit)
        check_error(process, "could not be read or written", "File too large", "make room", status=1)
        assert (out_dir / "ckpt.pt").read_bytes() == before[out_dir / "ckpt.pt"]
        assert not list(out_dir.glob("*.tmp"))
        good("train.py", *tiny(out_dir, **LEARNED))
        assert_same_run(whole, out_dir)


def test_damaged_checkpoints(whole, tmp_path):
    """Cut or with a flipped bit: recognised and named, or the flip is in a byte that carries nothing."""
    out_dir = tmp_path / "run"
    good("train.py", *tiny(out_dir, stop_at=4, **LEARNED))
    content = (out_dir / "ckpt.pt").read_bytes()
    chance = random.Random(1)
    for length in (
        0,
        1,
        100,
        len(content) // 2,
        len(content) - 1,
        *(chance.randrange(len(content)) for _ in range(30)),
    ):
        (tmp_path / "cut.pt").write_bytes(content[:length])
        with pytest.raises(UserError, match=r"cut\.pt is damaged"):
            load_checkpoint(tmp_path / "cut.pt")
    good_one = load_checkpoint(out_dir / "ckpt.pt")
    noticed = 0
    for _ in range(300):
        flipped = bytearray(content)
        at = chance.randrange(len(content))
        flipped[at] ^= 1 << chance.randrange(8)
        (tmp_path / "flipped.pt").write_bytes(flipped)
        try:
            loaded = load_checkpoint(tmp_path / "flipped.pt")
        except UserError as error:
            assert "flipped.pt is damaged or not a checkpoint" in str(error)
            noticed += 1
        else:
            assert same_checkpoint(loaded, good_one), at
    assert noticed > 150  # the others hit the padding between tensors, names' dates and the like

    before = snapshot(out_dir)
    (out_dir / "ckpt.pt").write_bytes(content[:-1])
    check_error(run("train.py", *tiny(out_dir, **LEARNED)), "ckpt.pt is damaged", "--init_from=resume_prev")
    assert snapshot(out_dir) | {out_dir / "ckpt.pt": content} == before
    stdout = good("train.py", *tiny(out_dir, init_from="resume_prev", stop_at=5, **LEARNED))
    assert "--init_from=resume goes on from there" in stdout
    good("train.py", *tiny(out_dir, **LEARNED))
    assert_same_run(whole, out_dir)


def same_checkpoint(a, b):
    tensors_a, tensors_b = (c["model"].state_dict() | dict(flat(c["optimizer"])) for c in (a, b))
    rest_a, rest_b = (
        {key: value for key, value in c.items() if key not in ("model", "optimizer", "settings")} for c in (a, b)
    )
    return (
        rest_a == rest_b
        and a["settings"].as_dict() == b["settings"].as_dict()
        and tensors_a.keys() == tensors_b.keys()
        and all(torch.equal(tensors_a[name], tensors_b[name]) for name in tensors_a)
    )


def flat(moments):
    return ((f"{name} {kind}", m) for name, both in moments.items() for kind, m in both.items())


def test_a_lost_checkpoint(whole, tmp_path):
    """Someone deletes ckpt.pt: the same command would start anew over what is left, so it does not."""
    good("train.py", *tiny(tmp_path, stop_at=4, **LEARNED))
    (tmp_path / "ckpt.pt").unlink()
    before = snapshot(tmp_path)
    check_error(run("train.py", *tiny(tmp_path, **LEARNED)), "lost its ckpt.pt", "--init_from=resume_prev")
    assert snapshot(tmp_path) == before
    good("train.py", *tiny(tmp_path, init_from="resume_prev", **LEARNED))
    assert_same_run(whole, tmp_path)


def test_damaged_metrics(tmp_path):
    good("train.py", *tiny(tmp_path, stop_at=4))
    path = tmp_path / "metrics.jsonl"
    text = path.read_text()
    for damaged in ("nonsense\n", "[]\n", '{"step": "x"}\n', "{}\n", "[" * 10**5 + "\n"):
        path.write_text(damaged + text)
        check_error(run("train.py", *tiny(tmp_path)), "metrics.jsonl holds a line that is not a metrics line")
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
    check_error(process, "error: step 6: loss", f"the last good checkpoint is {tmp_path}/ckpt.pt", status=1)
    assert "--init_from=resume goes on" in process.stderr
    # a checkpoint of the step before has the bad parameters already: then it is the one before that
    process = run("train.py", *args, "--checkpoint_every=1")
    check_error(process, "error: step 6: loss", f"the last good checkpoint is {tmp_path}/ckpt_prev.pt", status=1)
    assert (tmp_path / "ckpt_prev.pt").read_bytes() == before[tmp_path / "ckpt.pt"]
    good("train.py", *tiny(tmp_path, init_from="resume_prev"))

    check_error(run("train.py", *tiny(tmp_path / "new", learning_rate=1e30)), "no checkpoint before it", status=1)


@pytest.mark.parametrize("where", ["parameters", "evaluation"])
def test_bad_parameters_are_not_saved(where, tmp_path):
    """nan comes from the update itself, at a step that ends with a checkpoint, or with an evaluation and one."""
    good("train.py", *tiny(tmp_path, stop_at=2))
    before = snapshot(tmp_path)
    poison = "import torch; step = torch.optim.AdamW.step\ndef bad(self, *a, **k):\n    step(self, *a, **k)\n"
    poison += "    self.param_groups[0]['params'][0].data[0, 0] = float('nan')\ntorch.optim.AdamW.step = bad"
    every = {"checkpoint_every": 1, "eval_every": 1 if where == "evaluation" else 100}
    process = run("train.py", *tiny(tmp_path, **every), before=poison)
    check_error(process, "error: step 3: ", where[:5] if where == "parameters" else "validation loss nan", status=1)
    assert f"{tmp_path}/ckpt.pt" in process.stderr
    unchanged = {path: content for path, content in snapshot(tmp_path).items() if path.name != "metrics.jsonl"}
    assert unchanged == {path: content for path, content in before.items() if path.name != "metrics.jsonl"}


def test_a_poisoned_checkpoint(tmp_path):
    good("train.py", *tiny(tmp_path, stop_at=4))
    content = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    content["model"]["h.1.norm1.weight"][0] = float("nan")
    torch.save(content, tmp_path / "ckpt.pt")
    before = snapshot(tmp_path)
    process = run("train.py", *tiny(tmp_path))
    check_error(process, "step 5: loss nan", f"{tmp_path}/ckpt_prev.pt", "resume_prev", status=1)
    assert snapshot(tmp_path) == before


# hostile files


class Hostile:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def refused_checkpoint(path, *words):
    """By both programs, at once and without much memory."""
    shutil.copy(path, path.with_name("best.pt"))
    for process in (
        run("train.py", *tiny(path.parent), before=LITTLE_MEMORY),
        run("sample.py", *options(out_dir=path.parent, device="cpu"), before=LITTLE_MEMORY),
    ):
        check_error(process, "is damaged or not a checkpoint", *words)


LITTLE_MEMORY = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (3 * 10**9, 3 * 10**9))"


def test_hostile_checkpoints(tmp_path):
    """Nothing is called, nothing is allocated that the file does not hold."""
    good("train.py", *tiny(tmp_path / "run"))
    path = tmp_path / "run/ckpt.pt"
    content = torch.load(path, weights_only=True)
    proof = tmp_path / "executed"
    attack = content | {"code": Hostile(os.system, f"touch {proof}")}
    for zipped in (True, False):
        torch.save(attack, path, _use_new_zipfile_serialization=zipped)
        refused_checkpoint(path)
    path.write_bytes(pickle.dumps(attack))
    refused_checkpoint(path)
    assert not proof.exists()
    pickle.loads(path.read_bytes())
    assert proof.exists()  # so it would have been

    torch.save(content | {"code": Hostile(bytearray, 10**12)}, path)
    refused_checkpoint(path, "bytearray")
    torch.save(content | {"code": Hostile(torch.zeros, 10**12)}, path)
    refused_checkpoint(path)
    giant = torch.zeros(1).expand(10**8, 16)
    torch.save(content | {"model": content["model"] | {"wte.weight": giant}}, path)
    refused_checkpoint(path, "bigger than the file")
    torch.save(content | {"config": content["config"] | {"vocab_size": 10**8}}, path)
    refused_checkpoint(path, "should be (100000000, 16)")
    for key, value in (("n_layer", 10**9), ("n_layer", 10**30), ("n_embd", 2 * 10**18), ("vocab_size", 10**18)):
        torch.save(content | {"config": content["config"] | {key: value}}, path)
        refused_checkpoint(path)
    torch.save(content, path)
    with zipfile.ZipFile(path) as stored, zipfile.ZipFile(tmp_path / "bomb", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in stored.namelist():
            bomb.writestr(name, stored.read(name))
    (tmp_path / "bomb").rename(path)
    refused_checkpoint(path, "compressed")


def test_odd_checkpoints(tmp_path):
    """Everything in the file replaced by something else, one by one: refused, or it makes no difference."""
    good("train.py", *tiny(tmp_path / "run"))
    content = torch.load(tmp_path / "run/ckpt.pt", weights_only=True)
    path = tmp_path / "odd.pt"
    odd = (
        None,
        True,
        -1,
        10**30,
        0.5,
        float("nan"),
        "x",
        "",
        [],
        {},
        {"x": 1},
        {1: 2},
        torch.ones(2),
        {"a": {"b": {}}},
    )
    cases = [content | {key: value} for key in content for value in odd]
    cases += [{k: v for k, v in content.items() if k != key} for key in content]
    for part in ("settings", "config", "model", "optimizer"):
        for key in list(content[part])[:: 1 if part in ("settings", "config") else 10]:
            cases += [content | {part: content[part] | {key: random.Random(key).choice(odd)}}]
            cases += [content | {part: {k: v for k, v in content[part].items() if k != key}}] * (part != "settings")
        cases.append(content | {part: content[part] | {"more": 1}})
    cases += [content | {"model": {k: v.long() for k, v in content["model"].items()}}, list(content), "x", None]
    refused = 0
    for case in cases:
        torch.save(case, path)
        try:
            checkpoint = load_checkpoint(path)
        except UserError as error:
            refused += 1
            assert "odd.pt is damaged or not a checkpoint" in str(error)
        else:
            assert isinstance(checkpoint["model"], GPT)
    assert refused > len(cases) * 0.6
    # what load_checkpoint lets through, the programs must bear
    for key, value in (
        ("scaler", {"x": 1}),
        ("step", -5),
        ("data", {}),
        ("seconds", float("nan")),
        ("best_loss", -1.0),
    ):
        shutil.copytree(tmp_path / "run", tmp_path / key)
        torch.save(content | {key: value}, tmp_path / key / "ckpt.pt")
        for process in (
            run("train.py", *tiny(tmp_path / key, max_steps=8, dtype="float16")),
            run("sample.py", *options(out_dir=tmp_path / key, checkpoint="latest", max_new_tokens=3)),
        ):
            if process.status:
                check_error(process)


def test_a_hostile_tokenizer_name(tmp_path):
    """A name is looked up among three; it is never a path."""
    good("train.py", *tiny(tmp_path))
    content = torch.load(tmp_path / "best.pt", weights_only=True)
    for name in ("../../etc/passwd", "hf:/etc", "cl100k_base", "", 7, None, [], {}):
        torch.save(content | {"data": content["data"] | {"tokenizer": name}}, tmp_path / "best.pt")
        check_error(run("sample.py", *options(out_dir=tmp_path)), "unknown tokenizer")


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
        shutil.rmtree(tmp_path / "run")
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
            check_error(process, "shorter than one block")


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
KEY = st.one_of(
    st.sampled_from([f.name for cls in (TrainConfig, GPTConfig) for f in fields(cls)]), st.text(max_size=20)
)


def one_line(error):
    assert error.status == 2 and "\n" not in str(error) and 0 < len(str(error)) <= 1010


@settings(max_examples=2000, deadline=None)
@given(st.lists(st.one_of(st.tuples(KEY, TEXT).map(lambda kv: f"--{kv[0]}={kv[1]}"), TEXT), max_size=4))
def test_any_command_line(arguments):
    """Every key has a value of its type then, or there is a UserError."""
    if "-h" in arguments or "--help" in arguments:
        return
    try:
        s = configure(arguments, TrainConfig, GPTConfig)
    except UserError as error:
        return one_line(error)
    for key, kind in s.types.items():
        assert type(getattr(s, key)) in (get_args(kind) or (kind,))


@settings(max_examples=500, deadline=None)
@given(assignments=st.lists(st.tuples(KEY, VALUE), max_size=3), text=st.one_of(st.none(), st.text(max_size=40)))
def test_any_config_file(tmp_path_factory, assignments, text):
    path = tmp_path_factory.getbasetemp() / "any_config.py"
    lines = [f"{key} = {value!r}" for key, value in assignments] if text is None else [text]
    source = "\n".join(lines).replace("nan", "float('nan')").replace("inf", "float('inf')")
    path.write_text(source, encoding="utf-8", errors="surrogatepass")
    try:
        s = configure([str(path)], TrainConfig, GPTConfig)
    except UserError as error:
        one_line(error)
        assert str(path) in str(error)
    else:
        assert all(type(getattr(s, key)) in (get_args(kind) or (kind,)) for key, kind in s.types.items())


SIZE = st.one_of(st.integers(1, 4), st.integers(-1, 9), st.sampled_from([16, 2**31, 2**62, -(2**63)]))
MODEL = {}
for field in fields(GPTConfig):
    kinds = get_args(field.type) or (field.type,)
    MODEL[field.name] = st.one_of(
        *(
            {
                int: SIZE,
                float: st.one_of(st.sampled_from([0.0, 0.1, 1e-30, 1e30]), st.floats(allow_nan=False)),
                bool: st.booleans(),
                NoneType: st.none(),
                str: st.sampled_from(
                    "layernorm rmsnorm groupnorm batchnorm instancenorm pre post sandwich deepnorm relu relu2 swish "
                    "swiglu glu rope learned baseline method1 method2 method3_2 method4_2 x".split()
                ),
            }[kind]
            for kind in kinds
        ),
        st.just(field.default),
    )


@settings(max_examples=2000, deadline=None)
@given(st.fixed_dictionaries({}, optional=MODEL))
def test_any_model_settings(values):
    """A GPTConfig, or a ValueError of one line; where it is a small one, the model trains a step."""
    try:
        config = GPTConfig(**values)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    small = config.n_embd <= 32 and config.n_layer <= 4 and config.ffn_hidden <= 512 and config.block_size <= 128
    if small and config.vocab_size <= 512 and config.n_head <= 32:
        idx = torch.zeros(2, min(2, config.block_size), dtype=torch.long)
        _, loss = GPT(config)(idx, idx, return_logits=False)
        loss.backward()


def test_any_settings_through_the_command(tmp_path):
    """Some sixty at random, most of them nonsense, some of them a run: it works, or one error line and exit 2."""
    chance = random.Random(1)
    numbers = ["1", "2", "3", "4", "8", "16", "0", "-1", "2.5", "1e-3", "1e30", "1e308", str(2**62), "9" * 40, "x", ""]
    names = (
        "method1 method4_2 batchnorm groupnorm post deepnorm relu2 geglu learned bfloat16 float16 True False".split()
    )
    keys = [f for cls in (TrainConfig, GPTConfig) for f in fields(cls)]
    keys = [f for f in keys if f.name not in ("compile", "out_dir", "wandb_project", "sample_tokens")]
    worked = 0
    for number in range(60):
        args = []
        for field in chance.sample(keys, chance.choice((1, 1, 2, 3))):
            kinds = get_args(field.type) or (field.type,)
            values = names if str in kinds else ["True", "False", "yes"] if bool in kinds else numbers
            args.append(f"--{field.name}={chance.choice([*values, '😀' * 99, os.fsdecode(bytes([255]))])}")
        process = run("train.py", *tiny(tmp_path / str(number), max_steps=2), *args, "--stop_at=2")
        worked += process.status == 0
        if process.status == 1:  # settings that are right and make nan
            check_error(process, "stopped", status=1)
        elif process.status:
            check_error(process)
        assert "Traceback" not in process.stderr, args
    assert 5 < worked < 55


def test_any_prompt_options_through_the_command(whole):
    chance = random.Random(1)
    values = [
        "1",
        "2",
        "0",
        "-1",
        "0.5",
        "1e-9",
        "1e308",
        str(2**62),
        "x",
        "",
        "True",
        "😀" * 99,
        "FILE:",
        "cpu",
        "latest",
    ]
    keys = [f.name for f in fields(SampleConfig) if f.name not in ("out_dir", "max_new_tokens")]
    for _ in range(40):
        args = [f"--{key}={chance.choice([*values, os.fsdecode(bytes([255]))])}" for key in chance.sample(keys, 2)]
        process = run("sample.py", f"--out_dir={whole}", "--max_new_tokens=9", *args)
        if process.status:
            check_error(process)
