"""
Train a GPT on one process, or on many with torchrun:

    python train.py config/method3_2.py
    torchrun --standalone --nproc_per_node=8 train.py config/wikitext103.py config/method3_2.py

The same command again continues the run. `--help` lists the keys.
"""

import contextlib
import ctypes
import datetime
import errno
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import resource
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from configurator import Settings, UserError, configure, run_main
from data.common import load_meta, load_tokenizer, load_tokens, open_atomically, write_file_atomically
from hf import load_torch_file
from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent
STOP_SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass
class TrainConfig:
    out_dir: str | None = None  # None: out/ + the config files' names
    init_from: str = "scratch"  # scratch, resume, resume_prev (the checkpoint before), or a Hugging Face name or folder
    overwrite: bool = False  # start anew although out_dir holds a run: it is deleted
    seed: int = 1  # of the initial weights, the order of the data and dropout, each with a stream of its own
    # data
    dataset: str = "pydocs"  # a folder in data/, or a path
    batch_tokens: int = 2048  # tokens of one optimizer step, over all processes
    micro_batch: int = 16  # sequences of one forward pass in one process; the rest is accumulated
    # length: in epochs, or in steps where max_steps is given
    epochs: float = 0.4
    max_steps: int | None = None
    stop_at: int | None = None  # end this sitting after that step; the schedule does not change
    # optimizer: AdamW, warm-up, cosine to min_lr
    learning_rate: float = 2e-3
    min_lr: float = 0.0
    warmup: float = 0.015  # part of all steps
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0  # 0: none
    residual_lr_scale: float = 1.0  # times the learning rate for the raw residual weights
    # what to see and to keep
    eval_only: bool = False
    eval_every: int = 200  # steps; there is always one at the end
    eval_batch: int = 32  # sequences; has no influence on the result
    checkpoint_every: int = 200  # steps; there is always one at the end
    log_every: int = 1  # steps between lines of metrics.jsonl
    sample_tokens: int = 256  # length of the text shown at the end; 0: none
    wandb_project: str | None = None  # also log to Weights & Biases
    # machine; None: by what it has
    device: str | None = None  # cuda, mps, cpu
    dtype: str | None = None  # bfloat16, float16, float32
    compile: bool | None = None
    checkpoint_recompute: bool = False  # re-runs again in backward: less memory, more time


# settings that may change when a run goes on; the length of the schedule among them
RUNTIME_KEYS = (
    "out_dir init_from overwrite micro_batch epochs max_steps stop_at eval_only eval_every eval_batch checkpoint_every "
    "log_every sample_tokens wandb_project device dtype compile checkpoint_recompute"
).split()
SITTING_KEYS = "out_dir init_from overwrite stop_at eval_only device dtype compile".split()  # said anew each time
MODEL_KEYS = [field.name for field in fields(GPTConfig)]


# --- random streams and data ------------------------------------------------------------------------------------------


