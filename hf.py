"""
Hugging Face checkpoints in and out: folders of GPT-2 and Llama models.

A folder may come from a stranger. Nothing in it is executed, and before anything is allocated the sizes in its
config.json are held against the tensors that its files really contain.
"""

import json
import os
import pickletools
import shutil
import zipfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from model import GPTConfig

OVERRIDES = ("dropout", "block_size", "residual_mode", "recompute")


@dataclass
class Family:
    architecture: str  # Hugging Face's class
    form: dict  # the settings of GPTConfig that make this family
    keys: dict  # setting of GPTConfig: key of config.json
    defaults: dict  # keys that may be missing there, and what they are then
    plain: dict  # keys that our model has only this value of
    activations: dict  # theirs: ours; when saving, the first that fits
    prefix: str  # of all tensors but the head's; missing in old files and in those of a model without head
    modules: dict  # theirs: ours; several of ours stand one below the other in one of theirs
    buffers: tuple  # endings of tensors that hold no parameters: masks and rope tables in old files


FORM = {"norm_position": "pre", "dconv": False, "swish_beta": 1.0, "residual_mode": "baseline"}
FAMILIES = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        form={"norm": "layernorm", "position": "learned", "bias": True, **FORM},
        keys={
            "block_size": "n_positions",
            "vocab_size": "vocab_size",
            "n_layer": "n_layer",
            "n_head": "n_head",
            "n_embd": "n_embd",
            "ffn_hidden": "n_inner",
            "norm_eps": "layer_norm_epsilon",
            "activation": "activation_function",
            "tie_weights": "tie_word_embeddings",
        },
        defaults={
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        },
        plain={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
            "quantization_config": None,
        },
        activations={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"},
        prefix="transformer.",
        modules={
            "wte": "wte",
            "wpe": "wpe",
            "h.*.ln_1": "h.*.norm1",
            "h.*.attn.c_attn": "h.*.attn.q h.*.attn.k h.*.attn.v",
            "h.*.attn.c_proj": "h.*.attn.o",
            "h.*.ln_2": "h.*.norm2",
            "h.*.mlp.c_fc": "h.*.mlp.up",
            "h.*.mlp.c_proj": "h.*.mlp.down",
            "ln_f": "norm_f",
            "lm_head": "lm_head",
        },
        buffers=(".attn.bias", ".attn.masked_bias"),
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        form={"norm": "rmsnorm", "position": "rope", **FORM},
        keys={
            "block_size": "max_position_embeddings",
            "vocab_size": "vocab_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_kv_head": "num_key_value_heads",
            "n_embd": "hidden_size",
            "ffn_hidden": "intermediate_size",
            "norm_eps": "rms_norm_eps",
            "activation": "hidden_act",
            "tie_weights": "tie_word_embeddings",
            "bias": "attention_bias",  # and mlp_bias, which must be the same
        },
        defaults={
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
        },
        plain={"quantization_config": None},
        activations={"silu": "swiglu", "gelu": "geglu", "relu": "reglu"},
        prefix="model.",
        modules={
            "embed_tokens": "wte",
            "layers.*.input_layernorm": "h.*.norm1",
            "layers.*.self_attn.q_proj": "h.*.attn.q",
            "layers.*.self_attn.k_proj": "h.*.attn.k",
            "layers.*.self_attn.v_proj": "h.*.attn.v",
            "layers.*.self_attn.o_proj": "h.*.attn.o",
            "layers.*.post_attention_layernorm": "h.*.norm2",
            "layers.*.mlp.gate_proj": "h.*.mlp.gate",
            "layers.*.mlp.up_proj": "h.*.mlp.up",
            "layers.*.mlp.down_proj": "h.*.mlp.down",
            "norm": "norm_f",
            "lm_head": "lm_head",
        },
        buffers=(".rotary_emb.inv_freq",),
    ),
}


