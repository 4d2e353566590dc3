"""
Checkpoints are safetensors files: tensors and text, nothing that could be executed.

    model.NAME               the parameters and buffers; a tied head is stored once, as wte
    optimizer.NAME.MOMENT    of each parameter; none in best.safetensors
    metadata: run            one JSON text: config, settings, step, seconds, best_loss, data, code, scaler
    metadata: crc32          of that text and all tensors: a flipped bit is noticed
"""

import contextlib
import json
import math
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from lib.code import code_hash
from lib.errors import UserError, one_line, refuse
from lib.files import open_whole
from model import GPT, GPTConfig

MAX_RUN_BYTES = 1_000_000
RUN_TYPES = {
    "config": dict,  # the model's
    "settings": dict,  # as they were asked for
    "step": int,
    "seconds": float,
    "best_loss": (float, type(None)),  # null: there was no evaluation yet
    "data": dict,  # the dataset's meta.json
    "code": str,
    "scaler": dict,
}
SCALER = {
    "scale": float,
    "growth_factor": float,
    "backoff_factor": float,
    "growth_interval": int,
    "_growth_tracker": int,
}


@dataclass
class Checkpoint:
    model: GPT
    optimizer: dict  # for each parameter's name its moments; none in best.safetensors
    config: GPTConfig
    settings: dict  # as they were asked for, unchecked: whoever resumes checks them
    step: int
    seconds: float
    best_loss: float
    data: dict
    code: str
    scaler: dict


# --- writing ----------------------------------------------------------------------------------------------------------


def save_checkpoint(path, model, optimizer, run):
    """
    Whole or not at all. optimizer: None to keep the model alone. run: settings, step, seconds, best_loss, data, scaler;
    what else RUN_TYPES lists is added here.
    """
    tied = {"lm_head.weight"} if model.config.tie_weights else set()
    tensors = {f"model.{name}": t for name, t in model.state_dict().items() if name not in tied}
    for name, p in model.named_parameters() if optimizer else ():
        tensors |= {f"optimizer.{name}.{moment}": t for moment, t in optimizer.state[p].items()}
    best_loss = run["best_loss"] if math.isfinite(run["best_loss"]) else None
    run = json.dumps(run | {"best_loss": best_loss, "config": asdict(model.config), "code": code_hash()})
    write_tensors(path, tensors, run)


def write_tensors(path, tensors, run):
    """The format by hand, since the library would first copy all tensors into one text."""
    by_alignment = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in by_alignment}
    kinds = {"float32": "F32", "int64": "I64"}
    crc, end, header = zlib.crc32(run.encode()), 0, {}
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": kinds[array.dtype.name], "shape": array.shape, "data_offsets": [start, end]}
        crc = zlib.crc32(array.data, crc)
    header = json.dumps({"__metadata__": {"run": run, "crc32": str(crc)}} | header).encode()
    header += b" " * (-len(header) % 8)
    with open_whole(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for array in arrays.values():
            file.write(array.data)


# --- reading ----------------------------------------------------------------------------------------------------------


def load_checkpoint(path):
    """A checked Checkpoint. Names and sizes are held against its config before anything is allocated."""
    with open_checkpoint(path) as file:
        run = parse_run(file.metadata())
        config = GPTConfig(**{key: tuple(v) if isinstance(v, list) else v for key, v in run["config"].items()})
        tensors = {name: file.get_tensor(name) for name in file.offset_keys()}  # mapped: nothing is read yet
        state = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        if config.tie_weights:
            state["lm_head.weight"] = state["wte.weight"]
        check_types(state)
        model = GPT.from_state(config, state)
        optimizer = optimizer_moments(model, {name: t for name, t in tensors.items() if not name.startswith("model.")})
        for tensor in (*model.parameters(), *model.buffers(), *(t for of in optimizer.values() for t in of.values())):
            tensor.data = tensor.data.clone()  # a copy of our own: the file is going to be replaced
        crc = zlib.crc32(file.metadata()["run"].encode())
        for tensor in tensors.values():  # in the file's order
            crc = zlib.crc32(tensor.numpy().data, crc)
        refuse(str(crc) != file.metadata()["crc32"], "its checksum is wrong")
    best_loss = math.inf if run["best_loss"] is None else run["best_loss"]
    return Checkpoint(**run | {"model": model, "optimizer": optimizer, "config": config, "best_loss": best_loss})


def read_run(path):
    """What a checkpoint says about its run, without its tensors: the keys of RUN_TYPES."""
    with open_checkpoint(path) as file:
        return parse_run(file.metadata())


@contextlib.contextmanager
def open_checkpoint(path):
    """The file for reading; whatever goes wrong with it is a UserError that says what to do."""
    path = Path(path)
    refuse(not os.path.exists(path), f"there is no {path}")
    try:
        refuse(not path.is_file(), "it is not a file")  # a pipe would never end
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:  # a damaged or hostile file can fail anywhere
        advice = "use another checkpoint"
        if path.name == "ckpt.safetensors":
            advice = "train.py resumes from the one before it with --init_from=resume_prev"
        reason = error if isinstance(error, UserError) else one_line(error)
        raise UserError(f"{path} is damaged or not a checkpoint ({str(reason)[:200]}): {advice}") from None


def parse_run(metadata):
    """The metadata's `run` as a dict, everything in it of its type."""
    refuse(metadata is None or metadata.keys() != {"run", "crc32"}, "it holds something else")
    refuse(len(metadata["run"]) > MAX_RUN_BYTES, "its description is too long")
    run = json.loads(metadata["run"], parse_int=bounded_int, parse_float=finite, parse_constant=finite)
    refuse(not isinstance(run, dict) or run.keys() != RUN_TYPES.keys(), "its description is not that of a run")
    for key, kind in RUN_TYPES.items():
        refuse(not isinstance(run[key], kind) or isinstance(run[key], bool), f"its {key} is {run[key]!r}")
    refuse(run["step"] < 0 or run["seconds"] < 0, "its step or time is negative")
    scaler = {name: type(value) for name, value in run["scaler"].items()}
    refuse(scaler not in ({}, SCALER) or min(run["scaler"].values(), default=0) < 0, "its scaler is none")
    return run


def bounded_int(text):
    refuse(len(text) > 20 or not -(2**63) <= int(text) < 2**63, f"the number {text[:30]} is too large")
    return int(text)


def finite(text):
    value = float(text)
    refuse(not math.isfinite(value), f"the number {text[:30]} is not finite")
    return value


def check_types(state):
    for name, tensor in state.items():
        wanted = torch.int64 if name.endswith("num_batches_tracked") else torch.float32
        refuse(tensor.dtype != wanted, f"tensor {name} is of {tensor.dtype}")


def optimizer_moments(model, tensors):
    """For each parameter's name AdamW's moments; nothing at all in a file that holds the model alone."""
    if not tensors:
        return {}
    check_types(tensors)
    moments, wanted = {}, {}
    for name, p in model.named_parameters():
        shapes = {"step": (), "exp_avg": tuple(p.shape), "exp_avg_sq": tuple(p.shape)}
        wanted |= {f"optimizer.{name}.{moment}": shape for moment, shape in shapes.items()}
        moments[name] = {moment: tensors.get(f"optimizer.{name}.{moment}") for moment in shapes}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    refuse(given != wanted, "the optimizer's state is not that of the model")
    return moments
