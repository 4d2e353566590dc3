"""The prepare scripts, run as commands on files made here, and what train.py and sample.py read of their results."""

import contextlib
import dataclasses
import hashlib
import importlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import data.dataset
from data.dataset import Windows, dataset_folder, load_meta, load_tokens, seed_for
from data.prepare import texts_of_rows, write_dataset
from data.tokenizer import HFTokenizer, load_tokenizer
from data.wikitext import articles
from lib.errors import UserError
from lib.files import open_whole, read_json, replace_with_link, write_json, write_whole

ROOT = Path(__file__).resolve().parents[1]
TRICKY = "naïve café 😀 — <|endoftext|> </s> \r\n\ttab\x00 \u2028 e\u0301\n"
ENVIRONMENT = {
    "https_proxy": "http://127.0.0.1:9",  # no network: nothing listens there
    "HF_HUB_OFFLINE": "1",  # and no retries
    "USE_TORCH": "0",  # `datasets` would import it, which takes seconds
}


def start(script, *args, **environment):
    return subprocess.Popen(
        [sys.executable, ROOT / "data" / script / "prepare.py", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT | environment,
        start_new_session=True,
    )


def run(script, *args, **environment):
    process = start(script, *args, **environment)
    process.stdout_text, process.stderr_text = process.communicate(timeout=60)
    return process


def prepare(script, *args):
    process = run(script, *args)
    assert process.returncode == 0, process.stderr_text
    return process.stdout_text


def check_error(process, *words):
    assert process.returncode == 2, process.stderr_text
    lines = process.stderr_text.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), process.stderr_text
    for word in words:
        assert word in lines[0]


def documents(folder, split):
    """The texts in a bin, after checking that meta.json counts them right."""
    meta = load_meta(folder)
    tokenizer = load_tokenizer(meta.tokenizer, folder)
    ids = load_tokens(folder, split)
    ends = np.flatnonzero(ids == meta.eot_id)
    assert ends[-1] == len(ids) - 1 and ids.max() < meta.vocab_size == tokenizer.vocab_size
    assert meta.eot_id == tokenizer.eot_id
    texts = [tokenizer.decode_bytes(part).decode() for part in np.split(ids, ends + 1)[:-1]]
    texts = [text.removesuffix(tokenizer.decode_bytes([meta.eot_id]).decode()) for text in texts]
    assert getattr(meta, f"{split}_tokens") == len(ids)
    assert getattr(meta, f"{split}_documents") == len(texts)
    assert getattr(meta, f"{split}_bytes") == len("".join(texts).encode())
    return texts


def assert_same_dataset(a, b):
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


def kill_when(process, condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "ended before it could be killed"
        time.sleep(0.001)
    process.kill()
    process.communicate()


def write_parquet(path, texts, row_group_size=7):
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts, "n": range(len(texts))}), path, row_group_size=row_group_size
    )


# --- Tokenizers -------------------------------------------------------------------------------------------------------


def save_tokenizer(tokenizer, folder, **config):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level(n_extra=0):
    """Bytes as tokens, and as many entries that no text uses."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(f"extra{i}" for i in range(n_extra))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def llama_like():
    """Llama's ways: a space is put before the text, other characters fall back to bytes, a template adds <s>."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
        "th",
        "▁th",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[("t", "h"), ("▁", "th")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.enable_truncation(5)
    return tokenizer


@pytest.fixture(params=["bytes", "byte_level", "llama_like"])
def tokenizer(request, tmp_path):
    if request.param == "bytes":
        return load_tokenizer("bytes", None)
    return HFTokenizer(save_tokenizer(globals()[request.param](), tmp_path / "tokenizer"))


def test_text_comes_back(tokenizer):
    texts = [TRICKY, " two  spaces", "a" * 10_000, "that thing"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert list(ids) == tokenizer.encode(text)
        assert tokenizer.decode_bytes(ids) == text.encode()
        assert tokenizer.eot_id not in ids  # not even for its name in the text


def test_streaming_shows_the_same_text(tokenizer):
    ids = tokenizer.encode(TRICKY)
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.feed(i) for i in ids]
    assert "".join(pieces) + decoder.finish() == TRICKY
    assert pieces.count("") >= 4 and "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    # after a prompt, only what follows; a document after end-of-text starts like the first
    prompt, rest = ids[:8], ids[8:]
    decoder = tokenizer.stream_decoder([*tokenizer.encode("that"), tokenizer.eot_id, *prompt])
    assert TRICKY.endswith("".join(decoder.feed(i) for i in rest) + decoder.finish())
    decoder = tokenizer.stream_decoder([tokenizer.eot_id])
    assert "".join(decoder.feed(i) for i in tokenizer.encode("that")) == "that"
    assert decoder.feed(tokenizer.eot_id) in ("<|endoftext|>", "</s>")


def test_streaming_ids_that_are_not_text(tokenizer):
    rng = random.Random(1)
    for _ in range(30):
        ids = [i for i in (rng.randrange(tokenizer.vocab_size) for _ in range(40)) if i != tokenizer.eot_id]
        decoder = tokenizer.stream_decoder()
        streamed = "".join(decoder.feed(i) for i in ids) + decoder.finish()
        if tokenizer.eot_id == 2:  # llama_like: one bad byte also makes the good ones before it unreadable, too late
            assert streamed.count("<s>") == ids.count(1)
        else:
            assert streamed == tokenizer.decode_bytes(ids).decode(errors="replace")


def test_hf_end_of_text(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<eos>", "<stop>"])
    assert HFTokenizer(save_tokenizer(tokenizer, tmp_path / "a")).eot_token == "<|endoftext|>"
    assert HFTokenizer(save_tokenizer(tokenizer, tmp_path / "b", eos_token=None)).eot_token == "<|endoftext|>"
    assert HFTokenizer(save_tokenizer(tokenizer, tmp_path / "c", eos_token="<stop>")).eot_id == 258
    assert HFTokenizer(save_tokenizer(tokenizer, tmp_path / "d", eos_token={"content": "<eos>"})).eot_id == 257
    with pytest.raises(UserError, match="no end-of-text token"):
        HFTokenizer(save_tokenizer(tokenizer, tmp_path / "e", eos_token="absent"))
    without = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(UserError, match="no end-of-text token"):
        HFTokenizer(save_tokenizer(without, tmp_path / "f"))


def test_hf_that_loses_text_is_refused(tmp_path):
    lossy = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UserError, match="does not give back"):
        HFTokenizer(save_tokenizer(lossy, tmp_path / "lossy")).encode_batch(["a b"])
    lossy.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(UserError, match="takes a text for its </s>"):  # an ordinary word here, not a special token
        HFTokenizer(save_tokenizer(lossy, tmp_path / "lossy")).encode_batch(["</s>"])
    decomposing = byte_level()
    decomposing.normalizer = normalizers.NFD()
    assert len(HFTokenizer(save_tokenizer(decomposing, tmp_path / "nfd")).encode_batch(["é"])[0]) == 3
    composing = byte_level()
    composing.normalizer = normalizers.NFC()
    assert HFTokenizer(save_tokenizer(composing, tmp_path / "nfc")).encode_batch(["e\u0301"]) == [
        composing.encode("é").ids
    ]


def without_unk():
    return Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="<unk>"))


