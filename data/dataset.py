"""
A dataset is a folder with train.bin and val.bin (token ids, nothing else) and meta.json, which describes them. Training
reads it in windows of block_size tokens.

meta.json is removed first and written last, and it holds the bins' lengths: a folder whose preparation was killed is
never taken for a dataset.
"""

import dataclasses
import fcntl
import hashlib
import math
import os
from pathlib import Path

import numpy as np

from data.tokenizer import MAX_VOCAB, load_tokenizer
from lib.errors import UserError, refuse, user_error_from_os
from lib.files import read_json

DATA_DIR = Path(__file__).resolve().parent
SPLITS = ("train", "val")
BIN_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}  # little-endian on every machine
MAX_META_BYTES = 1 << 16


# --- the format -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Meta:
    """meta.json, field by field."""

    tokenizer: str  # bytes, gpt2, or hf: the tokenizer.json in the same folder
    vocab_size: int  # every id is below it
    eot_id: int  # ends every document
    dtype: str  # of the bins: uint16 or uint32
    train_tokens: int  # end-of-text tokens included
    val_tokens: int
    train_bytes: int  # of the documents' text in UTF-8; end-of-text tokens count nothing
    val_bytes: int
    train_documents: int
    val_documents: int
    source: str  # for people
    source_sha256: str  # of the text in UTF-8, train then val, with nothing between documents (fineweb_edu: see there)


def bin_dtype_name(vocab_size):
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def prepare_command(folder):
    """The command that makes the dataset in folder; shakespeare_gpt2, say, by shakespeare's script."""
    folder = Path(os.path.abspath(folder))
    scripts = [path.parent.name for path in DATA_DIR.glob("*/prepare.py")]
    script = max((name for name in scripts if f"{folder.name}_".startswith(f"{name}_")), key=len, default="text")
    command = f"python data/{script}/prepare.py"
    if script == "text":
        command += " PATH..."
    if script != folder.name:
        command += f" --out {folder.name}"
    if folder.parent != DATA_DIR:
        command += f" --data-dir {folder.parent}"
    return command


def from_json(cls, values, path):
    """A dataclass from the JSON of a file: its fields and no others, of their types, no number negative or endless."""
    types = {field.name: field.type for field in dataclasses.fields(cls)}
    same = isinstance(values, dict) and values.keys() == types.keys()
    refuse(not same, f"{path} is damaged: it must hold {', '.join(types)}")
    for name, kind in types.items():
        good = type(values[name]) is kind and (kind is not int or 0 <= values[name] < 2**63)
        refuse(not good, f"{path} is damaged: {name} is not of type {kind.__name__}, negative or too large")
    return cls(**values)


def load_meta(folder):
    """The checked meta.json of a dataset whose bins are complete; anything else is a UserError."""
    try:
        return read_meta(Path(folder))
    except UserError as error:
        raise UserError(f"{error}: run {prepare_command(folder)}") from None


def read_meta(folder):
    path = folder / "meta.json"
    with user_error_from_os(f"read the dataset in {folder}"):
        refuse(not path.is_file(), f"there is no prepared dataset in {folder}")
        bin_sizes = {file.stem: file.stat().st_size for file in folder.glob("*.bin") if file.is_file()}
    meta = from_json(Meta, read_json(path, MAX_META_BYTES), path)
    fits = meta.eot_id < meta.vocab_size <= MAX_VOCAB and meta.dtype == bin_dtype_name(meta.vocab_size)
    refuse(not fits, f"vocab_size, eot_id and dtype in {path} do not fit together")
    for split in SPLITS:
        n_tokens = getattr(meta, f"{split}_tokens")
        whole = n_tokens > 0 and bin_sizes.get(split) == n_tokens * BIN_DTYPES[meta.dtype].itemsize
        refuse(not whole, f"{folder / split}.bin is missing or does not have the size that {path} says")
    return meta


def load_tokens(folder, split):
    """A split's token ids, memory-mapped and read-only."""
    return np.memmap(Path(folder) / f"{split}.bin", dtype=BIN_DTYPES[load_meta(folder).dtype], mode="r")


def dataset_folder(name, machine):
    """The folder of a dataset in data/, or at a path. pydocs is prepared at its first use."""
    folder = Path(name) if os.sep in name else DATA_DIR / name
    if machine.chief and name == "pydocs" and not (folder / "meta.json").exists():
        from data.pydocs.prepare import prepare  # which imports this module

        with open(folder / "lock", "a") as lock:  # of several first runs at once, one prepares
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "meta.json").exists():
                prepare(folder, load_tokenizer("bytes", None))
    machine.wait_for_all()
    return folder


# --- batches ----------------------------------------------------------------------------------------------------------


def seed_for(*key):
    """An independent 63-bit seed for each key, such as (seed, "dropout", step, rank)."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little") >> 1


class Windows:
    """
    Tokens cut into windows of block_size inputs and their targets, the next tokens. An epoch is one shuffled pass over
    all full windows; epochs follow without a gap, so the batch of a step depends on nothing but (seed, step).
    """

    def __init__(self, tokens, block_size, vocab_size, seed):
        self.tokens, self.block_size, self.vocab_size, self.seed = tokens, block_size, vocab_size, seed
        self.n_full = (len(tokens) - 1) // block_size
        self.n_all = math.ceil((len(tokens) - 1) / block_size)  # with the short one at the end
        self.orders = {}  # of this epoch and the one before it

    def order(self, epoch):
        if epoch not in self.orders:
            self.orders = {e: order for e, order in self.orders.items() if e == epoch - 1}
            self.orders[epoch] = np.random.default_rng(seed_for(self.seed, "data", epoch)).permutation(self.n_full)
        return self.orders[epoch]

    def shuffled(self, start, end):
        """Windows number start … end-1 of the endless shuffled sequence."""
        return [self.order(n // self.n_full)[n % self.n_full] for n in range(start, end)]

    def batch(self, windows, rows, device):
        """Inputs and targets (rows, T); what the short last window or a short last batch lacks are targets of -1."""
        import torch  # takes seconds, and preparation does without

        length = self.block_size + 1
        ids = np.full((rows, length), -1, dtype=np.int64)
        for row, window in zip(ids, windows, strict=False):
            piece = self.tokens[window * self.block_size :][:length]
            row[: len(piece)] = piece
        largest = ids.max()
        if largest >= self.vocab_size:
            raise UserError(f"{self.tokens.filename} holds token {largest}, but the vocabulary is {self.vocab_size}")
        ids = torch.from_numpy(ids)
        if device.type == "cuda":
            ids = ids.pin_memory().to(device, non_blocking=True)
        else:
            ids = ids.to(device)
        return ids[:, :-1].clamp(min=0), ids[:, 1:]
