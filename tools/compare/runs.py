"""Runs of the comparison through the real train.py, several side by side, and the records that they leave."""

import ctypes
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from lib.checkpoint import read_run
from lib.code import code_hash
from lib.errors import UserError, refuse
from lib.files import read_json
from lib.run import LATEST, read_metrics
from tools.compare.records import check_same, make_record, shared_settings, write_record
from train import ROOT, check_settings

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


class Run:
    """One row with one seed at one learning rate: its folder, its command, its record."""

    def __init__(self, scale, row, seed, rate, name, out_dir, records_dir, may_diverge=False):
        self.row, self.seed, self.name, self.data, self.may_diverge = row, seed, name, scale.data, may_diverge
        self.folder, self.log, self.record = out_dir / name, out_dir / f"{name}.log", records_dir / f"{name}.json"
        changes = scale.changes(row)
        self.cost = scale.training_flops(changes)
        changes |= {"seed": seed, "learning_rate": rate, "out_dir": self.folder, "sample_tokens": 0}
        self.options, self.settings = scale.options(changes), scale.settings(changes)
        check_settings(self.settings)

    def check_folder(self):
        """Refuse to resume what another comparison or other code has left."""
        if (self.folder / LATEST).exists():
            run = read_run(self.folder / LATEST)
            check_same(run, self.settings.as_dict(), self.data, self.folder)
            other = run["code"] != code_hash() and not self.is_finished()
            refuse(other, f"{self.folder} was begun by other code: remove it, or go back to that code")

    def is_training(self):
        """Whether a process of an earlier call, or of another computer, is at work on it and holds its lock."""
        try:
            number = os.open(self.folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return False
        with os.fdopen(number) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def info(self):
        """Its run.json; nothing if there is none."""
        try:
            return read_json(self.folder / "run.json")
        except UserError:
            return {}

    def is_finished(self):
        return self.info().get("state") == "finished"

    def divergence(self):
        """What train.py said when the loss was no longer finite; None: that was not so, or not with this command."""
        error, command = (str(self.info().get(key)) for key in ("error", "command"))
        diverged = error.startswith("step ") and ": stopped;" in error and command.endswith(shlex.join(self.options))
        return error.partition(": stopped;")[0] if diverged else None

    def finish(self):
        """Keep of the finished run what table and pictures need."""
        self.check_folder()
        try:
            record = make_record(self.folder, self.row, self.seed)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"the files in {self.folder} are damaged: remove it, and the run is made again") from None
        write_record(self.record, record)
        return record

    def finish_diverged(self):
        self.check_folder()
        record = {"row": self.row, "seed": self.seed, "settings": shared_settings(self.settings.as_dict())}
        record |= {"data": self.data, "code": code_hash(), "diverged": self.divergence()}
        write_record(self.record, record)
        return record

    def part_done(self):
        try:
            last = read_metrics(self.folder)[-1]
        except (UserError, IndexError):
            return 0.0
        steps = self.info().get("steps") or float("inf")
        return min(1.0, last["step"] / steps)

    def command(self, nproc):
        """For a shell, in the project's folder."""
        start = ["torchrun", "--standalone", f"--nproc_per_node={nproc}"] if nproc > 1 else ["python"]
        return shlex.join([*start, "train.py", *self.options])


# --- processes --------------------------------------------------------------------------------------------------------


def threads(s):
    """Of each process; an OMP_NUM_THREADS that is set is obeyed."""
    text = os.environ.get("OMP_NUM_THREADS") or str(max(1, os.cpu_count() // (s.jobs * s.nproc)))
    good = text.isdecimal() and int(text) >= 1
    refuse(not good, f"the environment's OMP_NUM_THREADS must be a whole number of threads, not {text!r}")
    return int(text)


def end_with_parent():
    """In the child, before its program: Linux ends it if we are killed. Elsewhere the next call waits for it."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start_process(program, s, slot, log, stdin=None, stdout=subprocess.DEVNULL):
    """What to run, as Python's arguments, in one process or several, on job number slot's share of the machine."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads(s))}
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    if len(gpus) >= s.jobs * s.nproc > 1:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot * s.nproc : (slot + 1) * s.nproc])
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={s.nproc}"] if s.nproc > 1 else []
    command = [sys.executable, *torchrun, *program]
    before = end_with_parent if sys.platform == "linux" else None
    with open(log, "wb") as file:
        return subprocess.Popen(
            command, bufsize=0, stdin=stdin, stdout=stdout, stderr=file, env=environment, preexec_fn=before
        )


