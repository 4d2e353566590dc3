"""
Kills, damaged files and nonsense on the command line, by the hundred. tests/test_faults.py does a few of each.

    python tests/soak.py
    python tests/soak.py --share=0.1 --parts=train,compare
    python tests/soak.py --parts=checkpoints --seed=812 --cases=1

Every case has a seed of its own, which a failure names: the third line is how it is repeated.
"""

import contextlib
import faulthandler
import functools
import json
import os
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import get_args

import torch
from helpers import (
    TINY,
    assert_same_run,
    check_error,
    command,
    dataset,
    good,
    options,
    run,
    server,
    snapshot,
    start,
    start_two,
    tiny,
)
from tqdm import tqdm

from configurator import configure
from data.dataset import Windows, load_meta, load_tokens
from data.prepare import write_dataset
from data.tokenizer import load_tokenizer
from lib.checkpoint import load_checkpoint
from lib.errors import UserError, refuse, run_main
from sample import SampleConfig
from tools.compare.__main__ import CompareConfig
from tools.report import ReportConfig
from train import SETTINGS

# For one damaged file, beside what the process holds already: at its limit a thread waits for its start for ever. The
# seconds are of work, since other processes may keep the machine busy.
MEMORY, SECONDS = 2 * 10**9, 10
PATIENCE = 300  # seconds on the clock: after that it waits for ever
LIMITS = f"""
import re, resource, sys
held = re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1] if sys.platform == "linux" else 0
memory = int(held) * 1024 + {MEMORY}
resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
used = resource.getrusage(resource.RUSAGE_SELF)
seconds = int(used.ru_utime + used.ru_stime) + {SECONDS}
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
"""


@dataclass
class SoakConfig:
    share: float = 1.0  # of the cases of each part
    parts: str = "all"  # some of PARTS, with commas
    seed: int = 1  # of the first case of each part; the others follow
    cases: int | None = None  # so many of each part, whatever the share


tqdm.monitor_interval = 0  # no thread of its own: `limited` forks this process


def new_folder():
    return Path(tempfile.mkdtemp(dir=server().folder))


# --- kills ------------------------------------------------------------------------------------------------------------

KILLED = {"residual_mode": "method3_2", "dropout": 0.1, "max_steps": 100, "eval_every": 7, "checkpoint_every": 3}


def start_training(out_dir, processes):
    settings = tiny(out_dir, micro_batch=4 // processes, **KILLED)
    return [start("train.py", *settings)] if processes == 1 else start_two(*settings)


def finish_training(out_dir, processes):
    for process in start_training(out_dir, processes):
        assert process.wait().status == 0, process.stderr
    return out_dir


@functools.cache
def whole_run(processes):
    """The run that nobody interrupts."""
    return finish_training(new_folder() / "run", processes)


def kill_training(folder, chance, processes=1, kills=1):
    """Kill a run so many times, let the same command end it, and compare it with the one that nobody interrupted."""
    whole, out_dir, step = whole_run(processes), folder / "run", 0
    for _ in range(kills):
        last = step + chance.randint(0, 12)  # of the steps before the kill
        started = start_training(out_dir, processes)
        while started[0].poll() is None and whole_steps(out_dir) < last:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.1))
        chance.shuffle(started)
        for process in started:
            process.kill()
        statuses = [process.wait().status for process in started]
        assert -9 in statuses and 0 not in statuses, statuses
        step = whole_steps(out_dir)
    finish_training(out_dir, processes)
    assert_same_run(whole, out_dir)
    left, expected = ({path.name for path in place.iterdir()} for place in (out_dir, whole))
    assert left == expected, left ^ expected
    return "killed"


def whole_steps(out_dir):
    """The last step in metrics.jsonl, after checking that no line is missing, doubled or torn; the last may be."""
    path = out_dir / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    steps = [line["step"] for line in map(json.loads, whole) if "loss" in line]
    assert steps == list(range(1, len(steps) + 1)), steps
    return len(steps)


