"""
A run's folder: its lock, checkpoints, metrics and reports, and the rule by which a command resumes what is in it.
"""

import contextlib
import errno
import fcntl
import functools
import json
import math
import os
import shlex
import socket
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import torch
from tqdm import tqdm

from configurator import Settings
from data.tokenizer import load_tokenizer
from lib.checkpoint import load_checkpoint, save_checkpoint
from lib.code import code_hash
from lib.errors import UserError, refuse, user_error_from_os
from lib.files import read_json, replace_with_link, write_json, write_whole
from lib.loggers import new_loggers
from lib.machine import is_out_of_memory, processor_name
from lib.mixing import depth_mixing
from lib.reports import residual_report, residual_text, row_name

LATEST, PREVIOUS, BEST = "ckpt.safetensors", "ckpt_prev.safetensors", "best.safetensors"
OLD_KIND = "ckpt.pt", "ckpt_prev.pt", "best.pt"  # of the first version: pickled, and no longer read
REPORTS = "eval_results.json", "residual_weights.json", "residual_weights.txt", "residual_weights.png"
REPORTS += "depth_mixing.json", "run.json", "harness.json", "harness.md"
MIXED_TOKENS = 2048  # of validation, for the depth-mixing matrix


def chief_only(method):
    """The other processes' calls return at once."""

    @functools.wraps(method)
    def call(self, *args):
        return method(self, *args) if self.machine.chief else None

    return call