def stream_seed(*key):
    """An independent 63-bit seed for each key, such as (seed, "dropout", step, rank)."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little") >> 1


class Blocks:
    """
    Tokens cut into blocks of block_size inputs and their targets, the next tokens. An epoch is one shuffled pass over
    all full blocks; epochs follow without a gap, so the batch of a step depends on nothing but (seed, step).
    """

    def __init__(self, tokens, block_size, vocab_size, seed):
        self.tokens, self.block_size, self.vocab_size, self.seed = tokens, block_size, vocab_size, seed
        self.n_full = (len(tokens) - 1) // block_size
        self.n_all = math.ceil((len(tokens) - 1) / block_size)  # with the short one at the end
        self.orders = {}

    def order(self, epoch):
        if epoch not in self.orders:
            self.orders = {e: order for e, order in self.orders.items() if e == epoch - 1}
            self.orders[epoch] = np.random.default_rng(stream_seed(self.seed, "data", epoch)).permutation(self.n_full)
        return self.orders[epoch]

    def shuffled(self, start, end):
        """Blocks number start … end-1 of the endless shuffled sequence."""
        return [self.order(n // self.n_full)[n % self.n_full] for n in range(start, end)]

    def batch(self, blocks, rows, device):
        """Inputs and targets (rows, T); what the short last block or a short last batch lacks are targets of -1."""
        length = self.block_size + 1
        ids = np.full((rows, length), -1, dtype=np.int64)
        for row, block in zip(ids, blocks, strict=False):
            piece = self.tokens[block * self.block_size :][:length]
            row[: len(piece)] = piece
        if ids.max() >= self.vocab_size:
            raise UserError(f"{self.tokens.filename} holds token {ids.max()}, but the vocabulary is {self.vocab_size}")
        ids = torch.from_numpy(ids)
        if device.type == "cuda":
            ids = ids.pin_memory().to(device, non_blocking=True)
        else:
            ids = ids.to(device)
        return ids[:, :-1].clamp(min=0), ids[:, 1:]


# --- processes and machine --------------------------------------------------------------------------------------------


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


def keep_freed_memory():
    """
    Linux's C library hands freed memory back to the system, only to get it again in the next step, zeroed page by page:
    a tenth of a method3_2 step. The peak is the same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other systems have no such function
    trim_threshold, mmap_threshold = -1, -3
    if mallopt and mallopt(mmap_threshold, 2**31 - 1):  # an old one may refuse: then all stays as it is
        mallopt(trim_threshold, -1)  # never


def peak_resident():
    """The largest resident set that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Machine:
    """This process among the others, its device and number format."""

    def __init__(self, settings):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = pick_device(settings.device, int(os.environ.get("LOCAL_RANK", 0)))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")  # TF32
        elif self.device.type == "cpu":
            keep_freed_memory()
        bf16 = self.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = settings.dtype or ("bfloat16" if bf16 else "float16" if self.device.type == "cuda" else "float32")
        if dtype not in ("bfloat16", "float16", "float32"):
            raise UserError(f"dtype {dtype} is not known: choose bfloat16, float16 or float32")
        self.dtype = getattr(torch, dtype)
        self.compile = self.device.type == "cuda" if settings.compile is None else settings.compile
        if self.world > 1:
            if self.device.type == "mps":
                raise UserError("several processes cannot share an mps device: use one, or --device=cpu")
            on_gpu = self.device.type == "cuda"
            dist.init_process_group("nccl" if on_gpu else "gloo", device_id=self.device if on_gpu else None)

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def sum(self, *numbers):
        """Sums over all processes, in float64 where there is such a thing."""
        tensor = torch.tensor(numbers, dtype=torch.float32 if self.device.type == "mps" else torch.float64)
        if self.world > 1:
            tensor = tensor.to(self.device)
            dist.all_reduce(tensor)
        return tensor.tolist()

    def wait_for_all(self):
        if self.world > 1:
            dist.barrier()

    def leave(self):
        if self.world > 1:
            dist.destroy_process_group()

    def peak_memory(self):
        """Bytes: the device's, or this process's resident set."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return peak_resident()

    def __str__(self):
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else self.device.type
        dtype, compiled = str(self.dtype).removeprefix("torch."), "compiled" if self.compile else "not compiled"
        return f"{name}, {dtype}, {compiled}, {self.world} process{'es' * (self.world > 1)}"


# --- checkpoints ------------------------------------------------------------------------------------------------------


CHECKPOINT_TYPES = {
    "model": dict,
    "config": dict,  # the model's
    "optimizer": dict,  # for each parameter's name its moments; none in best.pt
    "scaler": dict,
    "step": int,
    "seconds": float,
    "best_loss": float,
    "settings": dict,  # as they were asked for
    "data": dict,  # the dataset's meta.json
    "code": str,
}


