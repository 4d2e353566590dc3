"""The prepare scripts, run as commands on files made here, and what train.py and sample.py read of their results."""

import contextlib
import dataclasses
import hashlib
import importlib
import io
import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from configurator import UserError
from data.common import (
    HFTokenizer,
    load_meta,
    load_tokenizer,
    load_tokens,
    open_atomically,
    stream_texts,
    write_dataset,
    write_file_atomically,
)
from data.wikitext import articles

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


def test_tokenizer_names():
    for name in ("", "gpt3", "hf:somewhere", "../bytes"):
        with pytest.raises(UserError, match="bytes, gpt2 or hf:FOLDER"):
            load_tokenizer(name, None)


# --- Files and meta.json ----------------------------------------------------------------------------------------------


def test_files_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    write_file_atomically(path, b"old")
    with pytest.raises(KeyboardInterrupt), open_atomically(path) as file:
        file.write(b"half of the n")
        file.flush()
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    write_file_atomically(path, b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["file"]


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


# --- data/pydocs ------------------------------------------------------------------------------------------------------


def test_pydocs(tmp_path):
    processes = [
        start("pydocs", "--data-dir", tmp_path / name, PYTHONHASHSEED=seed)
        for name, seed in [("one", "1"), ("two", "2")]
    ]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    one, two = tmp_path / "one/pydocs", tmp_path / "two/pydocs"
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
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
    prepare(
        "text",
        tmp_path / "a.txt",
        tmp_path / "b.txt",
        "--tokenizer",
        f"hf:{tmp_path / 'tokenizer'}",
        "--data-dir",
        tmp_path,
    )
    folder = tmp_path / "text"
    (tmp_path / "tokenizer/tokenizer.json").unlink()  # the dataset has its own
    meta = load_meta(folder)
    assert (meta.tokenizer, meta.dtype, meta.vocab_size) == ("hf", "uint32", 256 + 66_000 + 1)
    assert load_tokens(folder, "train").dtype == np.uint32
    assert sorted(documents(folder, "train") + documents(folder, "val")) == sorted([TRICKY, TRICKY.upper()])


def test_text_killed(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for i in range(16):
        (source / f"{i}.txt").write_text(f"{i}\n" * 400_000)
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
            list(stream_texts([row], "some/dataset", []))


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
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (made / name).read_bytes() == (folder / "whole/fineweb_edu" / name).read_bytes()
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