@functools.cache
def whole_preparation():
    """A corpus, its dataset, and the seconds that it takes."""
    folder = new_folder()
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(1, 9))) for _ in range(999)]
    (folder / "corpus.txt").write_text("\n".join(" ".join(chance.choices(words, k=12)) for _ in range(60_000)))
    started = time.monotonic()
    assert prepare(folder, folder).wait() == 0
    return folder, time.monotonic() - started


def prepare(corpus, folder):
    return command("data/text/prepare.py", corpus / "corpus.txt", "--data-dir", folder, "--out", "made")


def kill_preparation(folder, chance):
    """What a killed preparation leaves is whole or refused, and the same command makes it whole."""
    corpus, seconds = whole_preparation()
    whole = {path.name: content for path, content in snapshot(corpus / "made").items()}
    process = prepare(corpus, folder)
    time.sleep(seconds * chance.uniform(0.2, 1))
    process.kill()
    outcome = "ended before the kill" if process.wait() == 0 else "killed"
    try:
        load_meta(folder / "made")
    except UserError:
        assert outcome == "killed"
        again = prepare(corpus, folder)
        _, stderr = again.communicate(timeout=60)
        assert again.returncode == 0, stderr
    assert {path.name: content for path, content in snapshot(folder / "made").items()} == whole
    return outcome


COMPARED = {key: value for key, value in TINY.items() if key != "sample_tokens"}  # which it sets itself
COMPARED |= {
    "n_layer": 2,
    "max_steps": 40,
    "eval_every": 20,
    "modes": "baseline,method3_2",
    "seeds": "1",
    "name": "soak",
}
NO_PICTURES = "import tools.compare.results; tools.compare.results.plot_all = lambda *_: None"


def compare_options(folder):
    return options(**COMPARED, dataset=dataset(), out_dir=folder / "out", results_dir=folder / "results")


def start_comparison(folder, jobs=1):
    return start("tools.compare.__main__", *compare_options(folder), f"--jobs={jobs}", before=NO_PICTURES)


def read_records(folder):
    """Of each run what does not depend on the clock."""
    records = {path.name: json.loads(path.read_text()) for path in (folder / "results/runs").iterdir()}
    return {
        name: [record[key] for key in ("loss", "best_loss", "accuracy", "weights", "depth_mixing", "parameters")]
        for name, record in records.items()
    }


@functools.cache
def whole_comparison():
    """The records of a comparison, and the seconds that it takes."""
    folder, started = new_folder(), time.monotonic()
    process = start_comparison(folder).wait()
    assert process.status == 0, process.stderr
    return read_records(folder), time.monotonic() - started


def kill_comparison(folder, chance):
    """The same command again makes what is missing, and the same records."""
    whole, seconds = whole_comparison()
    process = start_comparison(folder, jobs=chance.choice((1, 2)))
    time.sleep(seconds * chance.uniform(0.1, 0.6))  # two jobs end sooner
    process.kill()
    outcome = "killed" if process.wait().status == -9 else "ended before the kill"
    again = start_comparison(folder).wait()
    assert again.status == 0, again.stderr
    assert read_records(folder) == whole
    return outcome


# --- damaged files ----------------------------------------------------------------------------------------------------

ODD = [None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**30, 10**400, 0.5, -1.5, 1e308, float("nan"), float("inf")]
ODD += ["", "x", "1", "bytes", "/etc/passwd", "\0", "😀" * 99, [], [1], [[]], {}, {"x": 1}, {"": {"": {}}}]
ODD_TEXT = [
    "NaN",
    "-Infinity",
    "1e999",
    "-0",
    "9" * 400,
    "9" * 5000,
    "null",
    '"\\ud800"',
    "[" * 5000,
    '{"a":' * 3000,
    "",
]


def mutate_bytes(chance, content):
    """Cut, flipped, overwritten, removed, doubled, longer, or other bytes altogether."""
    content = bytearray(content)
    at, length = chance.randrange(len(content)), chance.choice((1, 8, 100, 4096))
    kind = chance.randrange(7)
    if kind == 0:
        del content[at:]
    elif kind == 1:
        content[at] ^= 1 << chance.randrange(8)
    elif kind == 2:
        content[at : at + length] = chance.randbytes(length)
    elif kind == 3:
        del content[at : at + length]
    elif kind == 4:
        content[at:at] = content[at : at + length]
    elif kind == 5:
        content += chance.randbytes(length)
    else:
        content = chance.randbytes(length)
    return bytes(content)