def save_checkpoint(out_dir, checkpoint):
    """ckpt.pt becomes ckpt_prev.pt; at every moment there is a whole ckpt.pt."""
    new = out_dir / "ckpt_new.pt"
    save_whole(new, checkpoint)
    if (out_dir / "ckpt.pt").exists():
        replace_with_link(out_dir / "ckpt_prev.pt", out_dir / "ckpt.pt")
    os.replace(new, out_dir / "ckpt.pt")


def replace_with_link(path, target):
    link = path.with_name("ckpt_link.pt")
    link.unlink(missing_ok=True)
    os.link(target, link)
    os.replace(link, path)
    link.unlink(missing_ok=True)  # it is still there if path was the same file already


def save_whole(path, content):
    try:
        with open_atomically(path) as file:
            torch.save(content, file)
    except RuntimeError as error:  # torch puts its own words over the disk's
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def load_checkpoint(path):
    """A checkpoint, checked, with `model` as a GPT and `settings` as Settings; nothing in the file is executed."""
    try:
        checkpoint = load_torch_file(path)
        if {key: type(value) for key, value in checkpoint.items()} != CHECKPOINT_TYPES:
            raise ValueError("it holds something else")
        numbers = checkpoint["scaler"].values()
        if checkpoint["step"] < 0 or len(numbers) not in (0, 5) or not {type(n) for n in numbers} <= {int, float}:
            raise ValueError("its step or scaler is none")
        settings = Settings(TrainConfig, GPTConfig)
        for key, value in checkpoint["settings"].items():
            settings.set(key, value, where="settings")
        state, moments = own_copies(checkpoint["model"]), checkpoint["optimizer"]
        model = GPT.from_state(GPTConfig(**checkpoint["config"]), state)
        moments = {name: own_copies(moments[name]) for name in moments}
        shapes = {name: [tuple(m.shape) for m in moments[name].values()] for name in moments}
        if moments and shapes != {name: [(), tuple(p.shape), tuple(p.shape)] for name, p in model.named_parameters()}:
            raise ValueError("the optimizer's state is not that of the model")
    except FileNotFoundError:
        raise UserError(f"there is no {path}") from None
    except Exception as error:  # a damaged or hostile file can fail anywhere
        advice = "use another checkpoint"
        if Path(path).name == "ckpt.pt":
            advice = "go on from the one before it with --init_from=resume_prev"
        raise UserError(f"{path} is damaged or not a checkpoint ({str(error)[:200]}): {advice}") from None
    return checkpoint | {"model": model, "optimizer": moments, "settings": settings}


def own_copies(tensors):
    """Not the mapped ones: the file is going to be replaced."""
    for name, tensor in tensors.items():
        if tensor.dtype != (torch.int64 if name.endswith("num_batches_tracked") else torch.float32):
            raise ValueError(f"{name} is of {tensor.dtype}")
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def code_hash():
    return hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in ("model.py", "train.py"))).hexdigest()


# --- a run: its folder, what it starts from ---------------------------------------------------------------------------


def check_settings(s):
    for name in "batch_tokens micro_batch eval_every eval_batch checkpoint_every log_every".split():
        if getattr(s, name) < 1:
            raise UserError(f"{name} must be at least 1, not {getattr(s, name)}")
    for name in "seed learning_rate min_lr weight_decay grad_clip residual_lr_scale sample_tokens".split():
        if getattr(s, name) < 0:
            raise UserError(f"{name} must not be negative, not {getattr(s, name)}")
    for name in "warmup beta1 beta2".split():
        if not 0 <= getattr(s, name) < 1:
            raise UserError(f"{name} must be at least 0 and less than 1, not {getattr(s, name)}")
    if s.epochs > 1e9:
        raise UserError(f"epochs must be at most 1e9, not {s.epochs}")
    for name in "epochs max_steps stop_at".split():
        if getattr(s, name) is not None and getattr(s, name) <= 0:
            raise UserError(f"{name} must be more than 0, not {getattr(s, name)}")
    if s.wandb_project and importlib.util.find_spec("wandb") is None:
        raise UserError("wandb_project needs the wandb package: pip install wandb")