def load_pretrained(cls, name_or_dir, overrides):
    """A GPT (cls) with the weights of a Hugging Face folder or hub name, in float32."""
    for name in overrides:
        if name not in OVERRIDES:
            raise ValueError(f"from_pretrained cannot set '{name}': it can set {', '.join(OVERRIDES)}")
    folder = find_folder(name_or_dir)
    family, config = read_config(folder / "config.json")
    wanted = replace(config, **overrides)
    if wanted.block_size > config.block_size:
        raise ValueError(f"block_size={config.block_size} of {folder} can be made smaller, not {wanted.block_size}")

    found = {}
    for name, entry in open_weights(folder):
        short = name.removeprefix(family.prefix)
        if short in found:
            raise ValueError(f"{folder} holds the tensor {name!r} twice")
        if not short.endswith(family.buffers):
            found[short] = entry

    # A lower bound of the parameters, in Python's boundless integers
    claim = config.n_embd * (config.vocab_size + config.n_layer * (config.n_embd + config.ffn_hidden))
    if config.position == "learned":
        claim += config.n_embd * config.block_size
    if claim > sum(shape.numel() for shape, _ in found.values()) or config.n_layer > len(found):
        raise ValueError(f"{folder}/config.json describes a bigger model than its weight files hold")

    with torch.device("meta"):  # shapes only, no memory
        model = cls(replace(wanted, block_size=config.block_size))
    parameters = dict(model.named_parameters())  # a tied head is not in it
    state = {name: torch.ones(p.shape) for name, p in parameters.items() if name.endswith("residual_weight")}
    for theirs, ours in tensor_names(family, config.n_layer, parameters):
        if theirs not in found:
            raise ValueError(f"{folder} has no tensor '{theirs}'")
        shape, expected = found[theirs][0], to_theirs(theirs, ours, parameters).shape
        if shape != expected:
            raise ValueError(
                f"the tensor '{theirs}' in {folder} is {tuple(shape)}; by its config.json it is {tuple(expected)}"
            )
        state.update(to_ours(theirs, ours, read_tensor(folder, theirs, found.pop(theirs))))
    if config.tie_weights:
        state["lm_head.weight"] = state["wte.weight"]
        head = found.pop("lm_head.weight", None)
        if head and not torch.equal(read_tensor(folder, "lm_head.weight", head).float(), state["wte.weight"]):
            raise ValueError(f"{folder} ties the head to the embedding, but its 'lm_head.weight' is another tensor")
    if found:
        raise ValueError(f"{folder} has a tensor {min(found)!r} that a {family.architecture} does not have")

    model = cls.from_state(model.config, state)
    model.crop_block_size(wanted.block_size)
    return model