def mutate_json(chance, value):
    """A copy with something else in one place, or one thing less or more."""
    value = json.loads(json.dumps(value))
    places, waiting = [], [value]
    while waiting:
        inside = waiting.pop()
        keys = inside.keys() if isinstance(inside, dict) else range(len(inside))
        places += [(inside, key) for key in keys]
        waiting += [inside[key] for key in keys if isinstance(inside[key], (dict, list))]
    inside, key = chance.choice(places)
    kind = chance.randrange(4)
    if kind == 0:
        del inside[key]
    elif kind == 1 and isinstance(inside, dict):
        inside["more"] = inside[key]
    elif isinstance(inside[key], (int, float)) and chance.random() < 0.5:
        inside[key] *= chance.choice((-1, 2, 10**6, 10**18))
    else:
        inside[key] = chance.choice(ODD)
    return value


def mutate_text(chance, value):
    """JSON text in which a number or a word is something else."""
    text = json.dumps(value)
    found = chance.choice(list(re.finditer(r'"[^"\\]*"|[0-9.]+|[a-z]+', text)))
    return text[: found.start()] + chance.choice(ODD_TEXT) + text[found.end() :]


def read_parts(path):
    """Header, run and data of a checkpoint."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    return header, json.loads(header["__metadata__"]["run"]), content[8 + length :]


def join_parts(header, run, data, length=None):
    """A checkpoint whose checksum is right. header and run: JSON text, or what becomes it."""
    run = run if isinstance(run, str) else json.dumps(run)
    if not isinstance(header, str):
        if isinstance(header.get("__metadata__"), dict):
            crc = zlib.crc32(data, zlib.crc32(run.encode(errors="replace")))
            header = header | {"__metadata__": header["__metadata__"] | {"run": run, "crc32": str(crc)}}
        header = json.dumps(header)
    header = header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def mutate_checkpoint(chance, path):
    """The content of a damaged checkpoint, and whether it can only be read as the same checkpoint."""
    kind = chance.randrange(6)
    if kind < 2:
        return mutate_bytes(chance, path.read_bytes()), True
    header, run, data = read_parts(path)
    if kind == 2:
        return join_parts(mutate_json(chance, header), run, data), False
    if kind == 3:
        return join_parts(mutate_text(chance, header), run, data), False
    return join_parts(header, mutate_json(chance, run) if kind == 4 else mutate_text(chance, run), data), False


LEARNED = {"residual_mode": "method3_2", "tie_weights": True}
COUNTERS = {"norm": "batchnorm", "dtype": "float16"}


@functools.cache
def good_runs():
    """Two finished runs: a tied head and learned weights; batchnorm's counters and float16's scaler."""
    folder = new_folder()
    good("train.py", *tiny(folder / "learned", **LEARNED))
    good("train.py", *tiny(folder / "counters", **COUNTERS))
    return folder / "learned", folder / "counters"


def same_checkpoint(a, b):
    def tensors(c):
        moments = {f"{name} {kind}": m for name, both in c.optimizer.items() for kind, m in both.items()}
        return c.model.state_dict() | moments

    def rest(c):
        return {f.name: getattr(c, f.name) for f in fields(c) if f.name not in ("model", "optimizer", "config")}

    ours, theirs = tensors(a), tensors(b)
    equal = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    return equal and rest(a) == rest(b) and asdict(a.config) == asdict(b.config)


def limited(function, *args):
    """Called in a process of its own, within the limits: "accepted", or "refused" in one line; else it is wrong."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            exec(LIMITS, {})
            faulthandler.register(signal.SIGALRM, chain=True)  # says where it waits
            signal.alarm(PATIENCE)
            function(*args)
            outcome = "accepted"
        except UserError as error:
            outcome = "refused" if "\n" not in str(error) else repr(error)
        except BaseException:
            outcome = traceback.format_exc()
        os.write(writer, outcome.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        outcome = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert outcome in ("accepted", "refused"), outcome or f"ended with {status}"
    return outcome


def damaged_checkpoint(folder, chance):
    original = chance.choice(good_runs()) / "ckpt.safetensors"
    content, must_be_same = mutate_checkpoint(chance, original)
    (folder / "ckpt.safetensors").write_bytes(content)

    def load():
        checkpoint = load_checkpoint(folder / "ckpt.safetensors")
        assert not must_be_same or same_checkpoint(checkpoint, load_checkpoint(original))
        checkpoint.model.eval()(torch.zeros(1, 1, dtype=torch.long))

    return limited(load)


def through_the_command(*args):
    """The command within the limits: it works, or there is one error line."""
    process = start(*args, before=LIMITS).wait(PATIENCE)
    if process.status:
        check_error(process, status=process.status)
        assert process.status in (1, 2), process.status
    return "refused" if process.status else "accepted"


def damaged_run(folder, chance):
    """train.py in one of three ways, or sample.py, on a run with a damaged checkpoint; a refusal leaves it as it is."""
    original = chance.choice(good_runs())
    shutil.copytree(original, folder / "run")
    content, _ = mutate_checkpoint(chance, original / "ckpt.safetensors")
    for name in ("ckpt.safetensors", "best.safetensors"):
        (folder / "run" / name).write_bytes(content)
    before = snapshot(folder / "run")
    script = chance.choice(("train.py", "train.py", "train.py", "sample.py"))
    if script == "sample.py":
        args = [folder / "run", *options(max_new_tokens=5, device="cpu", checkpoint=chance.choice(("best", "latest")))]
    elif chance.random() < 0.5:  # everything is said: it must be the same run
        args = tiny(folder / "run", max_steps=8, **(LEARNED if original.name == "learned" else COUNTERS))
    else:  # most of it comes from the checkpoint
        more = {"init_from": "resume", "max_steps": 8, "stop_at": 8, "sample_tokens": 0, "eval_only": "True"}
        if chance.random() < 0.7:
            del more["eval_only"]
        args = options(out_dir=folder / "run", **more)
    outcome = through_the_command(script, *args)
    if outcome == "refused":
        changed = {path.name for path, content in snapshot(folder / "run").items() if before.get(path) != content}
        assert not changed & {"ckpt.safetensors", "ckpt_prev.safetensors", "best.safetensors"}, changed
    return outcome


@functools.cache
def good_datasets():
    """One of bytes, and one with a tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    texts = [f"the cat sat on {word} mats, slowly and naïvely" for word in "one two three four five six".split()]
    tokenizer.train_from_iterator(texts, trainer)
    folder = new_folder()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with contextlib.redirect_stdout(None):
        write_dataset(folder, {"train": texts * 9, "val": texts}, load_tokenizer("hf", folder), source="a test")
    return dataset(), folder


def damage_dataset(folder, chance):
    shutil.copytree(chance.choice(good_datasets()), folder / "data")
    names = ["meta.json", "meta.json", "train.bin", "val.bin", "tokenizer.json", "tokenizer_config.json"]
    path = chance.choice([path for name in names if (path := folder / "data" / name).exists()])
    content = path.read_bytes()
    if path.suffix == ".json" and chance.random() < 0.7:
        mutate = chance.choice((mutate_text, lambda chance, value: json.dumps(mutate_json(chance, value))))
        path.write_text(mutate(chance, json.loads(content)))
    else:
        path.write_bytes(mutate_bytes(chance, content))
    return folder / "data"


def damaged_dataset(folder, chance):
    place = damage_dataset(folder, chance)

    def load():
        meta = load_meta(place)
        tokenizer = load_tokenizer(meta.tokenizer, place)
        tokenizer.decode_bytes(tokenizer.encode_batch(["one cat, naïvely\n"])[0])
        for split in ("train", "val"):
            windows = Windows(load_tokens(place, split), 8, meta.vocab_size, seed=1)
            windows.batch(range(windows.n_all), windows.n_all, torch.device("cpu"))

    return limited(load)


def training_on_damaged_data(folder, chance):
    return through_the_command("train.py", *tiny(folder / "run", dataset=damage_dataset(folder, chance), max_steps=2))


# --- command lines ----------------------------------------------------------------------------------------------------

NUMBERS = ["1", "2", "3", "4", "8", "16", "0", "-1", "2.5", "1e-3", "1e30", "1e308", str(2**62), "9" * 40, "x", ""]
WORDS = (
    "method1 method4_2 mudd hc batchnorm groupnorm post deepnorm relu2 geglu learned own bfloat16 float16 latest cpu"
)


def random_options(chance, classes, without, most):
    """Some keys, each with a value that may suit it."""
    keys = [field for cls in classes for field in fields(cls) if field.name not in without]
    args = []
    for field in chance.sample(keys, chance.choice((1, 1, most))):
        kinds = get_args(field.type) or (field.type,)
        values = WORDS.split() if str in kinds else ["True", "False", "yes"] if bool in kinds else NUMBERS
        args.append(f"--{field.name}={chance.choice([*values, '😀' * 99, os.fsdecode(bytes([255])), '1,2,3,4'])}")
    return args


def any_command_line(folder, chance):
    """A command with a few random settings, most of them nonsense: it works, or there is one error line."""
    script = chance.choice(["train.py"] * 6 + ["sample.py"] * 2 + ["tools.report", "tools.compare.__main__"])
    if script == "train.py":
        args = random_options(
            chance, SETTINGS, ("compile", "out_dir", "wandb_project", "sample_tokens", "stop_at"), most=3
        )
        args = [*tiny(folder / "run", max_steps=2), *args, "--stop_at=2"]
    elif script == "sample.py":
        args = random_options(chance, (SampleConfig,), ("out_dir", "max_new_tokens"), most=2)
        args = [good_runs()[0], "--max_new_tokens=9", *args]
    elif script == "tools.report":
        shutil.copytree(good_runs()[0], folder / "run")
        args = [folder / "run", *random_options(chance, (ReportConfig,), (), most=2)]
    else:
        args = random_options(
            chance, (CompareConfig, *SETTINGS), ("out_dir", "results_dir", "print", "measure"), most=2
        )
        args = [*compare_options(folder), *args, "--plan=True"]
    process = run(script, *args)
    if process.status == 1:  # settings that are right and make nan
        check_error(process, "stopped", status=1)
    elif process.status:
        check_error(process)
    return "refused" if process.status else "accepted"


# --- all of it --------------------------------------------------------------------------------------------------------

PARTS = {
    "train": (80, kill_training),
    "resume": (40, functools.partial(kill_training, kills=2)),
    "two": (30, functools.partial(kill_training, processes=2)),
    "prepare": (30, kill_preparation),
    "compare": (20, kill_comparison),
    "checkpoints": (1200, damaged_checkpoint),
    "datasets": (600, damaged_dataset),
    "checkpoint_commands": (130, damaged_run),
    "dataset_commands": (70, training_on_damaged_data),
    "command_lines": (300, any_command_line),
}


def do_case(name, seed, folder):
    return PARTS[name][1](folder, random.Random(f"{name} {seed}"))


def do_part(name, seeds):
    """Print what came of a part's cases; returns how many failed."""
    outcomes = Counter()
    for seed in seeds:
        folder = new_folder()
        try:
            outcomes[do_case(name, seed, folder)] += 1
        except Exception:
            outcomes["failed"] += 1
            print(f"FAILED: --parts={name} --seed={seed} --cases=1\n{traceback.format_exc()}", flush=True)
        shutil.rmtree(folder)
    print(
        f"{name:20} {sum(outcomes.values()):5}: {', '.join(f'{n} {word}' for word, n in outcomes.items())}", flush=True
    )
    return outcomes["failed"]


def main():
    s = configure(sys.argv[1:], SoakConfig)
    names = list(PARTS) if s.parts == "all" else s.parts.split(",")
    for name in names:
        refuse(name not in PARTS, f"parts '{name}' is not known: choose some of {', '.join(PARTS)}")
    passed = failed = 0
    for name in names:
        cases = s.cases or max(1, round(s.share * PARTS[name][0]))
        wrong = do_part(name, range(s.seed, s.seed + cases))
        passed, failed = passed + cases - wrong, failed + wrong
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    run_main(main)