def dataset_folder(s, machine):
    folder = Path(s.dataset) if os.sep in s.dataset else ROOT / "data" / s.dataset
    if machine.rank == 0 and s.dataset == "pydocs" and not (folder / "meta.json").exists():
        from data.pydocs.prepare import prepare  # the built-in corpus needs nothing from outside

        with open(folder / "lock", "w") as lock:  # of several first runs at once, one prepares
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "meta.json").exists():
                prepare(folder, load_tokenizer("bytes", None))
    machine.wait_for_all()
    return folder


def claim_folder(out_dir, machine):
    """Make out_dir this run's own until the process ends."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = open(out_dir / "lock", "w")  # stays open: closing it would release the lock
    except (OSError, ValueError) as error:
        raise UserError(f"{out_dir} cannot be written to: {getattr(error, 'strerror', error)}") from None
    if machine.rank == 0:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another run is writing to {out_dir}: wait for it, or choose another --out_dir") from None
    return lock


def checkpoint_to_continue(s, out_dir):
    """The checkpoint of this same run in out_dir, or None for a new run. What a run is may not change on the way."""
    path = out_dir / ("ckpt_prev.pt" if s.init_from == "resume_prev" else "ckpt.pt")
    resuming = s.init_from in ("resume", "resume_prev")
    if s.overwrite and not resuming:
        return None
    if not resuming and not path.exists():
        if (out_dir / "ckpt_prev.pt").exists():
            raise UserError(f"{out_dir} has lost its ckpt.pt: go on with --init_from=resume_prev, or --overwrite=True")
        return None
    checkpoint = load_checkpoint(path)
    then, config = checkpoint["settings"], checkpoint["model"].config
    fixed = [key for key in s.types if key not in RUNTIME_KEYS]
    if resuming:  # what is not said is as it was; what is said may not be another model, seed or data
        fixed = [key for key in (*MODEL_KEYS, "dataset", "seed") if key in s.given]
        fixed = [key for key in fixed if getattr(s, key) != getattr(config, key, None)]
        for key in s.types.keys() - s.given - set(SITTING_KEYS):
            setattr(s, key, getattr(then, key))
        if "epochs" in s.given and "max_steps" not in s.given:
            s.max_steps = None  # which would win
    different = [key for key in fixed if getattr(s, key) != getattr(then, key)]
    if different:
        values = ", ".join(f"{key} is {getattr(then, key)} there and {getattr(s, key)} here" for key in different)
        raise UserError(
            f"{out_dir} holds another run: {values}; choose another --out_dir, or --init_from=resume without these, "
            "or --overwrite=True"
        )
    if not checkpoint["optimizer"]:
        raise UserError(f"{path} is a best.pt, to sample from; only ckpt.pt and ckpt_prev.pt can be gone on from")
    return checkpoint


def new_model(s, n_vocab):
    """From Hugging Face weights, or from scratch with a vocabulary rounded up to a multiple of 64 for speed."""
    settings = {key: getattr(s, key) for key in MODEL_KEYS}
    if s.init_from != "scratch":
        return GPT.from_pretrained(s.init_from, **{key: settings[key] for key in MODEL_KEYS if key in s.given})
    if "vocab_size" not in s.given:
        settings["vocab_size"] = -(-n_vocab // 64) * 64
    config = GPTConfig(**settings)
    # a lower bound in boundless integers: what cannot fit would fill the memory first, and a layer is also Python
    weights = config.n_embd * (config.vocab_size + config.n_layer * (config.n_embd + config.ffn_hidden))
    weights += config.n_embd * config.block_size if config.position == "learned" else 0
    if 4 * weights + 10_000 * config.n_layer > memory_size():
        raise UserError(f"a model of more than {weights:,} parameters does not fit into this machine's memory")
    torch.manual_seed(stream_seed(s.seed, "init"))
    return GPT(config)


def is_out_of_memory(error):
    """Python's, an accelerator's, or the RuntimeError that torch raises for the CPU's memory."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def memory_size():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- evaluation and reports -------------------------------------------------------------------------------------------


