"""
The real commands for tests. Most run in a process of their own that is forked from a server which has imported
everything already: importing torch takes seconds, and the tests need hundreds of processes. What such a process does is
what the script does: its main() with this command line, until it exits or is killed.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # tiny models: waking a second thread costs more than it saves
    "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",  # no network, and no waiting for it
    "https_proxy": "http://127.0.0.1:9",
}
TINY = {
    "n_layer": 3,
    "n_head": 2,
    "n_embd": 16,
    "ffn_hidden": 32,
    "block_size": 8,
    "batch_tokens": 64,
    "micro_batch": 4,
    "max_steps": 6,
    "eval_every": 3,
    "checkpoint_every": 2,
    "sample_tokens": 0,
    "device": "cpu",
}
# what depends on the clock
TIMES = {"tokens_per_sec", "seconds", "memory", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}


class Process:
    """One started command."""

    def __init__(self, pid, folder):
        self.pid, self.folder, self.status = pid, folder, None

    @property
    def stdout(self):
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self):
        return (self.folder / "stderr").read_text()

    def kill(self, number=signal.SIGKILL):
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self):
        if self.status is None:
            self.status = ask({"poll": self.pid})
        return self.status

    def wait(self, timeout=120):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"no end after {timeout} s\n{self.stdout}\n{self.stderr}")
            time.sleep(0.005)
        return self


def options(**settings):
    return [f"--{key}={value}" for key, value in settings.items()]


def tiny(folder, **settings):
    """Options of a training that takes a fraction of a second."""
    return options(**TINY | {"dataset": dataset(), "out_dir": folder} | settings)


def start(script, *args, before="", limit=None, env=None, cwd=ROOT):
    """script: train.py, sample.py, or a module such as tools.report; before: Python code to run first; limit: largest
    file in bytes."""
    folder = Path(tempfile.mkdtemp(dir=server().folder))
    for name in ("stdout", "stderr"):  # there from the beginning, for those who read along
        (folder / name).touch()
    request = {"script": script, "args": [os.fsdecode(a) for a in map(os.fspath, args)], "folder": str(folder)}
    return Process(ask(request | {"before": before, "limit": limit, "env": env or {}, "cwd": str(cwd)}), folder)


def start_two(*args, **options):
    """train.py as two processes, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [start("train.py", *args, env=world | {"RANK": str(r), "LOCAL_RANK": str(r)}, **options) for r in range(2)]


def run(script, *args, **options):
    return start(script, *args, **options).wait()


def good(script, *args, **options):
    process = run(script, *args, **options)
    assert process.status == 0, process.stderr
    return process.stdout


def check_error(process, *words, status=2):
    """One line `error: …` with these words in it; nothing else than a progress bar before it."""
    assert process.status == status, (process.status, process.stdout, process.stderr)
    assert "Traceback" not in process.stderr, process.stderr
    lines = [line for line in process.stderr.replace("\r", "\n").split("\n") if line.strip() and "step/s" not in line]
    assert len(lines) == 1 and lines[0].startswith("error: "), process.stderr
    for word in words:
        assert str(word) in lines[0], lines[0]


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def command(*args, **options):
    """The same as a shell would start it; args[0] is a script, or torchrun's options and a script."""
    environment = os.environ | ENVIRONMENT
    return subprocess.Popen(
        [sys.executable, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
        **options,
    )


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def metrics(out_dir):
    """The lines of metrics.jsonl, without what depends on the clock and the perplexity, which is the loss once more."""
    lines = (Path(out_dir) / "metrics.jsonl").read_text().splitlines()
    left_out = TIMES | {"eval_perplexity"}
    return [{key: value for key, value in json.loads(line).items() if key not in left_out} for line in lines]


def evaluation(out_dir):
    """eval_results.json without times, and without the perplexity, which is the loss once more."""
    results = json.loads((Path(out_dir) / "eval_results.json").read_text())
    return {key: value for key, value in results.items() if key not in TIMES | {"eval_perplexity"}}


def steps_done(out_dir):
    """How many training steps metrics.jsonl holds, also while it is written."""
    path = Path(out_dir) / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def read_checkpoint(path):
    """(tensors by name, what the metadata says of the run), read by the library alone."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, json.loads(file.metadata()["run"])


def write_checkpoint(path, tensors, run):
    """The same back, with the right checksum; run may also be any text."""
    from lib.checkpoint import write_tensors

    write_tensors(path, tensors, run if isinstance(run, str) else json.dumps(run))


def parameters(out_dir, name="ckpt.safetensors"):
    tensors, _ = read_checkpoint(Path(out_dir) / name)
    return {key.removeprefix("model."): tensor for key, tensor in tensors.items() if key.startswith("model.")}


def assert_same_run(a, b):
    """Bit for bit: parameters, the optimizer's state, metrics and evaluation, at the end and at the best."""
    import torch

    assert metrics(a) == metrics(b)
    assert evaluation(a) == evaluation(b)
    for name in ("ckpt.safetensors", "best.safetensors"):
        (ours, our_run), (theirs, their_run) = (read_checkpoint(Path(folder) / name) for folder in (a, b))
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), key
        for key in ("step", "best_loss", "config", "data", "scaler"):
            assert our_run[key] == their_run[key], key


def snapshot(folder):
    """Every file's content: to show that nothing was overwritten. Taking the lock again changes nothing."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@functools.cache
def dataset():
    """A small dataset for all tests: 320 ids with the padding, a short last block, characters of several bytes."""
    from data.prepare import write_dataset
    from data.tokenizer import load_tokenizer

    words = "the cat sat on a mat — naïve café 😀 and then, slowly, it went home.\n".split(" ")
    texts = [" ".join(words[i * j % len(words)] for j in range(60)) for i in range(1, 31)]
    folder = server().folder / "dataset"
    with contextlib.redirect_stdout(None):
        write_dataset(folder, {"train": texts[3:], "val": texts[:3]}, load_tokenizer("bytes", None), source="a test")
    return folder


# the server


class Server:
    def __init__(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ENVIRONMENT,
        )


@functools.cache
def server():
    return Server()


def ask(request):
    process = server().process
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def serve():
    import torch

    import sample  # noqa: F401
    import train  # noqa: F401

    torch.set_num_threads(1)
    with torch.device("meta"):  # what torch imports only at the first use of these
        torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], fused=True).step()
        torch.amp.GradScaler("cpu", enabled=False)
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                os._exit(do(request))
        print(json.dumps(answer), flush=True)


def do(request):
    """Turn this fresh child into the process that was asked for. Returns its exit status."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["folder"] + "/stdout", os.O_WRONLY | os.O_CREAT),
        (2, request["folder"] + "/stderr", os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(name, flags, 0o666), number)
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = [request["script"], *request["args"]]
    if request["limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], request["limit"]))
    from lib.errors import run_main

    status = 0
    try:
        exec(request["before"], {})
        script = request["script"]
        main = importlib.import_module(script.removesuffix(".py")).main
        run_main(main, output_optional=script == "train.py")  # as the last line of each script
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    return status  # without Python's own end, which takes longer than the test


if __name__ == "__main__":
    serve()
