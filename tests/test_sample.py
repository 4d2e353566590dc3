"""sample.py from outside."""

import json
import shutil
import time

import helpers
import pytest
import torch
from helpers import check_error, command, good, options, read_checkpoint, run, snapshot, tiny, write_checkpoint
from test_data import byte_level, save_tokenizer

from data.prepare import write_dataset
from data.tokenizer import HFTokenizer, load_tokenizer
from lib.checkpoint import load_checkpoint
from model import GPT, GPTConfig

CYCLE = "naïve café 😀 — "


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that has learned one sentence by heart, so that its text is known; its dataset is gone."""
    folder = tmp_path_factory.mktemp("sample")
    texts = [CYCLE * 40] * 20
    write_dataset(folder / "data", {"train": texts, "val": texts[:1]}, load_tokenizer("bytes", None), source="a test")
    settings = {"dataset": folder / "data", "max_steps": 150, "learning_rate": 2e-2, "eval_every": 50, "n_embd": 32}
    settings |= {"residual_mode": "method3_2", "block_size": 16, "batch_tokens": 256}
    helpers.start("train.py", *tiny(folder / "run", **settings)).wait(timeout=300)
    shutil.rmtree(folder / "data")
    return folder / "run"


def sample(out_dir, **settings):
    return run("sample.py", out_dir, *options(device="cpu", **settings))


def text_of(process):
    assert process.status == 0, process.stderr
    return process.stdout


def test_text_is_shown_as_it_is_made(trained):
    """The real command: whole characters, one after the other, then the speed."""
    slow = "import time; from model import GPT; stream = GPT.stream\n"
    slow += "def slowly(*args, **options):\n    for ids in stream(*args, **options):\n"
    slow += "        time.sleep(0.05); yield ids\nGPT.stream = slowly"
    args = options(out_dir=trained, device="cpu", start="naïve c", max_new_tokens=40, temperature=0)
    process = helpers.start("sample.py", *args, before=slow)
    seen = set()
    while process.poll() is None:
        seen.add((process.folder / "stdout").read_bytes().decode())  # never a part of a character
        time.sleep(0.01)
    assert process.status == 0, process.stderr
    whole = process.stdout
    assert len(seen) > 15 and all(whole.startswith(part) for part in seen)
    assert whole.removesuffix("\n") == (CYCLE * 5)[: len(whole) - 1] and "😀 — naïve" in whole
    assert len(whole.removesuffix("\n").encode()) == len("naïve c".encode()) + 40

    process = command("sample.py", *args)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0 and stdout == whole
    assert stderr.startswith("40 tokens, ") and stderr.endswith(" tokens/s\n") and stderr.count("\n") == 1


def test_the_folder_stands_first_or_behind_out_dir(trained, tmp_path):
    args = options(device="cpu", max_new_tokens=6, temperature=0)
    text = good("sample.py", trained, *args)
    assert text == good("sample.py", f"--out_dir={trained}", *args) == good("sample.py", *args, trained)
    check_error(run("sample.py", trained, tmp_path), "one run at a time, not 2")
    for more in (f"--out_dir={trained}", "--init_from=gpt2"):
        check_error(run("sample.py", trained, more), "name the model once")
    check_error(run("sample.py", tmp_path / "typo"), "no best.safetensors of a run in", tmp_path / "typo")


def test_a_clock_that_stands_still(trained):
    stopped = "import time; time.time = time.perf_counter = lambda: 5.0"
    process = run("sample.py", trained, *options(device="cpu", max_new_tokens=3), before=stopped)
    assert process.status == 0 and "inf" not in process.stderr


def test_options(trained):
    text = text_of(
        sample(trained, num_samples=3, max_new_tokens=12, temperature=20.0, start="caf", top_k=None, stop=False)
    )
    samples = text.removesuffix("\n").split("\n---------------\n")
    assert len(samples) == 3 and len(set(samples)) > 1 and all(s.startswith("caf") for s in samples)
    greedy = text_of(sample(trained, max_new_tokens=12, temperature=0))
    for settings in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}):  # one token is left to sample from
        assert text_of(sample(trained, max_new_tokens=12, **{"temperature": 1.5} | settings)) == greedy
    free = {"temperature": 50.0, "top_k": None, "max_new_tokens": 40, "stop": False}
    assert text_of(sample(trained, seed=1, **free)) == text_of(sample(trained, seed=1, **free))
    assert text_of(sample(trained, seed=1, **free)) != text_of(sample(trained, seed=2, **free))


def test_the_end_of_a_document(trained):
    """A sample stops there unless told not to; the prompt may be the beginning of one."""
    free = {"temperature": 50.0, "top_k": None, "max_new_tokens": 3000, "num_samples": 2}
    ended = sample(trained, **free)
    assert "<|endoftext|>" not in text_of(ended) and int(ended.stderr.split()[0]) < 6000
    going_on = sample(trained, **free | {"max_new_tokens": 1500}, stop=False)
    assert "<|endoftext|>" in text_of(going_on) and going_on.stderr.startswith("3000 tokens, ")


def test_best_or_latest(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    tensors, about = read_checkpoint(tmp_path / "run/ckpt.safetensors")
    head = tensors["model.lm_head.weight"]
    head[ord("x")] = head[:256].abs().max() * 1e3 * head[ord("a")].sign()
    head[ord("x") + 1] = -head[ord("x")]
    write_checkpoint(tmp_path / "run/ckpt.safetensors", tensors, about)
    latest = text_of(sample(tmp_path / "run", checkpoint="latest", temperature=0, max_new_tokens=10, start="n"))
    assert set(latest[1:-1]) <= {"x", "y"}
    assert text_of(sample(tmp_path / "run", temperature=0, max_new_tokens=4, start="n")) == "naïv\n"
    (tmp_path / "run/best.safetensors").unlink()
    check_error(sample(tmp_path / "run"), "no best.safetensors", "--checkpoint=latest")
    (tmp_path / "run/ckpt.safetensors").unlink()
    check_error(sample(tmp_path / "run"), "no best.safetensors", "train one")


def test_prompts(trained, tmp_path):
    prompt = tmp_path / "prompt=1.txt"
    prompt.write_text("café 😀", encoding="utf-8")
    assert text_of(sample(trained, start=f"FILE:{prompt}", temperature=0, max_new_tokens=5)) == "café 😀 — \n"
    assert text_of(sample(trained, start="", temperature=0, max_new_tokens=6)) == "naïve\n"
    prompt.write_text("")
    assert text_of(sample(trained, start=f"FILE:{prompt}", temperature=0, max_new_tokens=6)) == "naïve\n"
    assert "=" in text_of(sample(trained, start="a=b=", max_new_tokens=1))

    long = sample(trained, start=CYCLE * 9 + "naïve caf", temperature=0, max_new_tokens=2)
    assert text_of(long) == CYCLE * 9 + "naïve café\n"
    n = len((CYCLE * 9 + "naïve caf").encode())
    assert f"the prompt has {n} tokens; the model sees the last 16" in long.stderr
    prompt.write_text("x" * 9_999_990 + "naïve c")
    enormous = sample(trained, start=f"FILE:{prompt}", temperature=0, max_new_tokens=4)
    assert text_of(enormous).endswith("xnaïve café\n") and "9,999,998 tokens" in enormous.stderr


def test_unreadable_prompts(trained, tmp_path):
    (tmp_path / "latin").write_bytes("café".encode("latin-1"))
    (tmp_path / "large").write_bytes(b"x" * 10_000_001)
    check_error(sample(trained, start=f"FILE:{tmp_path}/latin"), "UTF-8")
    check_error(sample(trained, start=f"FILE:{tmp_path}/large"), "large is longer than 10,000,000 bytes")
    check_error(sample(trained, start="FILE:/dev/zero"), "/dev/zero is longer")
    check_error(sample(trained, start=f"FILE:{tmp_path}/nowhere"), "nowhere cannot be read: No such file")
    check_error(sample(trained, start=f"FILE:{tmp_path}"), "cannot be read: Is a directory")
    check_error(sample(trained, start="FILE:"), "cannot be read")
    check_error(sample(trained, start="FILE:" + "x" * 5000), "cannot be read: File name too long")
    check_error(run("sample.py", *options(out_dir=trained), "--start=caf\udce9"), "UTF-8")


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"num_samples": 0}, "num_samples must be at least 1, not 0"),
        ({"num_samples": 10**15}, "num_samples must be at most"),
        ({"max_new_tokens": -5}, "max_new_tokens must be at least 1"),
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"temperature": 1e-300}, "temperature must be 0 or at least 1e-6"),
        ({"temperature": "nan"}, "temperature must be float, not nan"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must be more than 0 and at most 1"),
        ({"top_p": 1.5}, "top_p must be more than 0 and at most 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 2**64}, "seed must be less than 2^63"),
        ({"checkpoint": "last"}, "checkpoint must be best or latest, not 'last'"),
        ({"device": "abacus"}, "device abacus cannot be used"),
        ({"out_dir": "/nowhere"}, "no best.safetensors of a run in /nowhere"),
        ({"out_dir": "x" * 5000}, "no best.safetensors of a run"),
        ({"init_from": "/nowhere/hf"}, "/nowhere/hf"),
        ({"strat": "x"}, "unknown key 'strat': did you mean start?"),
    ],
)
def test_mistakes(settings, words, trained):
    before = snapshot(trained)
    check_error(run("sample.py", *options(**{"out_dir": trained, "device": "cpu"} | settings)), words)
    assert snapshot(trained) == before


def test_tokenizer_of_the_run(tmp_path):
    """A tokenizer.json travels with the run; the dataset may be gone. What it cannot encode is refused."""
    save_tokenizer(byte_level(), tmp_path / "tokenizer")
    tokenizer = HFTokenizer(tmp_path / "tokenizer")
    write_dataset(tmp_path / "data", {"train": [CYCLE * 40], "val": [CYCLE * 9]}, tokenizer, source="a test")
    good("train.py", *tiny(tmp_path / "run", dataset=tmp_path / "data", sample_tokens=5))
    with_data = text_of(sample(tmp_path / "run", start="café", max_new_tokens=20))
    shutil.rmtree(tmp_path / "data")
    shutil.rmtree(tmp_path / "tokenizer")
    assert text_of(sample(tmp_path / "run", start="café", max_new_tokens=20)) == with_data
    (tmp_path / "run/tokenizer.json").unlink()
    check_error(sample(tmp_path / "run"), "no tokenizer.json")


def test_a_prompt_that_the_tokenizer_cannot_encode(tmp_path):
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=64)).save_pretrained(tmp_path / "hf")
    words = Tokenizer(models.WordLevel({"the": 0, "<unk>": 1, "</s>": 2}, unk_token="<unk>"))
    save_tokenizer(words, tmp_path / "hf", eos_token="</s>")
    check_error(run("sample.py", *options(init_from=tmp_path / "hf", start="cat")), "'cat' comes back as '<unk>'")
    (tmp_path / "hf/tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    check_error(run("sample.py", *options(init_from=tmp_path / "hf")), "no end-of-text token")


@pytest.mark.parametrize("settings", [{}, {"norm": "layernorm", "position": "learned", "bias": True}])
def test_hugging_face_folder(settings, tmp_path):
    """The text is what the model itself generates; ids beyond the tokenizer are never sampled."""
    if settings:
        settings |= {"activation": "gelu_tanh", "tie_weights": True, "ffn_hidden": 64}
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=512, **settings)).eval()
    model.save_pretrained(tmp_path / "hf")
    save_tokenizer(byte_level(), tmp_path / "hf")
    tokenizer = load_tokenizer("hf", tmp_path / "hf")
    args = {"init_from": tmp_path / "hf", "max_new_tokens": 30, "temperature": 1.5, "stop": False, "device": "cpu"}
    process = run("sample.py", *options(**args, start="café", seed=3))
    prompt = torch.tensor([tokenizer.encode("café")])
    generator = torch.Generator().manual_seed(3)
    stream = model.stream(prompt, 30, 1.5, 200, generator=generator, real_vocab=tokenizer.vocab_size)
    ids = [*prompt[0].tolist(), *(i.item() for i in stream)]
    assert text_of(process) == tokenizer.decode_bytes(ids).decode(errors="replace") + "\n"
    (tmp_path / "hf/tokenizer.json").unlink()
    check_error(run("sample.py", *options(**args)), "no tokenizer.json, and its vocabulary is not GPT-2's")


def test_models_that_give_no_numbers(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    tensors, about = read_checkpoint(tmp_path / "run/best.safetensors")
    for name in ("model.norm_f.weight", "model.lm_head.weight"):
        tensors[name].fill_(3e38)
    write_checkpoint(tmp_path / "run/best.safetensors", tensors, about)
    check_error(sample(tmp_path / "run"), "nan or infinite logits: choose another checkpoint")


def test_the_terminal_cannot_show_it(trained):
    import os
    import subprocess
    import sys

    args = options(out_dir=trained, device="cpu", start="caf", max_new_tokens=3, temperature=0)
    env = os.environ | helpers.ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
    process = subprocess.run([sys.executable, "sample.py", *args], capture_output=True, env=env, cwd=helpers.ROOT)
    assert process.returncode == 0 and process.stdout == b"caf? \n"


def test_what_a_run_holds(trained):
    """The model, its settings and its data's description: all that sample.py needs."""
    checkpoint = load_checkpoint(trained / "best.safetensors")
    assert checkpoint.config.residual_mode == "method3_2" and checkpoint.optimizer == {}
    assert checkpoint.data["tokenizer"] == "bytes" and checkpoint.settings["n_embd"] == 32
