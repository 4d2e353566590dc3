"""What a run starts from: its data, its plan, and a model with its optimizer, new, pretrained or from a checkpoint."""

import math
from dataclasses import asdict, dataclass, fields

import torch

from data.dataset import Windows, dataset_folder, load_meta, load_tokens, prepare_command, seed_for
from data.tokenizer import load_tokenizer
from lib.errors import refuse
from lib.hf import find_folder
from lib.machine import memory_size
from model import GPT, GPTConfig

PROBE = "Hello, world!\n  naïve café — 3,141.59 日本語 😀\tend"


class Data:
    """A dataset with its tokenizer; once the block_size is known, cut into windows."""

    def __init__(self, name, machine):
        self.name, self.folder = name, dataset_folder(name, machine)
        self.meta = load_meta(self.folder)
        self.tokenizer = load_tokenizer(self.meta.tokenizer, self.folder)

    def cut(self, block_size, seed):
        self.train, self.val = (
            Windows(load_tokens(self.folder, split), block_size, self.meta.vocab_size, seed)
            for split in ("train", "val")
        )
        self.val.n_bytes = self.meta.val_bytes
        short = self.train.n_full == 0 or self.val.n_all == 0 or not self.meta.val_bytes
        refuse(short, f"{self.name} is shorter than one window of {block_size} tokens: use a smaller block_size")


class Plan:
    """A run's length, and how the sequences of a step are shared out: processes × accumulated micro-batches."""

    def __init__(self, s, machine, windows):
        self.sequences, rest = divmod(s.batch_tokens, windows.block_size)
        each, rest_of_processes = divmod(self.sequences, machine.world)
        odd = rest or rest_of_processes or not each
        product = f"block_size × processes = {windows.block_size} × {machine.world}"
        refuse(odd, f"batch_tokens={s.batch_tokens} must be a multiple of {product}")
        self.micro_batch = min(s.micro_batch, each)
        too_large = 8 * self.micro_batch * windows.block_size > memory_size()
        refuse(too_large, f"micro_batch={self.micro_batch} does not fit into this machine's memory")
        while each % self.micro_batch:
            self.micro_batch -= 1
        self.accumulate = each // self.micro_batch
        self.steps = s.max_steps or math.ceil(s.epochs * windows.n_full / self.sequences)
        self.last_step = min(self.steps, s.stop_at or self.steps)  # of this call
        self.epochs = self.steps * self.sequences / windows.n_full


@dataclass
class Training:
    """All that changes from step to step; a checkpoint holds it."""

    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0
    seconds: float = 0.0  # of the steps, without evaluations
    best_loss: float = math.inf


def start_training(s, machine, folder, data, checkpoint):
    """Of this run's checkpoint, of Hugging Face, or new."""
    if checkpoint:
        check_same_data(checkpoint.data, data, folder)
    model = checkpoint.model if checkpoint else new_model(s, data.meta.vocab_size)
    if not checkpoint and s.init_from != "scratch":
        check_tokenizer(s.init_from, model, data, folder)
    vocab, needed = model.config.vocab_size, data.meta.vocab_size
    refuse(needed > vocab, f"vocab_size={vocab} is less than the data's vocabulary of {needed}")
    model.to(machine.device)
    model.checkpoint_recompute = s.checkpoint_recompute
    optimizer = model.configure_optimizers(s.weight_decay, s.learning_rate, (s.beta1, s.beta2), s.residual_lr_scale)
    scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)
    if not checkpoint:
        return Training(model, optimizer, scaler)
    for name, p in model.named_parameters():
        optimizer.state[p] = {moment: m.to(p.device) for moment, m in checkpoint.optimizer[name].items()}
    if checkpoint.scaler:
        scaler.load_state_dict(checkpoint.scaler)
    return Training(model, optimizer, scaler, checkpoint.step, checkpoint.seconds, checkpoint.best_loss)


def padded_vocab(n_vocab):
    """Rounded up to a multiple of 64, for speed."""
    return -(-n_vocab // 64) * 64


def new_model(s, n_vocab):
    """From Hugging Face weights, or from scratch with a padded vocabulary."""
    torch.manual_seed(seed_for(s.seed, "init"))
    settings = {field.name: getattr(s, field.name) for field in fields(GPTConfig)}
    if s.init_from != "scratch":
        return GPT.from_pretrained(s.init_from, **{key: settings[key] for key in settings if key in s.given})
    if "vocab_size" not in s.given:
        settings["vocab_size"] = padded_vocab(n_vocab)
    config = GPTConfig(**settings)
    # a lower bound in boundless integers: what cannot fit would fill the memory first, and a layer is also Python
    weights = config.n_embd * (config.vocab_size + config.n_layer * (config.n_embd + config.ffn_hidden))
    weights += config.n_embd * config.block_size if config.position == "learned" else 0
    too_large = 4 * weights + 130_000 * config.depth > memory_size()
    refuse(too_large, f"a model of more than {weights:,} parameters does not fit into this machine's memory")
    return GPT(config)


def check_tokenizer(name, model, data, folder):
    """A pretrained model must get the ids that it knows."""
    theirs, vocab = find_folder(name), data.tokenizer.vocab_size
    if (theirs / "tokenizer.json").exists():
        own = load_tokenizer("hf", theirs)
        same = own.vocab_size == vocab and own.encode(PROBE) == data.tokenizer.encode(PROBE)
        command = f"{prepare_command(data.folder)} --tokenizer hf:{theirs}"
        refuse(not same, f"{data.name} was prepared with another tokenizer than that of {name}: run {command}")
    elif not 0 <= model.config.vocab_size - vocab < 64:  # more than padding
        sizes = f"{name} has a vocabulary of {model.config.vocab_size:,}, {data.name} one of {vocab:,}"
        folder.warn(f"{sizes}: are they of the same tokenizer?")


def check_same_data(then, data, folder):
    """The same content as when the run began; the source is told for people and may be told differently."""
    now = asdict(data.meta)
    different = [key for key in now if key != "source" and then.get(key) != now[key]]
    values = ", ".join(f"{key} was {then.get(key)} and is {now[key]}" for key in different)
    refuse(different, f"{data.name} is not the data of the run in {folder.path}: {values}; prepare that again")