def save_pretrained(model, folder):
    """Write config.json and model.safetensors for transformers: the whole folder or nothing."""
    config, folder = model.config, Path(folder).resolve()
    model_type = "gpt2" if config.position == "learned" else "llama"
    family = FAMILIES[model_type]
    check_form(config, model_type, family)
    save_file = needed("safetensors.torch", "safetensors").save_file
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: choose another folder")

    parameters = dict(model.named_parameters())
    tensors = {}
    for theirs, ours in tensor_names(family, config.n_layer, parameters):
        name = theirs if theirs == "lm_head.weight" else family.prefix + theirs
        tensors[name] = to_theirs(theirs, ours, parameters).detach().cpu().contiguous()

    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        files = temporary / "config.json", temporary / "model.safetensors"
        files[0].write_text(json.dumps(their_config(config, model_type, family), indent=2) + "\n")
        save_file(tensors, files[1], metadata={"format": "pt"})
        files[1].chmod(files[0].stat().st_mode)  # safetensors lets nobody else read it
        for path in (*files, temporary):
            sync(path)
        temporary.rename(folder)  # onto an empty folder or none: fails if it is no longer that
        sync(folder.parent)
    except Exception as error:  # OSError, and safetensors' own for a full disk
        raise ValueError(f"cannot write {folder}: {first_line(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# names and tensors


def tensor_names(family, n_layer, parameters):
    """Their tensor's name without prefix, and our parameters in it; biases only where we have them."""
    for theirs, ours in family.modules.items():
        for layer in range(n_layer) if "*" in theirs else (0,):
            for kind in ("weight", "bias"):
                names = [f"{name}.{kind}".replace("*", str(layer)) for name in ours.split()]
                if names[0] in parameters:
                    yield f"{theirs}.{kind}".replace("*", str(layer)), names


def is_transposed(theirs):
    """GPT-2's c_… modules are Conv1D, whose weight is (in, out); Linear's is (out, in)."""
    return ".c_" in theirs and theirs.endswith("weight")


def to_theirs(theirs, ours, parameters):
    tensor = torch.cat([parameters[name] for name in ours])
    return tensor.T if is_transposed(theirs) else tensor


def to_ours(theirs, ours, tensor):
    """Each part in memory of its own: the file's may be mapped, and parts of one tensor would share it."""
    parts = (tensor.T if is_transposed(theirs) else tensor).chunk(len(ours))
    own = {"dtype": torch.float32, "copy": True, "memory_format": torch.contiguous_format}
    return {name: part.to(**own) for name, part in zip(ours, parts, strict=True)}


# config.json


def read_config(path):
    """The family and the GPTConfig of a config.json."""
    theirs = read_json(path)
    model_type = str(theirs.get("model_type"))
    if model_type not in FAMILIES:
        raise ValueError(f"{path} is of a model of type {model_type!r}: only {' and '.join(FAMILIES)} can be loaded")
    family = FAMILIES[model_type]
    settings = dict(family.form)
    for ours, key in family.keys.items():
        if key not in theirs and key not in family.defaults:
            raise ValueError(f"{path} does not say '{key}'")
        settings[ours] = theirs.get(key, family.defaults.get(key))
    for key, value in family.plain.items():
        if theirs.get(key, value) != value:
            raise ValueError(f"{path} says {key}={theirs[key]!r}: only {value} can be loaded")
    activation = str(settings["activation"])
    if activation not in family.activations:
        known = ", ".join(family.activations)
        raise ValueError(f"{path} says {family.keys['activation']}={activation!r}: only {known} can be loaded")
    settings["activation"] = family.activations[activation]
    if model_type == "llama":
        if theirs.get("mlp_bias", False) != settings["bias"]:
            raise ValueError(f"{path} has biases in attention or MLP alone: only both or neither can be loaded")
        settings["rope_theta"] = rope_theta(path, theirs)
    try:
        config = GPTConfig(**settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if theirs.get("head_dim") not in (None, config.head_size):
        raise ValueError(
            f"{path} says head_dim={theirs['head_dim']!r}: only {config.head_size}, the width/heads, can be loaded"
        )
    return family, config


def rope_theta(path, theirs):
    """transformers 5 writes a dict rope_parameters; older ones rope_theta, and a dict rope_scaling where it scales."""
    theta = theirs.get("rope_theta", 10000.0)
    for key in ("rope_scaling", "rope_parameters"):
        rope = theirs.get(key) or {}
        if not isinstance(rope, dict) or any(
            value not in (None, "default") for name, value in rope.items() if name != "rope_theta"
        ):
            raise ValueError(f"{path} says {key}={rope!r}: scaled rope cannot be loaded")
        theta = rope.get("rope_theta", theta)
    return theta


def their_config(config, model_type, family):
    theirs = {"model_type": model_type, "architectures": [family.architecture]}
    theirs.update({key: getattr(config, ours) for ours, key in family.keys.items()})
    names = {ours: name for name, ours in reversed(family.activations.items())}
    theirs[family.keys["activation"]] = names[config.activation]
    # else transformers takes the ids of its own tokenizers and ends texts at them
    theirs.update(bos_token_id=None, eos_token_id=None)
    if model_type == "gpt2":
        theirs.update(resid_pdrop=config.dropout, embd_pdrop=config.dropout, attn_pdrop=0.0)
    else:
        theirs.update(mlp_bias=config.bias, rope_theta=config.rope_theta)  # where every transformers looks for it
    return theirs


def check_form(config, model_type, family):
    reasons = [
        f"{name} must be {value!r}, not {getattr(config, name)!r}"
        for name, value in family.form.items()
        if getattr(config, name) != value
    ]
    if config.activation not in family.activations.values():
        known = ", ".join(dict.fromkeys(family.activations.values()))
        reasons.append(f"activation must be one of {known}, not '{config.activation}'")
    if "n_kv_head" not in family.keys and config.n_kv_head != config.n_head:
        reasons.append(f"n_kv_head={config.n_kv_head} must be n_head={config.n_head}")
    if reasons:
        raise ValueError(f"Hugging Face's {model_type} cannot hold this model: {'; '.join(reasons)}")


# files


def find_folder(name_or_dir):
    """The folder itself, or that of a hub name's download: config.json, tokenizer and weights, no code."""
    folder = Path(name_or_dir)
    if folder.is_dir():
        return folder
    download = needed("huggingface_hub").snapshot_download
    try:
        for kind in ("model*.safetensors*", "pytorch_model*.bin*"):  # the second only if the first finds nothing
            folder = Path(download(str(name_or_dir), allow_patterns=["*config.json", "tokenizer.json", kind]))
            if any(folder.glob(kind)):
                break
    except Exception as error:  # no network, no such name, no access: each library below has errors of its own
        raise ValueError(
            f"'{name_or_dir}' is not a folder here, and the Hugging Face hub did not give it "
            f"({first_line(error)}): name a local folder"
        ) from error
    return folder


def open_weights(folder):
    """(name, (shape, function that reads the tensor)) of each tensor in the weight file, or in the index's shards."""
    for name, open_file in (("model.safetensors", open_safetensors), ("pytorch_model.bin", open_bin)):
        if (folder / name).is_file():
            return open_file(folder / name)
        if (folder / f"{name}.index.json").is_file():
            return [entry for path in shards(folder / f"{name}.index.json") for entry in open_file(path)]
    raise ValueError(f"{folder} has no weights: model.safetensors, pytorch_model.bin, or an index of shards")


def shards(index):
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} lists no weight files")
    for name in sorted({str(name) for name in weight_map.values()}):
        if any(c in name for c in "/\\\0"):
            raise ValueError(f"{index} lists {name!r}: only files in its own folder are read")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index.parent} has no {name!r}, which {index.name} lists")
        yield index.parent / name