def evaluate(model, blocks, machine, batch_size):
    """One pass over all blocks, each process its share; every token counts the same."""
    started = time.time()
    model.eval()
    loss = correct = steps = 0
    share = range(machine.rank, blocks.n_all, machine.world)
    batch_size = min(batch_size, math.ceil(blocks.n_all / machine.world))  # all batches of one shape: compiled once
    for start in range(0, len(share), batch_size):
        x, y = blocks.batch(share[start : start + batch_size], batch_size, machine.device)
        with machine.autocast():
            batch_loss, batch_correct = model.score(x, y)
        loss, correct, steps = loss + batch_loss.item(), correct + batch_correct.item(), steps + 1
    model.train()
    loss, correct, steps = machine.sum(loss, correct, steps)
    n_tokens, seconds = len(blocks.tokens) - 1, time.time() - started
    return {
        "eval_accuracy": correct / n_tokens,
        "eval_loss": loss / n_tokens,
        "eval_perplexity": math.exp(min(loss / n_tokens, 700)),
        "eval_bits_per_byte": loss / math.log(2) / blocks.n_bytes,
        "eval_runtime": seconds,
        "eval_samples": blocks.n_all,
        "eval_samples_per_second": blocks.n_all / seconds,
        "eval_steps_per_second": steps / seconds,
    }


def print_eval(results):
    print("***** eval metrics *****")
    for name, value in results.items():
        if name == "eval_runtime":
            value = str(datetime.timedelta(seconds=round(value, 2)))[:10]
        print(f"  {name:23} = {round(value, 4) if isinstance(value, float) else value:>10}")


def residual_report(model):
    """Each layer's raw weights and what they are after the softmax; None where a layer has none."""
    report = []
    for m, raw in enumerate(model.residual_weights()):
        weights = None if raw is None else {"raw": raw.tolist(), "normalized": raw.detach().softmax(dim=0).tolist()}
        report.append({"layer": m, "weights": weights})
    return report


def residual_text(report):
    lines = []
    for entry in report:
        if entry["weights"] is None:
            lines.append(f"layer {entry['layer']}: no weights")
            continue
        lines.append(f"layer {entry['layer']}: {len(entry['weights']['raw'])} weights")
        for kind, values in entry["weights"].items():
            lines.append(f"  {kind:10} [{', '.join(f'{value:.4f}' for value in values)}]")
    return "\n".join(lines) + "\n"


def write_json(path, content):
    write_file_atomically(path, json.dumps(content, indent=2).encode() + b"\n")


class Metrics:
    """metrics.jsonl: one JSON object a line, none twice and none torn, however often the run was interrupted."""

    def __init__(self, path, step, project, settings):
        kept = []
        if step > 0 and path.exists():  # what was written after the checkpoint is going to be written again
            lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
            try:
                kept = [line for line in lines if json.loads(line)["step"] <= step]
            except (ValueError, TypeError, KeyError, RecursionError):
                raise UserError(f"{path} holds a line that is not a metrics line: put it right or remove it") from None
        write_file_atomically(path, b"".join(kept))
        self.file = open(path, "ab", buffering=0)
        self.wandb = None
        if project:
            import wandb

            self.wandb = wandb.init(project=project, name=path.parent.name, config=settings)

    def sync(self):
        os.fsync(self.file.fileno())

    def write(self, **values):
        line = json.dumps(values).encode() + b"\n"
        if self.file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.wandb:
            self.wandb.log(values, step=values["step"])


