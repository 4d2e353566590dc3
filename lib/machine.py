"""The machine: this process among the others, its device and number format, its memory, the signals that end it."""

import ctypes
import os
import platform
import resource
import signal
import sys
import time

import torch
import torch.distributed as dist
from tqdm import tqdm

from lib.errors import UserError, one_line, refuse


class Machine:
    """This process among the others, its device and number format."""

    def __init__(self, device=None, dtype=None, compile=None):
        self.rank, self.world, self.local_rank = place_among_processes()
        self.chief = self.rank == 0  # the one process that writes and prints
        self.device = pick_device(device, self.local_rank)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")  # TF32
        elif self.device.type == "cpu":
            keep_freed_memory()
        bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = dtype or ("bfloat16" if bf16 else "float16" if on_gpu else "float32")
        known = dtype in ("bfloat16", "float16", "float32")
        refuse(not known, f"dtype {dtype} is not known: choose bfloat16, float16 or float32")
        self.dtype = getattr(torch, dtype)
        self.compile = on_gpu if compile is None else compile
        if self.world > 1:
            on_mps = self.device.type == "mps"
            refuse(on_mps, "several processes cannot share an mps device: use one, or --device=cpu")
            try:
                dist.init_process_group("nccl" if on_gpu else "gloo", device_id=self.device if on_gpu else None)
            except (ValueError, RuntimeError) as error:
                reason = f"the {self.world} processes cannot be connected ({one_line(error)})"
                raise UserError(f"{reason}: start them with torchrun") from None

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def sum(self, *numbers):
        """Sums over all processes, in float64 where there is such a thing."""
        tensor = torch.tensor(numbers, dtype=torch.float32 if self.device.type == "mps" else torch.float64)
        if self.world > 1:
            tensor = tensor.to(self.device)
            dist.all_reduce(tensor)
        return tensor.tolist()

    def share_buffers(self, model):
        """Give all processes the first one's buffers: a batchnorm's statistics, which the checkpoint holds."""
        if self.world > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def wait_for_all(self):
        if self.world > 1:
            dist.barrier()

    def leave(self):
        if self.world > 1:
            dist.destroy_process_group()

    def peak_memory(self):
        """Bytes: the device's, or this process's resident set."""
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else peak_resident()

    def progress(self, unit, total, done=0, delay=0):
        """A bar on stderr. With a delay it appears only if the work lasts that many seconds, and goes away."""
        seconds = 0.5 if sys.stderr.isatty() else 15
        options = {"leave": not delay, "mininterval": seconds, "disable": not self.chief}
        return tqdm(unit=unit, total=total, initial=done, delay=delay, **options)

    def __str__(self):
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else self.device.type
        dtype, compiled = str(self.dtype).removeprefix("torch."), "compiled" if self.compile else "not compiled"
        return f"{name}, {dtype}, {compiled}, {self.world} process{'es' * (self.world > 1)}"


def place_among_processes():
    """rank, world size and local rank, as torchrun says them; one process alone where nobody does."""
    place = []
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        text = os.environ.get(name, default)
        good = text.isdecimal() and len(text) < 10
        refuse(not good, f"the environment's {name} must be a whole number, not {text!r}: unset it, or use torchrun")
        place.append(int(text))
    rank, world, _ = place
    wrong = f"the environment's RANK={rank} must be less than WORLD_SIZE={world}: unset both, or use torchrun"
    refuse(rank >= world, wrong)
    return place


def pick_device(name, local_rank=0):
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)
        if device.type not in ("cuda", "mps", "cpu"):
            raise RuntimeError("choose cuda, mps or cpu")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def processor_name():
    """Of the machine's CPU, as Linux says it; elsewhere what Python knows."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


# --- memory -----------------------------------------------------------------------------------------------------------


def keep_freed_memory():
    """
    Linux's C library hands freed memory back to the system, only to get it again in the next step, zeroed page by page:
    a tenth of a method3_2 step. The peak is the same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other systems have no such function
    trim_threshold, mmap_threshold = -1, -3
    if mallopt and mallopt(mmap_threshold, 2**31 - 1):  # an old one may refuse: then all stays as it is
        mallopt(trim_threshold, -1)  # never


def seconds_since(started):
    """Of time.perf_counter(); more than 0, although a clock may stand still."""
    return max(1e-9, time.perf_counter() - started)


def peak_resident():
    """The largest resident set that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory_size():
    """Of the machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def is_out_of_memory(error):
    """Python's, an accelerator's, or the RuntimeError that torch raises for the CPU's memory."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


# --- signals ----------------------------------------------------------------------------------------------------------


EXIT_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


class StopSignals:
    """Inside `with`, SIGINT and SIGTERM only ask for an end: `received` is the exit status to end with, or 0."""

    def __init__(self):
        self.received = 0

    def __enter__(self):
        self.before = {number: signal.signal(number, self.note) for number in EXIT_STATUS}
        return self

    def note(self, number, frame):
        self.received = self.received or EXIT_STATUS[number]

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)