def with_entry(key, value):
    return json.loads(byte_level().to_str()) | {key: value}


BAD_TOKENIZERS = {
    "unk_token missing": (without_unk().to_str(), ["WordLevel error", "fix it, or choose another tokenizer"]),
    # panics of the package's Rust code, at loading and at encoding
    "panic": (with_entry("normalizer", {"type": "Precompiled", "precompiled_charsmap": "////"}), ["PanicException"]),
    "panic 2": (with_entry("pre_tokenizer", {"type": "FixedLength", "length": 0}), ["PanicException"]),
    "an absurd id": (Tokenizer(models.WordLevel({"a": 2**25, "</s>": 0})).to_str(), ["ids of 16,777,216 and more"]),
    "not JSON": ("{", ["tokenizer.json"]),
    "deep": ("[" * 100_000, ["tokenizer.json"]),
    "another thing": ("[1]", ["tokenizer.json"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TOKENIZERS)
def test_bad_tokenizers(tmp_path, case):
    content, words = BAD_TOKENIZERS[case]
    (tmp_path / "tokenizer.json").write_text(content if isinstance(content, str) else json.dumps(content))
    (tmp_path / "a.txt").write_text("a b\n" * 20)
    args = ("text", tmp_path / "a.txt", "--tokenizer", f"hf:{tmp_path}", "--data-dir", tmp_path)
    check_error(run(*args, RUST_BACKTRACE="1"), str(tmp_path / "tokenizer.json"), *words)
    assert not (tmp_path / "text/meta.json").exists()


def test_huge_tokenizer(tmp_path):
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(2**26 + 1)
    (tmp_path / "a.txt").write_text("a\nb\n")
    args = ("text", tmp_path / "a.txt", "--tokenizer", f"hf:{tmp_path}", "--data-dir", tmp_path)
    check_error(run(*args), "tokenizer.json is too large")


def test_tokenizer_names():
    for name in ("", "gpt3", "hf:somewhere", "../bytes"):
        with pytest.raises(UserError, match="bytes, gpt2 or hf:FOLDER"):
            load_tokenizer(name, None)


# --- Files and meta.json ----------------------------------------------------------------------------------------------


def test_files_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"old")
    with pytest.raises(KeyboardInterrupt), open_whole(path) as file:
        file.write(b"half of the n")
        file.flush()
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    write_whole(path, b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["file"]


def test_links_are_replaced_and_never_written_through(tmp_path):
    (tmp_path / "outside").write_bytes(b"mine")
    for name in ("whole", "json", "link", f"whole.{os.getpid()}.tmp", f"link.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "outside")
    (tmp_path / "target").write_bytes(b"target")
    write_whole(tmp_path / "whole", b"new")
    write_json(tmp_path / "json", {"a": [1, None]})
    for _ in range(2):  # the second time it is the same file already
        replace_with_link(tmp_path / "link", tmp_path / "target")
    assert (tmp_path / "outside").read_bytes() == b"mine"
    assert (tmp_path / "whole").read_bytes() == b"new" and read_json(tmp_path / "json") == {"a": [1, None]}
    assert (tmp_path / "link").samefile(tmp_path / "target")
    assert sorted(os.listdir(tmp_path)) == ["json", "link", "outside", "target", "whole"]
    assert not any((tmp_path / name).is_symlink() for name in os.listdir(tmp_path))


def test_json_that_cannot_be_read(tmp_path):
    for content in (b"", b"{", b"[]", b"1", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(UserError, match="file is damaged"):
            read_json(tmp_path / "file")
    with pytest.raises(UserError, match="too large: more than 10 bytes"):
        (tmp_path / "file").write_text('{"a": "bcdefg"}')
        read_json(tmp_path / "file", most_bytes=10)
    with pytest.raises(UserError, match="No such file"):
        read_json(tmp_path / "absent")
    for path in ("/dev/zero", tmp_path):
        with pytest.raises(UserError, match="not a regular file"):
            read_json(path)


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "mine"
    write_dataset(folder, {"train": ["one\n", "", "two\n"], "val": ["three\n"]}, load_tokenizer("bytes", None), "test")
    return folder


def test_dataset(dataset):
    assert documents(dataset, "train") == ["one\n", "two\n"] and documents(dataset, "val") == ["three\n"]
    meta = load_meta(dataset)
    assert meta.source_sha256 == hashlib.sha256(b"one\ntwo\nthree\n").hexdigest()
    assert (dataset / "val.bin").read_bytes() == b"t\0h\0r\0e\0e\0\n\0\0\1"  # little-endian uint16
    with pytest.raises(ValueError, match="read-only"):
        load_tokens(dataset, "val")[0] = 1


def test_writing_takes_away_only_datasets_files(dataset):
    for name in ("model.bin", "tokenizer.json", "notes.txt"):
        (dataset / name).write_text("the user's")
    (dataset / "train.bin.123.tmp").write_text("of a killed run")
    write_dataset(dataset, {"train": ["a"], "val": ["b"]}, load_tokenizer("bytes", None), "test")
    assert sorted(os.listdir(dataset)) == [
        "meta.json", "model.bin", "notes.txt", "tokenizer.json", "train.bin", "val.bin",
    ]  # fmt: skip


def test_missing_dataset_names_the_command(tmp_path):
    for folder, command in {
        ROOT / "data/no_such": "python data/text/prepare.py PATH... --out no_such",
        tmp_path / "pydocs": f"python data/pydocs/prepare.py --data-dir {tmp_path}",
        tmp_path / "text": f"python data/text/prepare.py PATH... --data-dir {tmp_path}",
    }.items():
        with pytest.raises(UserError) as error:
            load_meta(folder)
        assert str(error.value).endswith(f"run {command}")


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_bins_of_the_wrong_size(dataset, name):
    content = (dataset / name).read_bytes()
    for wrong in (content[:-1], content[:-2], content + b"\0\0", b""):
        (dataset / name).write_bytes(wrong)
        with pytest.raises(UserError, match=f"{name} is missing or does not have the size"):
            load_meta(dataset)
    (dataset / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        load_tokens(dataset, "train")


def test_hostile_meta(dataset):
    good = json.loads((dataset / "meta.json").read_text())
    values = [None, True, -1, 0, 1.5, 1e999, 10**30, 2**63, "", "x", "../../etc", [], {}, [[]], {"a": 1}, "9" * 5000]
    contents = [json.dumps(good | {key: value}).encode() for key in good for value in values]
    contents += [json.dumps({k: v for k, v in good.items() if k != key}).encode() for key in good]
    contents += [json.dumps(good | {"extra": 1}).encode(), b"", b"null", b"[]", b"1", b'"x"', b"\xff\xfe", b"NaN"]
    contents += [b"[" * 60_000, b'{"a":' * 12_000, b"9" * 60_000, b" " * 10_000_000]
    rng = random.Random(1)
    whole = json.dumps(good).encode()
    for _ in range(200):
        contents.append(rng.randbytes(rng.randrange(200)))
        at = rng.randrange(len(whole))
        contents += [whole[:at], whole[:at] + rng.randbytes(1) + whole[at + 1 :]]
    accepted = 0
    tracemalloc.start()
    for content in contents:
        (dataset / "meta.json").write_bytes(content)
        try:
            meta = load_meta(dataset)
        except UserError as error:
            assert "\n" not in str(error)
        else:  # only what allocates nothing and reads nothing may differ
            accepted += 1
            for field in ("dtype", "train_tokens", "val_tokens"):
                assert getattr(meta, field) == good[field]
            assert 0 <= meta.eot_id < meta.vocab_size <= 1 << 16
            assert all(type(getattr(meta, f.name)) is f.type for f in dataclasses.fields(meta))
    assert tracemalloc.get_traced_memory()[1] < 20_000_000  # ours are the contents above: 10 MB
    tracemalloc.stop()
    assert accepted < len(contents) / 4


def test_meta_with_an_absurd_vocabulary(dataset):
    meta = json.loads((dataset / "meta.json").read_text())
    meta |= {"dtype": "uint32", "train_tokens": 1, "val_tokens": 1}
    for name in ("train.bin", "val.bin"):
        (dataset / name).write_bytes(bytes(4))
    for vocab_size, fits in ((1 << 17, True), (1 << 40, False), (256, False)):
        (dataset / "meta.json").write_text(json.dumps(meta | {"vocab_size": vocab_size}))
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match="do not fit together"):
            load_meta(dataset)


# --- Batches ----------------------------------------------------------------------------------------------------------


def test_an_epoch_is_one_shuffled_pass():
    tokens = np.arange(1000, 1000 + 8 * 10 + 4, dtype=np.uint16)  # ten full windows and a tail of three targets
    windows = Windows(tokens, 8, 2000, seed=1)
    assert (windows.n_full, windows.n_all) == (10, 11)
    first, second = windows.shuffled(0, 10), windows.shuffled(10, 20)
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert windows.shuffled(8, 13) == [*first[8:], *second[:3]]  # on across the end of an epoch
    assert Windows(tokens, 8, 2000, seed=1).shuffled(13, 17) == second[3:7]  # no state
    assert Windows(tokens, 8, 2000, seed=2).shuffled(0, 10) != first
    x, y = windows.batch([0, 10], 3, torch.device("cpu"))
    assert x[0].tolist() == list(range(1000, 1008)) and y[0].tolist() == list(range(1001, 1009))
    assert y[1].tolist() == [1081, 1082, 1083, -1, -1, -1, -1, -1] and x[1, :4].tolist() == [1080, 1081, 1082, 1083]
    assert set(y[2].tolist()) == {-1} and set(x[2].tolist()) == {0}  # a row that no window fills


def test_seeds_stay_the_same():
    """A run that is resumed years later, with a newer version, sees the same batches."""
    assert seed_for(1, "data", 0) == 8704757914574990214
    assert seed_for(7, "dropout", 3, 1) == 6200976517968641275
    tokens = np.arange(81, dtype=np.uint16)
    assert Windows(tokens, 8, 81, seed=1).shuffled(0, 12) == [8, 4, 5, 3, 1, 9, 0, 2, 7, 6, 8, 0]


def test_ids_beyond_the_vocabulary_are_refused(dataset):
    tokens = load_tokens(dataset, "train")
    Windows(tokens, 4, 257, seed=1).batch([0], 1, torch.device("cpu"))
    with pytest.raises(UserError, match=r"train.bin holds token 256, but the vocabulary is 256"):
        Windows(tokens, 4, 256, seed=1).batch([0], 1, torch.device("cpu"))


def test_several_first_runs_prepare_the_corpus_once(tmp_path, monkeypatch):
    calls, folder = [], tmp_path / "pydocs"
    folder.mkdir()

    def prepare(folder, tokenizer):
        calls.append(folder)
        time.sleep(0.2)
        (folder / "meta.json").touch()

    monkeypatch.setattr(data.dataset, "DATA_DIR", tmp_path)
    monkeypatch.setattr("data.pydocs.prepare.prepare", prepare)
    alone = SimpleNamespace(chief=True, wait_for_all=lambda: None)
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(lambda _: dataset_folder("pydocs", alone), range(3))] == [folder] * 3
    assert calls == [folder]
    second = SimpleNamespace(chief=False, wait_for_all=lambda: calls.append("waited"))
    (folder / "meta.json").unlink()
    assert dataset_folder("pydocs", second) == folder and calls == [folder, "waited"]
    assert dataset_folder(f"{tmp_path}/else", alone) == tmp_path / "else"


# --- The command line -------------------------------------------------------------------------------------------------

SCRIPTS = sorted(path.parent.name for path in (ROOT / "data").glob("*/prepare.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script):
    """Two examples that the script itself understands, groups with titles, a word for every option."""
    text = prepare(script, "--help")
    assert text.startswith(f"usage: python data/{script}/prepare.py")
    examples = [line.split()[2:] for line in text.splitlines() if line.startswith("    python data/")]
    assert len(examples) == 2
    options = {line.split()[0] for line in text.splitlines() if line.startswith("  --") and len(line.split()) > 2}
    assert options >= {"--tokenizer", "--out", "--data-dir"} and "what to make:" in text
    assert {word for example in examples for word in example if word.startswith("--")} <= options
    assert "bytes, gpt2 or hf:FOLDER" in text


# --- data/pydocs ------------------------------------------------------------------------------------------------------


def test_pydocs(tmp_path):
    processes = [
        start("pydocs", "--data-dir", tmp_path / name, PYTHONHASHSEED=seed)
        for name, seed in [("one", "1"), ("two", "2")]
    ]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    one, two = tmp_path / "one/pydocs", tmp_path / "two/pydocs"
    assert_same_dataset(one, two)
    meta = load_meta(one)
    assert meta.train_bytes + meta.val_bytes > 2_000_000
    assert 0.03 < meta.val_bytes / meta.train_bytes < 0.2
    train, val = (documents(one, split) for split in ("train", "val"))
    assert len({*train, *val}) == len(train) + len(val)
    shared = {p for text in train for p in text.split("\n\n") if len(p) > 60}
    paragraphs = [p for text in val for p in text.split("\n\n") if len(p) > 60]
    assert sum(p in shared for p in paragraphs) < 0.01 * len(paragraphs)


def test_pydocs_takes_each_docstring_once_and_imports_nothing(monkeypatch):
    pydocs = importlib.import_module("data.pydocs.prepare")
    first = b'''"""First."""
class A:
    """A class."""
    if True:
        async def f(self, x=1):
            """  A function.

               More.
            """
raise SystemExit
'''
    second = b'def f(): "A class."\ndef g(y): "Lone \\ud800."'
    monkeypatch.setattr(pydocs, "topics", dict)
    monkeypatch.setattr(pydocs, "modules", lambda: [("a", first), ("b", second), ("c", b"not Python"), ("d", b"1")])
    assert pydocs.all_documents() == {
        "module a": "a\n\nFirst.\n\nclass A\n\nA class.\n\nA.f(self, x=1)\n\nA function.\n\nMore.\n",
        "module b": "g(y)\n\nLone ?.\n",
    }


# --- data/text --------------------------------------------------------------------------------------------------------


def test_text_single_file_is_cut_at_a_line(tmp_path):
    text = "".join(f"line {i}: {TRICKY}" for i in range(50))
    (tmp_path / "book.dat").write_bytes(text.encode())
    prepare("text", tmp_path / "book.dat", "--data-dir", tmp_path, "--val-fraction", "0.2")
    [train], [val] = (documents(tmp_path / "text", split) for split in ("train", "val"))
    assert train + val == text and train.endswith("\n")
    assert 0.15 < len(val) / len(text) < 0.25
    assert load_meta(tmp_path / "text").source_sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_text_folder(tmp_path):
    texts = {f"{i:02}.{suffix}": f"{i} {suffix} {TRICKY}" * 9 for i in range(10) for suffix in ("txt", "MD", "rst")}
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    for name, text in texts.items():
        (source / "deep" / name).write_bytes(text.encode())
    (source / ".git").mkdir()
    for name in (".git/x.txt", ".hidden.txt", "image.png"):
        (source / name).write_bytes(b"\xff not text")
    (source / "empty.txt").touch()
    (source / "link.txt").symlink_to(source / "deep/01.txt")
    for name in ("a", "b"):
        prepare("text", source, source / "deep/00.txt", "--data-dir", tmp_path, "--out", name)
    train, val = (documents(tmp_path / "a", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(texts.values())  # a file that is named or linked to comes once all the same
    assert 1 <= len(val) <= 3
    assert (tmp_path / "a/val.bin").read_bytes() == (tmp_path / "b/val.bin").read_bytes()


def test_text_big_vocabulary_takes_uint32(tmp_path):
    save_tokenizer(byte_level(n_extra=66_000), tmp_path / "tokenizer", eos_token="<|endoftext|>")
    (tmp_path / "a.txt").write_bytes(TRICKY.encode())
    (tmp_path / "b.txt").write_bytes(TRICKY.upper().encode())
    args = ("--tokenizer", f"hf:{tmp_path / 'tokenizer'}", "--val-fraction", "0.6", "--data-dir", tmp_path)
    prepare("text", tmp_path / "a.txt", tmp_path / "b.txt", *args)
    folder = tmp_path / "text"
    (tmp_path / "tokenizer/tokenizer.json").unlink()  # the dataset has its own
    meta = load_meta(folder)
    assert (meta.tokenizer, meta.dtype, meta.vocab_size) == ("hf", "uint32", 256 + 66_000 + 1)
    assert load_tokens(folder, "train").dtype == np.uint32
    assert documents(folder, "train") == [TRICKY.upper()] and documents(folder, "val") == [TRICKY]


def split_texts(folder, texts, *args):
    """What data/text makes of files with these texts: the shares of val, after checking that nothing is lost."""
    (folder / "source").mkdir()
    for name, text in texts.items():
        (folder / "source" / name).write_bytes(text.encode())
    prepare("text", folder / "source", "--data-dir", folder, *args)
    train, val = (documents(folder / "text", split) for split in ("train", "val"))
    pieces = train + val
    for text in texts.values():  # whole, or in two pieces
        start = next((piece for piece in train if text.startswith(piece)), "")
        end = next((piece for piece in val if text.endswith(piece)), "")
        assert text in pieces or (start + end == text and start.endswith("\n"))
    assert sum(map(len, pieces)) == sum(map(len, texts.values()))
    return train, val


def share(train, val):
    return len("".join(val).encode()) / len("".join(train + val).encode())


def lines(n, name="line"):
    return "".join(f"{name} {i}: {TRICKY}" for i in range(n))


def test_text_two_files(tmp_path):
    """Neither is near a tenth: the larger is cut."""
    train, val = split_texts(tmp_path, {"a.txt": lines(53, "a"), "b.txt": lines(47, "b")})
    assert len(train) == 2 and len(val) == 1 and 0.08 < share(train, val) < 0.12
    assert lines(53, "a").endswith(val[0])


def test_text_whole_files_where_they_come_near(tmp_path):
    texts = {f"{i}.txt": lines(20 + i, str(i)) for i in range(8)}  # each about an eighth: more than a tenth, but near
    train, val = split_texts(tmp_path, texts)
    assert val == [texts["0.txt"]] and sorted(train + val) == sorted(texts.values())


def test_text_small_files_and_a_large_one(tmp_path):
    """The small ones are too little, so the end of the large one joins them."""
    texts = {"large.txt": lines(200, "large"), "small.txt": lines(2, "small")}
    train, val = split_texts(tmp_path, texts, "--val-fraction", "0.2")
    assert len(train) == 1 and len(val) == 2 and texts["small.txt"] in val and 0.18 < share(train, val) < 0.22


@pytest.mark.parametrize("fraction", ["0.05", "0.5", "0.8", "0.99"])
def test_text_files_of_one_line(tmp_path, fraction):
    """They cannot be cut: both splits have some all the same."""
    texts = {"long.txt": "x" * 90, "short.txt": "y" * 10}
    train, val = split_texts(tmp_path, texts, "--val-fraction", fraction)
    assert sorted(train + val) == sorted(texts.values()) and train and val


def test_text_links(tmp_path):
    (tmp_path / "a.txt").write_text(lines(50))
    args = ("text", tmp_path, "--data-dir", tmp_path / "out")
    (tmp_path / "loop").symlink_to(tmp_path)  # a folder in itself is not walked
    (tmp_path / "other").symlink_to(tmp_path / "other")
    prepare(*args)
    for target, words in (("loop.txt", "Too many levels of symbolic links"), ("nowhere", "No such file")):
        (tmp_path / "loop.txt").unlink(missing_ok=True)
        (tmp_path / "loop.txt").symlink_to(tmp_path / target)
        check_error(run(*args), f"cannot read {tmp_path}/loop.txt", words)
    check_error(run("text", tmp_path / "loop.txt", "--data-dir", tmp_path / "out"), "loop.txt")
    load_meta(tmp_path / "out/text")


def write_sources(folder):
    """{script: arguments} of two preparations; that of text takes long enough to be killed within it."""
    for name in ("text", "web"):
        (folder / name).mkdir()
    for i in range(16):
        (folder / "text" / f"{i}.txt").write_text(f"{i}\n" * 400_000)
    for i in range(2):
        write_parquet(folder / "web" / f"{i}.parquet", [f"page {j} {TRICKY}" for j in range(i, 1500, 2)])
    web = ("--from", folder / "web", "--tokenizer", "bytes", "--val-documents", "100", "--shard-tokens", "5000")
    return {"text": (folder / "text",), "fineweb_edu": (*web, "--workers", "1")}


def kill_preparation(folder, kills, seed):
    """
    Kill prepare scripts with SIGKILL at random moments: each time the folder holds the whole dataset or none, and in
    the end it is made as if nobody had interrupted. Returns what each kill left: "whole" or "none".
    """
    chance = random.Random(seed)
    commands, seconds, left = write_sources(folder), {}, []
    for script, args in commands.items():
        started = time.monotonic()
        prepare(script, *args, "--data-dir", folder / "whole")
        seconds[script] = time.monotonic() - started
    for _ in range(kills):
        script = chance.choice(list(commands))
        process = start(script, *commands[script], "--data-dir", folder / "killed")
        time.sleep(chance.uniform(0, seconds[script]))
        process.kill()
        process.communicate()
        made = folder / "killed" / script
        try:
            load_meta(made)
        except UserError:
            left.append("none")
            continue
        left.append("whole")
        assert_same_dataset(made, folder / "whole" / script)
        shutil.rmtree(made)
    for script, args in commands.items():
        prepare(script, *args, "--data-dir", folder / "killed")
        whole, made = folder / "whole" / script, folder / "killed" / script
        assert_same_dataset(made, whole)
        assert sorted(os.listdir(made)) == sorted(os.listdir(whole))
    return left


def test_random_kills(tmp_path):
    assert len(kill_preparation(tmp_path, kills=2, seed=1)) == 2


def test_text_killed(tmp_path):
    """While one bin is written, over an old dataset, and between the two."""
    source = write_sources(tmp_path)["text"][0]
    args = ("text", source, "--data-dir", tmp_path, "--val-fraction", "0.9", "--out")
    (tmp_path / "small.txt").write_text("one\ntwo\n")
    prepare("text", tmp_path / "small.txt", "--data-dir", tmp_path, "--out", "old")
    load_meta(tmp_path / "old")

    kill_when(start(*args, "old"), lambda: list((tmp_path / "old").glob("train.bin.*.tmp")))
    kill_when(start(*args, "new"), lambda: (tmp_path / "new/train.bin").exists())
    for name in ("old", "new"):
        with pytest.raises(UserError, match="no prepared dataset"):
            load_meta(tmp_path / name)
    prepare(*args, "new")
    assert len(documents(tmp_path / "new", "train")) + len(documents(tmp_path / "new", "val")) == 16
    assert sorted(os.listdir(tmp_path / "new")) == ["meta.json", "train.bin", "val.bin"]


BAD_TEXT = {
    "nothing named": ([], ["PATH"]),
    "missing": (["missing.txt"], ["missing.txt", "neither a file nor a folder"]),
    "device": ([os.devnull], ["neither a file nor a folder"]),
    "empty file": (["empty.txt"], ["no text", "empty.txt"]),
    "empty folder": (["folder"], ["no text", ".txt, .md, .rst"]),
    "one line": (["line.txt"], ["line.txt", "only one line"]),
    "not UTF-8": (["latin1.txt", "line.txt"], ["latin1.txt", "not UTF-8"]),
    "option": (["line.txt", "--vall", "1"], ["--vall"]),
    "fraction": (["line.txt", "--val-fraction", "1"], ["--val-fraction"]),
    "path as name": (["line.txt", "--out", "../x"], ["--out", "'../x'"]),
    "dots": (["line.txt", "--out", ".."], ["--out", "'..'"]),
    "another script's name": (["line.txt", "--out", "pydocs"], ["data/pydocs/prepare.py"]),
    "tokenizer": (["line.txt", "--tokenizer", "word"], ["'word'", "bytes, gpt2 or hf:FOLDER"]),
    "hf without folder": (["line.txt", "--tokenizer", "hf"], ["hf:FOLDER"]),
    "hf without file": (["line.txt", "--tokenizer", "hf:folder"], ["no tokenizer.json in folder"]),
    "hf broken": (["line.txt", "--tokenizer", "hf:broken"], ["broken/tokenizer.json"]),
    "not a folder": (["lines.txt", "--data-dir", "line.txt"], ["cannot write to line.txt/text"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TEXT)
def test_text_mistakes(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("line.txt").write_text("a line\n")
    Path("lines.txt").write_text("two\nlines\n")
    Path("latin1.txt").write_bytes("é".encode("latin-1") * 100)
    Path("folder").mkdir()
    Path("broken").mkdir()
    Path("broken/tokenizer.json").write_text("{")
    args, words = BAD_TEXT[case]
    check_error(run("text", "--data-dir", "out", *args), *words)
    assert not Path("out/text/meta.json").exists()


def test_gpt2_vocabulary_that_cannot_be_had(tmp_path):
    (tmp_path / "a.txt").write_text("a\nb\n")
    args = ("text", tmp_path / "a.txt", "--tokenizer", "gpt2", "--data-dir", tmp_path)
    check_error(run(*args, TIKTOKEN_CACHE_DIR=str(tmp_path)), "TIKTOKEN_CACHE_DIR", "--tokenizer bytes")


# --- data/shakespeare -------------------------------------------------------------------------------------------------


def test_shakespeare(tmp_path):
    text = TRICKY * 100
    (tmp_path / "play.txt").write_bytes(text.encode())
    prepare("shakespeare", "--from", tmp_path / "play.txt", "--data-dir", tmp_path)
    [train], [val] = (documents(tmp_path / "shakespeare", split) for split in ("train", "val"))
    assert train + val == text and len(train) == int(0.9 * len(text))


def test_shakespeare_mistakes(tmp_path):
    check_error(run("shakespeare", "--data-dir", tmp_path), "cannot download", "--from")
    check_error(run("shakespeare", "--data-dir", tmp_path, "--from", tmp_path / "absent"), "absent")
    assert not (tmp_path / "shakespeare").exists()


def test_shakespeare_broken_download(tmp_path, monkeypatch):
    shakespeare = importlib.import_module("data.shakespeare.prepare")
    monkeypatch.setattr(
        shakespeare.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(b"First Citizen:\nBefore we")
    )
    with pytest.raises(UserError, match="incomplete or has changed"):
        shakespeare.download()


# --- data/wikitext103 and data/wikitext2 ------------------------------------------------------------------------------

WIKITEXT = [
    "", " = First article = \n", "", f" {TRICKY}", "", " = = A section = = \n", "", " = = = Deeper = = = \n", "",
    " so that x \n", " = y + z = \n", " is no title . \n", "", "", " = Second = article = \n", "", " More .\n",
]  # fmt: skip
WIKITEXT_ARTICLES = ["".join(WIKITEXT[:14]), "".join(WIKITEXT[14:])]


def test_articles():
    assert list(articles(WIKITEXT)) == WIKITEXT_ARTICLES
    raw = [line or " \n" for line in WIKITEXT]  # the original files' blank lines
    assert list(articles(raw)) == ["".join(raw[:14]), "".join(raw[14:])]
    assert list(articles([])) == [""]


def test_wikitext103_parquet(tmp_path):
    write_parquet(tmp_path / "train-00000-of-00002.parquet", WIKITEXT[:10])
    write_parquet(tmp_path / "train-00001-of-00002.parquet", WIKITEXT[10:])
    write_parquet(tmp_path / "validation-00000-of-00001.parquet", WIKITEXT[14:])
    write_parquet(tmp_path / "test-00000-of-00001.parquet", ["never read"])
    prepare("wikitext103", "--from", tmp_path, "--tokenizer", "bytes", "--data-dir", tmp_path)
    assert documents(tmp_path / "wikitext103", "train") == WIKITEXT_ARTICLES
    assert documents(tmp_path / "wikitext103", "val") == WIKITEXT_ARTICLES[1:]


@pytest.mark.parametrize("names", [("wiki.train.raw", "wiki.valid.raw"), ("train.txt", "validation.txt")])
def test_wikitext2_text(tmp_path, names):
    lines = "".join(line or " \n" for line in WIKITEXT)
    for name in names:
        (tmp_path / name).write_bytes(lines.encode())
    prepare("wikitext2", "--from", tmp_path, "--tokenizer", "bytes", "--data-dir", tmp_path)
    for split in ("train", "val"):
        texts = documents(tmp_path / "wikitext2", split)
        assert len(texts) == 2 and "".join(texts) == lines


def test_wikitext_mistakes(tmp_path):
    args = ("--tokenizer", "bytes", "--data-dir", tmp_path)
    check_error(run("wikitext2", *args, HF_HOME=str(tmp_path)), "cannot download Salesforce/wikitext", "--from DIR")
    check_error(run("wikitext103", "--from", tmp_path, *args), "train*.parquet", str(tmp_path))
    (tmp_path / "train.parquet").write_bytes(b"PAR1 broken")
    (tmp_path / "validation.txt").write_bytes(b"x")
    check_error(run("wikitext103", "--from", tmp_path, *args), "cannot read the files in")
    (tmp_path / "train.parquet").unlink()
    (tmp_path / "train.txt").write_bytes(b"a\n\xff")
    check_error(run("wikitext103", "--from", tmp_path, *args), "train.txt", "not UTF-8")
    for name in ("wikitext2", "wikitext103"):
        assert not (tmp_path / name / "meta.json").exists()


def test_rows_without_text():
    for row in ({"content": "x"}, {"text": None}, {"text": 1}):
        with pytest.raises(UserError, match="column 'text'"):
            list(texts_of_rows([row], "some/dataset", []))


# --- data/fineweb_edu -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def web_pages(tmp_path_factory):
    """A folder of parquet files, its texts, and the dataset that an undisturbed run makes of it."""
    folder = tmp_path_factory.mktemp("web")
    texts = [f"page {i} {TRICKY}" * (1 + i % 5) for i in range(3000)]
    texts[500] = ""
    for i in range(4):
        write_parquet(folder / f"00{i}.parquet", texts[750 * i : 750 * (i + 1)], row_group_size=200)
    prepare("fineweb_edu", *web_args(folder), "--data-dir", folder / "whole")
    return folder, [text for text in texts if text]


def web_args(folder):
    return ("--from", folder, "--tokenizer", "bytes", "--val-documents", "100", "--workers", "1")


def test_fineweb(web_pages):
    folder, texts = web_pages
    made = folder / "whole/fineweb_edu"
    assert documents(made, "val") == texts[:100] and documents(made, "train") == texts[100:]
    assert sorted(os.listdir(made)) == ["meta.json", "progress.json", "train.bin", "val.bin"]
    assert "is finished" in prepare("fineweb_edu", *web_args(folder), "--data-dir", folder / "whole")
    check_error(
        run("fineweb_edu", *web_args(folder), "--max-tokens", "10", "--data-dir", folder / "whole"), "other options"
    )
    load_meta(made)


def test_fineweb_killed_continues(web_pages, tmp_path):
    folder, _ = web_pages
    made = tmp_path / "fineweb_edu"
    args = ("fineweb_edu", *web_args(folder)[:-1], "2", "--shard-tokens", "5000", "--data-dir", tmp_path)
    process = start(*args)
    kill_when(process, lambda: (made / "shard_00010.bin").exists())
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):  # no worker outlives it
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.01)
        pytest.fail("workers are left")
    with pytest.raises(UserError):
        load_meta(made)
    output = prepare(*args)
    assert int(output.split("continuing after ")[1].split()[0].replace(",", "")) > 64 * 8
    assert_same_dataset(made, folder / "whole/fineweb_edu")
    assert sorted(os.listdir(made)) == ["meta.json", "progress.json", "train.bin", "val.bin"]


def test_fineweb_text_files_and_max_tokens(tmp_path):
    texts = [f"{i} {TRICKY}" for i in range(150)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i:03}.txt").write_bytes(text.encode())
    limit = sum(len(text.encode()) + 1 for text in texts[3:101])
    prepare(
        "fineweb_edu",
        "--from",
        tmp_path,
        "--tokenizer",
        "bytes",
        "--val-documents",
        3,
        "--max-tokens",
        limit,
        "--workers",
        1,
        "--data-dir",
        tmp_path,
    )
    assert documents(tmp_path / "fineweb_edu", "val") == texts[:3]
    assert documents(tmp_path / "fineweb_edu", "train") == texts[3:101]


def test_fineweb_mistakes(tmp_path):
    args = ("fineweb_edu", "--from", tmp_path, "--tokenizer", "bytes", "--workers", "1", "--data-dir", tmp_path)
    check_error(run(*args), "*.parquet or *.txt")
    (tmp_path / "a.txt").write_text("a")
    check_error(run(*args, "--workers", "0"), "--workers")
    check_error(run(*args), "smaller --val-documents")
    made = tmp_path / "fineweb_edu"
    (made / "progress.json").write_text("[")
    check_error(run(*args), "progress.json is damaged")


def test_fineweb_hostile_progress(web_pages, tmp_path):
    """Whatever is in progress.json, load_progress gives what it must be or a UserError."""
    fineweb = importlib.import_module("data.fineweb_edu.prepare")
    path = tmp_path / "progress.json"
    good = json.loads((web_pages[0] / "whole/fineweb_edu/progress.json").read_text())
    whole = json.dumps(good).encode()
    values = [None, True, -1, 1.5, 10**30, "x", [], {}, [1], [None], [{}], [{"split": "train"}], {"a": 1}]
    contents = [json.dumps(good | {key: value}).encode() for key in good if key != "options" for value in values]
    shard = good["shards"][0]
    contents += [json.dumps(good | {"shards": [shard | {key: v}]}).encode() for key in shard for v in values]
    rng = random.Random(1)
    for _ in range(200):
        at = rng.randrange(len(whole))
        contents += [whole[:at], whole[:at] + rng.randbytes(1) + whole[at + 1 :]]
    accepted = 0
    for content in contents:
        path.write_bytes(content)
        try:
            progress = fineweb.load_progress(tmp_path, good["options"])
        except UserError as error:
            assert str(path.parent) in str(error) and ("run again" in str(error) or "other options" in str(error))
        else:
            accepted += 1
            assert all(progress.total("tokens", split) >= 0 for split in ("train", "val"))
            assert {shard.split for shard in progress.shards} <= {"train", "val"}
    assert 0 < accepted < len(contents) / 2