def stop(processes):
    for process in processes:
        process.terminate()  # train.py writes a checkpoint first
    for process in processes:
        process.wait()


def last_words(log):
    lines = [line.strip() for line in log.read_text(errors="replace").replace("\r", "\n").split("\n") if line.strip()]
    return ([line for line in lines if line.startswith("error: ")] or lines or ["no message"])[-1]


def collect(runs, failed, on_record):
    """The records of runs that others have made, such as a job array. Returns the runs that are missing."""
    for run in [run for run in runs if not run.record.exists() and not run.is_training()]:
        try:
            if run.may_diverge and run.divergence():
                on_record(run.finish_diverged())
            elif run.is_finished():
                on_record(run.finish())
            elif run.info().get("state") == "failed":
                failed[run.name] = str(run.info().get("error"))
        except UserError as error:
            failed[run.name] = str(error)
    return [run for run in runs if not run.record.exists()]


class Queue:
    """Runs waiting and running, s.jobs at a time; on_record gets what finishes, failed the words of what does not."""

    def __init__(self, runs, s, failed, on_record):
        self.runs, self.s, self.failed, self.on_record = runs, s, failed, on_record
        self.waiting, self.running, self.slots = list(runs), {}, list(range(s.jobs))
        self.done = {run: run.part_done() for run in runs}
        self.told = set()  # which runs of other processes have been spoken of
        self.bar = tqdm(
            total=1.0,
            initial=self.progress(),
            smoothing=0,  # the mean speed so far
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left",
            mininterval=1 if sys.stderr.isatty() else 30,
        )

    def progress(self):
        """Counted in FLOPs: rows differ in length, so a count of runs would say little about the time left."""
        return sum(run.cost * self.done[run] for run in self.runs) / sum(run.cost for run in self.runs)

    def work(self):
        try:
            while self.waiting or self.running:
                while self.slots and (run := self.next_run()):
                    self.start(run)
                time.sleep(0.1)
                for run, (process, slot) in list(self.running.items()):
                    if process.poll() is not None:
                        del self.running[run]
                        self.slots.append(slot)
                        self.end(run, process.returncode)
                self.show()
        finally:
            self.bar.close()
            if self.running:
                stop([process for process, _ in self.running.values()])
                print("stopped: the same command resumes", file=sys.stderr)

    def next_run(self):
        """The first that waits and that nobody else trains; what others train is left to them and then collected."""
        for run in list(self.waiting):
            if run.record.exists():  # somebody else's, meanwhile
                self.waiting.remove(run)
                self.done[run] = 1.0
                self.on_record(read_json(run.record))
            elif not run.is_training():
                self.waiting.remove(run)
                return run
            elif run not in self.told:
                self.told.add(run)
                self.bar.write(f"{run.name} is being trained by another process: waiting for it", file=sys.stderr)
        return None

    def start(self, run):
        self.failed.pop(run.name, None)  # of an earlier call
        try:
            run.check_folder()
            if run.is_finished():  # by somebody else, meanwhile
                self.end(run, 0)
                return
            run.log.parent.mkdir(exist_ok=True)
            program = [str(ROOT / "train.py"), *run.options]
            self.running[run] = start_process(program, self.s, self.slots[-1], run.log), self.slots[-1]
            self.slots.pop()
        except UserError as error:
            self.fail(run, error)

    def end(self, run, status):
        if status and run.is_training():  # another process was faster
            self.waiting.append(run)
            return
        self.done[run] = 1.0
        try:
            if status and run.may_diverge and run.divergence():
                record = run.finish_diverged()
                self.bar.write(f"{run.name} diverged: {record['diverged']}")
            else:
                if status:
                    raise UserError(f"exit status {status}, {last_words(run.log)}")
                record = run.finish()
                self.bar.write(f"{run.name}: validation loss {record['loss']:.4f}")
        except (UserError, OSError) as error:
            self.fail(run, error)
            return
        self.on_record(record)

    def fail(self, run, error):
        self.done[run] = 1.0
        self.failed[run.name] = str(error)
        self.bar.write(f"{run.name} failed: {error}", file=sys.stderr)

    def show(self):
        if time.time() - self.bar.last_print_t > self.bar.mininterval or not self.running:
            self.done |= {run: run.part_done() for run in self.running}
            ended = len(self.runs) - len(self.waiting) - len(self.running)
            self.bar.set_description_str(f"{ended}/{len(self.runs)} runs", refresh=False)
            self.bar.update(max(0.0, self.progress() - self.bar.n))


def make_folders(*folders):
    for folder in map(Path, folders):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made: {error.strerror}") from None