def learning_rate(step, steps, s):
    """Of step 1 … steps: linear warm-up, then a cosine down to min_lr."""
    warmup = round(s.warmup * steps)
    if step <= warmup:
        return s.learning_rate * step / warmup
    progress = (step - 1 - warmup) / (steps - warmup)
    return s.min_lr + (s.learning_rate - s.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def show_sample(model, tokenizer, n_tokens, device):
    prompt = torch.tensor([[tokenizer.eot_id]], device=device)  # a document begins after the end of another
    generator = torch.Generator(device).manual_seed(1)
    decoder = tokenizer.stream_decoder()
    print("\n***** sample *****")
    model.eval()
    options = {"temperature": 0.8, "top_k": 50, "generator": generator, "real_vocab": tokenizer.vocab_size}
    with torch.compiler.set_stance("force_eager"):  # a text is too short to compile one-token steps for it
        for next_id in model.stream(prompt, n_tokens, **options):
            print(decoder.feed(next_id.item()), end="", flush=True)
    print(decoder.finish())


# --- the run ----------------------------------------------------------------------------------------------------------


def main():
    s = configure(sys.argv[1:], TrainConfig, GPTConfig)
    check_settings(s)
    machine = Machine(s)
    try:
        with contextlib.ExitStack() as at_end:
            status = train(s, machine, at_end)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, for one
        raise UserError(
            f"{error.filename or 'the run'} could not be read or written ({error.strerror or error}); the checkpoints "
            "before are whole: put that right, on a full disk make room, and give the same command again",
            status=1,
        ) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError("out of memory: use a smaller micro_batch, eval_batch, block_size or model") from None
    machine.leave()
    sys.exit(status)


def train(s, machine, at_end):
    """Returns the exit status."""
    chief = machine.rank == 0  # the one process that writes and prints
    out_dir = Path(s.out_dir or ROOT / "out" / ("-".join(Path(file).stem for file in s.files) or "default"))
    at_end.enter_context(claim_folder(out_dir, machine))
    checkpoint = checkpoint_to_continue(s, out_dir)

    # data
    folder = dataset_folder(s, machine)
    meta = load_meta(folder)
    data = asdict(meta)
    if checkpoint and checkpoint["data"] != data:
        then = checkpoint["data"]
        different = ", ".join(
            f"{key} was {then.get(key)} and is {data[key]}" for key in data if then.get(key) != data[key]
        )
        raise UserError(f"{s.dataset} is not the data of the run in {out_dir}: {different}; prepare that again")
    tokenizer = load_tokenizer(meta.tokenizer, folder)

    # model: of this run's checkpoint, of Hugging Face, or new
    try:
        model = checkpoint["model"] if checkpoint else new_model(s, meta.vocab_size)
    except ValueError as error:
        raise UserError(error) from None
    config = model.config
    if meta.vocab_size > config.vocab_size:
        raise UserError(f"vocab_size={config.vocab_size} is less than the data's vocabulary of {meta.vocab_size}")
    model.to(machine.device)
    model.checkpoint_recompute = s.checkpoint_recompute
    optimizer = model.configure_optimizers(s.weight_decay, s.learning_rate, (s.beta1, s.beta2), s.residual_lr_scale)
    scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)
    step, seconds, best_loss = 0, 0.0, math.inf
    if checkpoint:
        for name, p in model.named_parameters():
            optimizer.state[p] = {key: m.to(p.device) for key, m in checkpoint["optimizer"][name].items()}
        if checkpoint["scaler"]:
            scaler.load_state_dict(checkpoint["scaler"])
        step, seconds, best_loss = checkpoint["step"], checkpoint["seconds"], checkpoint["best_loss"]
        if chief and checkpoint["code"] != code_hash():
            print("warning: model.py or train.py has changed since this run's checkpoint", file=sys.stderr)
        del checkpoint
    saved_step = step

    # batches: sequences → processes × accumulated micro-batches
    train_blocks, val_blocks = (
        Blocks(load_tokens(folder, split), config.block_size, meta.vocab_size, s.seed) for split in ("train", "val")
    )
    val_blocks.n_bytes = meta.val_bytes
    if train_blocks.n_full == 0 or val_blocks.n_all == 0 or not meta.val_bytes:
        raise UserError(
            f"{s.dataset} is shorter than one block of {config.block_size} tokens: use a smaller block_size"
        )
    sequences, rest = divmod(s.batch_tokens, config.block_size)
    accumulate, rest2 = divmod(sequences, s.micro_batch * machine.world)
    if rest or rest2 or not sequences:
        raise UserError(
            f"batch_tokens={s.batch_tokens} must be a multiple of block_size × micro_batch × processes = "
            f"{config.block_size} × {s.micro_batch} × {machine.world}"
        )
    if 8 * s.micro_batch * config.block_size > memory_size():
        raise UserError(f"micro_batch={s.micro_batch} does not fit into this machine's memory")
    steps = s.max_steps or math.ceil(s.epochs * train_blocks.n_full / sequences)
    last_step = min(steps, s.stop_at or steps)

    if chief:
        print(f"{out_dir}: {config.residual_mode}, {model.num_params():,} parameters, on {machine}")
        print(
            f"data {s.dataset}: {meta.train_tokens:,} tokens to train on, {meta.val_tokens:,} to validate; "
            f"{steps} steps of {s.batch_tokens:,} tokens = {steps * sequences / train_blocks.n_full:.2f} epochs"
        )
    if step >= last_step and not s.eval_only:
        if chief:
            end = "finished" if step >= steps else f"at stop_at={s.stop_at}"
            print(f"this run is {end}, at step {step} of {steps}. Next: python sample.py --out_dir={out_dir}")
            print(f"train longer: the same with --max_steps={2 * steps}; anew: the same with --overwrite=True")
        return 0

    if machine.compile:
        model.compile_layers()
    wrapped = model  # what training calls; evaluation and checkpoints use the bare model
    if machine.world > 1:
        wrapped = DistributedDataParallel(model, [machine.device.index] if machine.device.type == "cuda" else None)

    def not_finite(text):
        """The error that names the last good checkpoint; one of this very step holds the same bad parameters."""
        name, resume = "ckpt_prev.pt", "resume_prev"
        if saved_step < step:
            name, resume = "ckpt.pt", "resume"
        advice = "there is no checkpoint before it; a lower --learning_rate may help"
        if (out_dir / name).exists():
            advice = f"the last good checkpoint is {out_dir}/{name}: --init_from={resume} goes on from it"
        return UserError(f"{text}: stopped; {advice}", status=1)

    def run_eval():
        if machine.world > 1:  # batchnorm: evaluate rank 0's running statistics, which the checkpoint holds
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
        results = {"epoch": step * sequences / train_blocks.n_full}
        results |= evaluate(model, val_blocks, machine, s.eval_batch)
        if not math.isfinite(results["eval_loss"]):
            raise not_finite(f"step {step}: validation loss {results['eval_loss']}")
        if chief:
            write_json(out_dir / "eval_results.json", results)
            if config.mode.weights == "learned":
                report = residual_report(model)
                write_json(out_dir / "residual_weights.json", report)
                write_file_atomically(out_dir / "residual_weights.txt", residual_text(report).encode())
        return results

    if s.eval_only:
        results = run_eval()
        if chief:
            print_eval(results)
        return 0

    metrics = bar = None
    if chief:
        stale = ["ckpt_new.pt", "ckpt_link.pt", "*.*.[0-9]*.tmp"]  # of runs that were killed
        if step == 0:  # nothing of an earlier run may be taken for this one's
            stale += ["ckpt_prev.pt", "ckpt.pt", "best.pt", "eval_results.json", "residual_weights.*"]
        for path in (path for pattern in stale for path in out_dir.glob(pattern)):
            path.unlink()
        if s.init_from == "resume_prev":  # the one after it is given up, before a new one could push this one out
            replace_with_link(out_dir / "ckpt.pt", out_dir / "ckpt_prev.pt")
        for name, content in tokenizer.files.items():  # generation needs nothing but out_dir
            write_file_atomically(out_dir / name, content)
        metrics = Metrics(out_dir / "metrics.jsonl", step, s.wandb_project, s.as_dict())
        bar = tqdm(total=steps, initial=step, unit="step", mininterval=0.5 if sys.stderr.isatty() else 15)
        at_end.enter_context(bar)  # an error starts on a line of its own

    def state(with_optimizer=True):
        return {
            "model": dict(model.state_dict()),
            "config": asdict(config),
            "optimizer": {name: optimizer.state[p] for name, p in model.named_parameters() if with_optimizer},
            "scaler": scaler.state_dict(),
            "step": step,
            "seconds": seconds,
            "best_loss": best_loss,
            "settings": s.as_dict(),
            "data": data,
            "code": code_hash(),
        }

    received = []  # signals that ask for an end after this step
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))

    stop = False
    while step < last_step and not stop:
        started = time.time()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step + 1, steps, s) * group["lr_scale"]
        torch.manual_seed(stream_seed(s.seed, "dropout", step, machine.rank))
        loss = 0.0
        for micro in range(accumulate):
            first = step * sequences + (micro * machine.world + machine.rank) * s.micro_batch
            blocks = train_blocks.shuffled(first, first + s.micro_batch)
            x, y = train_blocks.batch(blocks, s.micro_batch, machine.device)
            sync = wrapped is model or micro == accumulate - 1  # gradients are exchanged once a step
            with contextlib.nullcontext() if sync else wrapped.no_sync():
                with machine.autocast():
                    _, micro_loss = wrapped(x, y, return_logits=False)
                scaler.scale(micro_loss / accumulate).backward()
            loss += micro_loss.detach() / accumulate
            del micro_loss  # and with it the graph, before the next one is built: a quarter less memory
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf).item()
        loss, stop = machine.sum(loss.item() / machine.world, len(received))  # all processes stop at the same step
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or scaler.is_enabled()):
            raise not_finite(f"step {step + 1}: loss {loss}, gradient norm {grad_norm}")
        scaler.step(optimizer)  # leaves out a step whose float16 gradients overflowed
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        duration = time.time() - started
        seconds += duration

        if chief:
            speed = s.batch_tokens / duration
            bar.set_postfix_str(f"loss {loss:.4f}, {speed:,.0f} tokens/s", refresh=False)
            bar.update()
            if step % s.log_every == 0 or step == steps:
                metrics.write(
                    step=step,
                    tokens=step * s.batch_tokens,
                    epoch=step * sequences / train_blocks.n_full,
                    loss=loss,
                    lr=optimizer.param_groups[0]["lr"],
                    grad_norm=grad_norm if math.isfinite(grad_norm) else None,  # JSON knows no infinity
                    tokens_per_sec=speed,
                    memory=machine.peak_memory(),
                    seconds=seconds,
                )
        if step % s.eval_every == 0 or step == steps:
            results = run_eval()
            if chief:
                metrics.write(step=step, tokens=step * s.batch_tokens, seconds=seconds, **results)
                bar.write(f"step {step}: validation loss {results['eval_loss']:.4f}")
                if results["eval_loss"] < best_loss:
                    best_loss = results["eval_loss"]
                    save_whole(out_dir / "best.pt", state(with_optimizer=False))
        if chief and (step % s.checkpoint_every == 0 or step == last_step or stop):
            if not all(p.isfinite().all() for p in model.parameters()):
                raise not_finite(f"step {step}: parameters that are not finite")
            metrics.sync()
            save_checkpoint(out_dir, state())
            saved_step = step

    if chief:
        bar.close()
        if step == steps:
            print_eval(results)
            if s.sample_tokens:
                show_sample(model, tokenizer, s.sample_tokens, machine.device)
            if config.mode.weights == "learned":
                print("\n***** learned residual weights *****")
                print(residual_text(residual_report(model)), end="")
        else:
            anew = s.overwrite or s.init_from == "resume_prev"
            options = " with --overwrite=False --init_from=resume" if anew else ""
            print(f"stopped after step {step} of {steps}; the same command{options} goes on from there")
    return STOP_SIGNALS[received[0]] if received else 0


if __name__ == "__main__":
    run_main(main)