def open_safetensors(path):
    safe_open = needed("safetensors").safe_open
    try:
        file = safe_open(path, framework="pt")
        shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}
    except Exception as error:  # OSError, and safetensors' own
        raise ValueError(f"{path} is not a whole safetensors file: {first_line(error)}") from error
    return [(name, (shape, partial(file.get_tensor, name))) for name, shape in shapes.items()]


# What a pickled dict of tensors is made of. torch.load(weights_only=True) calls nothing dangerous, but more than these:
# bytearray(10**12), for one.
PICKLED = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"} | {
    f"torch {kind}Storage" for kind in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Byte", "Bool")
}


def load_torch_file(path):
    """
    What torch.save wrote, its tensors mapped from the file. Nothing in the file is called, its checksums are right, and
    its tensors are no bigger than it is; else a ValueError.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # as torch has written since 1.6
            (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed, which torch.save does not do")
            damaged = archive.testzip()  # torch.load does not look at the checksums
            if damaged:
                raise ValueError(f"the checksum of its {damaged} is wrong")
            for opcode, argument, _ in pickletools.genops(archive.read(pickled)):
                if opcode.name == "GLOBAL" and argument not in PICKLED:
                    raise ValueError(f"it wants to call {argument!r}, which no tensor needs")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # a tensor may claim any shape with strides of 0; twice the file, since a tied head is stored once
        if sum(tensor.nbytes for tensor in tensors_in(content)) > 2 * os.path.getsize(path):
            raise ValueError("its tensors claim to be bigger than the file")
    except FileNotFoundError:
        raise
    except Exception as error:  # damaged bytes can make the unpickler fail in any way
        raise ValueError(first_line(error)) from error
    return content


def tensors_in(content):
    """The tensors in dicts of dicts: what else there is, torch.save did not write for us."""
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from tensors_in(value)


def open_bin(path):
    try:
        tensors = load_torch_file(path)
        if not isinstance(tensors, dict) or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
        ):
            raise ValueError("it holds something else")
    except ValueError as error:
        raise ValueError(f"{path} is not a dict of tensors by torch.save: {error}") from error
    return [(name, (tensor.shape, tensor.detach)) for name, tensor in tensors.items()]


def read_tensor(folder, name, entry):
    _, read = entry
    try:
        tensor = read()
    except Exception as error:  # a dtype unknown to torch
        raise ValueError(f"cannot read the tensor '{name}' in {folder}: {first_line(error)}") from error
    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"the tensor '{name}' in {folder} is {tensor.dtype}: quantised weights cannot be loaded")
    return tensor


def read_json(path):
    if not path.is_file():  # a pipe or device would never end
        raise ValueError(f"{path.parent} has no {path.name}: it must be a folder with a Hugging Face checkpoint")
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def needed(module, package=None):
    """Import what only this file needs."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module
        raise ValueError(f"Hugging Face checkpoints need the package {package}: pip install {package}") from error


def first_line(error):
    return str(error).strip().partition("\n")[0] or type(error).__name__