class RunFolder:
    """What a run writes and says. All but the first of several processes are silent."""

    def __init__(self, path, machine):
        self.path, self.machine = Path(path), machine
        self.lock = self.metrics = None
        self.loggers = []
        self.kept = []  # lines of metrics.jsonl up to the checkpoint
        self.saved_step = self.evaluated_step = 0
        self.finished = False  # with everything that comes behind the last step
        self.command = shlex.join(["python", *sys.argv])  # that began the run
        self.info = None  # run.json's content, once the run is under way
        if os.path.lexists(self.path / "lock"):  # a new folder is made when all else has been checked
            self.claim()
        self.seen = self.times()

    @chief_only
    def claim(self):
        """Make the folder this run's own until the process ends."""
        if self.lock:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            number = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", error)
            if os.path.islink(self.path / "lock"):
                reason = "its lock is a symbolic link; remove that"
            raise UserError(f"{self.path} cannot be written to: {reason}") from None
        self.lock = os.fdopen(number)  # stays open: closing it would release the lock
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another run is writing to {self.path}: wait for it, or choose another --out_dir"
            ) from None

    def times(self):
        """When each checkpoint was written: to see whether somebody else did meanwhile."""
        names = LATEST, PREVIOUS, BEST
        return [os.path.getmtime(self.path / name) if self.has(name) else None for name in names]

    def has(self, name):
        return os.path.exists(self.path / name)

    # --- resuming

    def checkpoint_to_resume(self, s, fixed, recipe, free):
        """
        The checkpoint of this same run, or None for a new run. The arguments are dataclasses of settings. The same
        command resumes a run if `fixed` and `recipe` are as they were; `free` is as the command says. With
        --init_from=resume all that is not said is as it was, and what is said may not contradict `fixed`.
        """
        resuming = s.init_from in ("resume", "resume_prev")
        path = self.path / (PREVIOUS if s.init_from == "resume_prev" else LATEST)
        if s.overwrite and not resuming:
            return None
        old, anew = [name for name in OLD_KIND if self.has(name)], "choose another --out_dir, or --overwrite=True"
        too_old = f"{self.path} holds a run of an older version ({', '.join(old)}), which this one does not read"
        refuse(old and not self.has(LATEST), f"{too_old}: {anew}")
        if not resuming and not self.has(LATEST):
            lost = f"{self.path} has lost its {LATEST}: use --init_from=resume_prev, or --overwrite=True"
            refuse(self.has(PREVIOUS), lost)
            return None
        checkpoint = load_checkpoint(path)
        then = Settings(*fixed, *recipe, *free)
        for key, value in checkpoint.settings.items():
            if key in then.types or key not in s.types:  # the others are said anew in each call
                then.set(key, value, where=path)
        names = {field.name for cls in (fixed if resuming else fixed + recipe) for field in fields(cls)}
        if resuming:  # the config says what a None has meant
            names = {key for key in names & s.given if getattr(s, key) != getattr(checkpoint.config, key, None)}
            if "epochs" in s.given and "max_steps" not in s.given:
                s.set("max_steps", None, where=path)  # which would win
            for key in then.types.keys() - s.given:
                s.set(key, getattr(then, key), where=path)
        different = [key for key in s.types if key in names and getattr(s, key) != getattr(then, key)]
        values = ", ".join(f"{key} is {getattr(then, key)} there and {getattr(s, key)} here" for key in different)
        advice = "choose another --out_dir, or --init_from=resume without these, or --overwrite=True"
        refuse(different, f"{self.path} holds another run: {values}; {advice}")
        refuse(not checkpoint.optimizer, f"{path} holds a model alone, to sample from: it cannot be resumed")
        self.look_back(checkpoint)
        return checkpoint

    def look_back(self, checkpoint):
        """What the run had logged and whether it was finished when this checkpoint was written."""
        self.saved_step = checkpoint.step
        lines = [(line, values) for line, values in metrics_lines(self.path) if values["step"] <= checkpoint.step]
        self.kept = [line for line, _ in lines]
        evaluations = [values for _, values in lines if "eval_loss" in values]
        self.evaluated_step = evaluations[-1]["step"] if evaluations else 0
        checkpoint.best_loss = min([checkpoint.best_loss] + [values["eval_loss"] for values in evaluations])
        with contextlib.suppress(UserError):  # it is for those who watch, and is written anew
            earlier = read_json(self.path / "run.json")
            self.finished, self.command = earlier.get("state") == "finished", earlier.get("command", self.command)
        if checkpoint.code != code_hash():
            self.warn("the code has changed since this run's checkpoint")

    def is_work_left(self, s, step, plan, meta):
        """Says what is going to happen, or that nothing is."""
        data = f"data {s.dataset}: {meta.train_tokens:,} tokens to train on, {meta.val_tokens:,} to validate"
        self.say(f"{data}; {plan.steps} steps of {s.batch_tokens:,} tokens = {plan.epochs:.2f} epochs")
        if plan.micro_batch < s.micro_batch:
            each = plan.micro_batch * plan.accumulate
            why = f"the largest up to {s.micro_batch} that divides the {each} sequences of each process"
            self.say(f"micro_batch is {plan.micro_batch}, {why if plan.accumulate > 1 else 'all that there are'}")
        if step < plan.last_step or (step == plan.steps and not self.finished):
            return True
        end = "finished" if step >= plan.steps else f"at stop_at={s.stop_at}"
        self.say(f"this run is {end}, at step {step} of {plan.steps}. Next: python sample.py {self.path}")
        longer = f"--max_steps={2 * plan.steps} (the learning rate goes up again)"
        self.say(f"train longer: the same with {longer}; anew: the same with --overwrite=True")
        return False

    # --- what the run writes

    @chief_only
    def begin(self, s, t, data, steps):
        """All is checked: the folder is this run's, and nothing in it is left that is not."""
        self.claim()
        refuse(self.times() != self.seen, f"another run has just written to {self.path}: give the command again")
        stale = ["*.[0-9]*.tmp", "ckpt_new.safetensors"]  # of processes that were killed
        if t.step == 0:  # nothing of an earlier run may be taken for this one's
            stale += [LATEST, PREVIOUS, BEST, *OLD_KIND, *REPORTS, "tensorboard/events.out.tfevents.*"]
        if (self.path / "tensorboard").is_symlink():
            stale.insert(0, "tensorboard")  # never written through
        for pattern in stale:
            for path in self.path.glob(pattern):
                path.unlink()
        if s.init_from == "resume_prev":  # the one after it is given up, before a new one could push this one out
            replace_with_link(self.path / LATEST, self.path / PREVIOUS)
        for name, content in data.tokenizer.files.items():  # generation needs nothing but this folder
            write_whole(self.path / name, content)
        write_whole(self.path / "metrics.jsonl", b"".join(self.kept))
        self.metrics = open(self.path / "metrics.jsonl", "ab", buffering=0)
        self.loggers = new_loggers(s, self.path, t.step)
        self.settings, self.data = s.as_dict(), asdict(data.meta)
        self.info = about(t.model, s.dataset, steps, self.machine) | {"command": self.command}
        self.note("training")

    def note(self, state, error=None):
        """Tell those who watch, through run.json."""
        self.info |= {"state": state, "error": error}
        write_json(self.path / "run.json", self.info)

    @chief_only
    def end(self, state, error=None):
        """state: finished, stopped or failed."""
        self.note(state, error)
        for logger in self.loggers:
            logger.close()

    @chief_only
    def log(self, values):
        line = json.dumps(values).encode() + b"\n"
        if self.metrics.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for logger in self.loggers:
            logger.log(values)

    @chief_only
    def save(self, t):
        """The latest checkpoint becomes the one before; at every moment there is a whole latest one."""
        if not all(p.isfinite().all() for p in t.model.parameters()):
            raise self.not_finite(f"step {t.step}: parameters that are not finite", t.step)
        os.fsync(self.metrics.fileno())
        new = self.path / "ckpt_new.safetensors"
        save_checkpoint(new, t.model, t.optimizer, self.describe(t))
        if self.has(LATEST) and self.saved_step < t.step:
            replace_with_link(self.path / PREVIOUS, self.path / LATEST)
        os.replace(new, self.path / LATEST)
        self.saved_step = t.step

    @chief_only
    def save_best(self, t):
        save_checkpoint(self.path / BEST, t.model, None, self.describe(t))

    def describe(self, t):
        """The checkpoint's `run`, but for what lib/checkpoint adds."""
        numbers = {"step": t.step, "seconds": t.seconds, "best_loss": t.best_loss, "scaler": t.scaler.state_dict()}
        return numbers | {"settings": self.settings, "data": self.data}

    @chief_only
    def report(self, t, windows, results):
        """After an evaluation: its results (None if it was capped), and what the residual has learned and does."""
        self.claim()
        if results:
            write_json(self.path / "eval_results.json", results)
        residual = residual_report(t.model)
        if residual:
            write_json(self.path / "residual_weights.json", residual)
            write_whole(self.path / "residual_weights.txt", residual_text(residual).encode())
            for logger in self.loggers:
                logger.log_text("residual_weights", residual_text(residual), t.step)
        with torch.compiler.set_stance("force_eager"):  # one batch is too little to compile for
            rows = max(1, min(MIXED_TOKENS // windows.block_size, windows.n_full))
            mixing = depth_mixing(t.model, windows.batch(range(rows), rows, self.machine.device)[0])
        if mixing:
            write_json(self.path / "depth_mixing.json", mixing)

    @chief_only
    def say(self, text):
        tqdm.write(text)  # above a progress bar, if there is one

    @chief_only
    def warn(self, text):
        tqdm.write(f"warning: {text}", file=sys.stderr)

    # --- what goes wrong

    def not_finite(self, text, step):
        """The error that names the last good checkpoint; one of this very step holds the same bad parameters."""
        name, resume = (LATEST, "resume") if self.saved_step < step else (PREVIOUS, "resume_prev")
        advice = "there is no checkpoint before it; a lower --learning_rate may help"
        if self.has(name):
            advice = f"the last good checkpoint is {self.path / name}: --init_from={resume} resumes from it"
        return UserError(f"{text}: stopped; {advice}", status=1)

    @contextlib.contextmanager
    def failures(self):
        """What ends the run goes into run.json; where the disk or memory is to blame, the user is told what to do."""
        try:
            yield
        except Exception as error:
            known = self.user_error(error)
            if self.info:
                with contextlib.suppress(OSError):  # the disk may be what is full
                    self.end("failed", str(known or error))
            if known:
                raise known from None
            raise

    def user_error(self, error):
        if isinstance(error, UserError):
            return error
        if isinstance(error, OSError):
            return UserError(
                f"{error.filename or 'the run'} could not be read or written ({error.strerror or error}); the "
                "checkpoints before are whole: fix that, on a full disk make room, and give the same command again",
                status=1,
            )
        if is_out_of_memory(error):
            return UserError("out of memory: use a smaller micro_batch, eval_batch, block_size or model")
        return None


def about(model, dataset, steps, machine):
    """The part of run.json that does not change."""
    config = model.config
    return {
        "steps": steps,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "mode": row_name(config),
        "parameters": model.num_params(),
        "flops_per_token": model.flops_per_token(config.block_size),
        "dataset": dataset,
        "started": time.time(),
        "device": torch.cuda.get_device_name() if machine.device.type == "cuda" else processor_name(),
        "device_type": machine.device.type,
        "dtype": str(machine.dtype).removeprefix("torch."),
        "compile": machine.compile,
        "processes": machine.world,
        "torch": torch.__version__,
    }


# --- reading a run's folder -------------------------------------------------------------------------------------------


def metrics_lines(folder):
    """(line, what it says) of each whole line of metrics.jsonl; the last may be torn. No file: none."""
    path = Path(folder) / "metrics.jsonl"
    with user_error_from_os(f"read {path}"):
        refuse(path.exists() and not path.is_file(), f"{path} is not a file: remove it")
        *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines, start=1):
        yield line + b"\n", parse_metrics(line, f"{path}, line {number},")


def parse_metrics(line, where):
    try:
        values = json.loads(line)
        good = type(values["step"]) is int and 0 <= values["step"] < 2**63
        good = good and math.isfinite(values.get("eval_loss", 0.0))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        good = False
    refuse(not good, f"{where} is not a metrics line: fix or remove it")
    return values


def read_metrics(folder):
    """What each line of metrics.jsonl says."""
    return [values for _, values in metrics_lines(folder)]


def load_run(folder, which="best"):
    """(Checkpoint, tokenizer) of a run; both are in its folder. which: best or latest."""
    folder = Path(folder)
    names = {"best": BEST, "latest": LATEST}
    there = [name for name, file in names.items() if os.path.exists(folder / file)]
    if which not in there:
        old = any(os.path.exists(folder / name) for name in OLD_KIND)
        advice = "it is of an older version, whose files are no longer read" if old else "train one, or name another"
        advice = f"choose --checkpoint={there[0]}" if there else advice
        raise UserError(f"there is no {names[which]} of a run in {folder}: {advice}")
    checkpoint = load_checkpoint(folder / names[which])
    return checkpoint, load_tokenizer(checkpoint.data.get("tokenizer"), folder)
