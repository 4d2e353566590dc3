"""
Hugging Face folders in and out: GPT-2 and Llama models as config.json and safetensors files; and back in, what
tools/export has made of other models.

A folder may come from a stranger. Nothing in it is executed or unpickled, and before anything is allocated the sizes in
its config.json are held against the tensors that its files really contain.
"""

import contextlib
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from data.tokenizer import load_tokenizer
from lib.errors import UserError, one_line, refuse
from lib.files import read_json, write_json
from model import GPT, GPTConfig, initial_residual

OVERRIDES = ("dropout", "block_size", "residual_mode", "recompute", "reruns", "residual_start")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CONVERT = (
    "another format is converted by opening and saving it once with transformers: "
    'AutoModelForCausalLM.from_pretrained("{0}").save_pretrained("{0}")'
)
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # as in rope_scaling


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


FORM = {"norm_position": "pre", "dconv": False, "swish_beta": 1.0, "residual_mode": "baseline", "loops": 1}
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
        plain={"quantization_config": None, "partial_rotary_factor": None},
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
    "regpt": Family("ReGPTForCausalLM", {}, {}, {}, {}, {}, "model.", {}, ()),  # all settings and names are our own
}


def load_pretrained(cls, name_or_dir, overrides):
    """A GPT (cls) with the weights of a Hugging Face folder or hub name, in float32."""
    for name in overrides:
        refuse(name not in OVERRIDES, f"from_pretrained cannot set '{name}': it can set {', '.join(OVERRIDES)}")
    folder = find_folder(name_or_dir)
    family, config = read_config(folder / "config.json")
    wanted = replace(config, **overrides)
    larger = wanted.block_size > config.block_size
    refuse(larger, f"block_size={config.block_size} of {folder} can be made smaller, not {wanted.block_size}")

    found = open_weights(folder, family)
    check_sizes(folder, config, found)
    state = our_tensors(folder, family, config, found)
    if any("residual_" in name for name in state):
        other = [key for key in ("residual_mode", "residual_start") if getattr(wanted, key) != getattr(config, key)]
        refuse(other, f"{folder} has learned the residual of '{config.residual_mode}': leave out {', '.join(other)}")
    elif wanted.residual_mode != config.residual_mode:
        state |= initial_residual(wanted)
    try:
        model = cls.from_state(replace(wanted, block_size=config.block_size), state)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    for tensor in (*model.parameters(), *model.buffers()):  # a copy of our own: the file's is mapped
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        tensor.data = tensor.data.to(dtype, copy=True, memory_format=torch.contiguous_format)
    model.crop_block_size(wanted.block_size)
    return model


def load_with_tokenizer(name_or_dir):
    """A GPT and its tokenizer; a folder without one may be GPT-2's."""
    folder = find_folder(name_or_dir)
    model = GPT.from_pretrained(folder)
    has_own = (folder / "tokenizer.json").exists()
    gpt2 = 0 <= model.config.vocab_size - 50257 < 64  # its ids, or those padded for speed
    advice = "put the file there"
    refuse(not has_own and not gpt2, f"{folder} has no tokenizer.json, and its vocabulary is not GPT-2's: {advice}")
    return model, load_tokenizer("hf" if has_own else "gpt2", folder)


def save_pretrained(model, folder):
    """config.json and model.safetensors for transformers: the whole folder or nothing."""
    reasons = "; ".join(misfits(model.config))
    advice = "python -m tools.export writes any run, with the code that it needs"
    refuse(reasons, f"Hugging Face's {model_type(model.config)} cannot hold this model: {reasons}; {advice}")
    with whole_folder(folder) as new:
        write_model(new, their_config(model.config), their_tensors(model))


# names and tensors


def check_sizes(folder, config, found):
    """A lower bound of the parameters, in Python's boundless integers, before anything of that size is made."""
    claim = config.n_embd * (config.vocab_size + config.n_layer * (config.n_embd + config.ffn_hidden))
    if config.position == "learned":
        claim += config.n_embd * config.block_size
    bigger = claim > sum(tensor.numel() for tensor in found.values()) or config.n_layer > len(found)
    refuse(bigger, f"{folder}/config.json describes a bigger model than its weight files hold")


def our_tensors(folder, family, config, found):
    """The tensors by our names; GPT.from_state checks whether they are all there and of their shapes."""
    state, left = {}, dict(found)
    for theirs, ours in tensor_names(family, config.n_layer) if family.modules else ((name, [name]) for name in found):
        if theirs in left:
            tensor = transposed(theirs, left.pop(theirs))
            parts = tensor.chunk(len(ours)) if len(ours) > 1 and tensor.dim() else [tensor]
            state.update(zip(ours, parts, strict=False))
    refuse(left, f"{folder} has a tensor {min(left, default='')!r} that a {family.architecture} does not have")
    if config.tie_weights and "wte.weight" in state:
        embedding = state["wte.weight"]
        head = state.setdefault("lm_head.weight", embedding)
        same = head is embedding or torch.equal(head.float(), embedding.float())
        refuse(not same, f"{folder} ties the head to the embedding, but its 'lm_head.weight' is another tensor")
    return state


def their_tensors(model):
    family, parameters = FAMILIES[model_type(model.config)], dict(model.named_parameters())  # a tied head is not in it
    tensors = {}
    for theirs, ours in tensor_names(family, model.config.n_layer):
        if ours[0] in parameters:
            name = theirs if theirs == "lm_head.weight" else family.prefix + theirs
            tensors[name] = transposed(theirs, torch.cat([parameters[name] for name in ours]))
    return tensors


def tensor_names(family, n_layer):
    """Their tensors' names without prefix, those of biases too, and the names of our tensors in them."""
    for theirs, ours in family.modules.items():
        for layer in range(n_layer) if "*" in theirs else (0,):
            for kind in ("weight", "bias"):
                theirs_and_ours = [f"{name}.{kind}".replace("*", str(layer)) for name in (theirs, *ours.split())]
                yield theirs_and_ours[0], theirs_and_ours[1:]


def transposed(theirs, tensor):
    """GPT-2's c_… modules are Conv1D, whose weight is (in, out); Linear's is (out, in)."""
    return tensor.T if ".c_" in theirs and tensor.dim() == 2 else tensor


# config.json


def read_config(path):
    """The family and the GPTConfig of a config.json."""
    refuse(not path.exists(), f"{path.parent} has no {path.name}: it must be the folder of a Hugging Face model")
    theirs = read_json(path)
    kind = str(theirs.get("model_type"))
    refuse(
        kind not in FAMILIES,
        f"{path} is of a model of type {kind!r}: only {' and '.join(FAMILIES)} can be loaded",
    )
    family = FAMILIES[kind]
    if kind == "regpt":
        refuse(not isinstance(theirs.get("gpt"), dict), f"{path} does not say 'gpt'")
        return family, checked_config(path, theirs["gpt"])
    settings = dict(family.form)
    for ours, key in family.keys.items():
        refuse(key not in theirs and key not in family.defaults, f"{path} does not say '{key}'")
        settings[ours] = theirs.get(key, family.defaults.get(key))
    for key, value in family.plain.items():
        refuse(theirs.get(key, value) != value, f"{path} says {key}={theirs.get(key)!r}: only {value} can be loaded")
    activation, known = str(settings["activation"]), ", ".join(family.activations)
    refuse(
        activation not in family.activations,
        f"{path} says {family.keys['activation']}={activation!r}: only {known} can be loaded",
    )
    settings["activation"] = family.activations[activation]
    if kind == "llama":
        refuse(
            theirs.get("mlp_bias", False) != settings["bias"],
            f"{path} has biases in attention or MLP alone: only both or neither can be loaded",
        )
        settings["rope_theta"], settings["rope_scaling"] = read_rope(path, theirs)
    config = checked_config(path, settings)
    refuse(
        theirs.get("head_dim") not in (None, config.head_size),
        f"{path} says head_dim={theirs.get('head_dim')!r}: only {config.head_size}, the width/heads, can be loaded",
    )
    return family, config


def checked_config(path, settings):
    try:
        return GPTConfig(**settings)
    except (UserError, TypeError) as error:  # TypeError: an unknown setting
        raise UserError(f"{path}: {error}") from None


def read_rope(path, theirs):
    """theta and scaling: from transformers 5's rope_parameters, or from rope_theta and an older rope_scaling."""
    key = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(key) or {}
    refuse(not isinstance(rope, dict), f"{path} says {key}={rope!r}: it must be an object")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    numbers = {k: v for k, v in rope.items() if k not in ("rope_type", "type", "rope_theta") and v is not None}
    refuse(
        kind not in ("default", "llama3") or numbers.keys() != set(LLAMA3 if kind == "llama3" else ()),
        f"{path} says {key}={rope!r}: only rope without scaling, or of rope_type llama3 with {', '.join(LLAMA3)}, "
        "can be loaded",
    )
    theta = rope.get("rope_theta", theirs.get("rope_theta", 10000.0))
    return theta, tuple(numbers[name] for name in LLAMA3) if numbers else None


def model_type(config):
    """The family that a model to save belongs to, if it fits."""
    return "gpt2" if config.position == "learned" else "llama"


def their_config(config):
    family = FAMILIES[model_type(config)]
    theirs = {"model_type": model_type(config), "architectures": [family.architecture]}
    theirs.update({key: getattr(config, ours) for ours, key in family.keys.items()})
    names = {ours: name for name, ours in reversed(family.activations.items())}
    theirs[family.keys["activation"]] = names[config.activation]
    # else transformers takes the ids of its own tokenizers and ends texts at them
    theirs.update(bos_token_id=None, eos_token_id=None)
    if config.position == "learned":
        theirs.update(resid_pdrop=config.dropout, embd_pdrop=config.dropout, attn_pdrop=0.0)
    else:
        theirs.update(mlp_bias=config.bias, rope_theta=config.rope_theta)  # where every transformers looks for it
    if config.rope_scaling:
        *factors, length = config.rope_scaling
        theirs["rope_scaling"] = {"rope_type": "llama3", **dict(zip(LLAMA3, (*factors, int(length)), strict=True))}
    return theirs


def misfits(config):
    """Why the family cannot hold such a model; nothing if it can."""
    family = FAMILIES[model_type(config)]
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
    return reasons


# files


def find_folder(name_or_dir):
    """The folder itself, or that of a hub name's download: config.json, tokenizer and weights, no code."""
    if Path(name_or_dir).is_dir():
        return Path(name_or_dir)
    from huggingface_hub import snapshot_download  # takes a second

    try:
        return Path(snapshot_download(name_or_dir, allow_patterns=["*config.json", "tokenizer.json", "*.safetensors*"]))
    except Exception as error:  # no network, no such name, no access: each library below has errors of its own
        raise UserError(
            f"'{name_or_dir}' is not a folder here, and the Hugging Face hub did not give it "
            f"({one_line(error)}): name a local folder"
        ) from None


def open_weights(folder, family):
    """Their names without prefix, and the tensors, mapped from the weight file or from the index's shards."""
    paths = [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not paths[0].is_file():
        refuse(not index.is_file(), f"{folder} has no model.safetensors: {CONVERT.format(folder)}")
        paths = shards(index)
    found = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except Exception as error:  # OSError, and safetensors' own
            raise UserError(f"{path} cannot be read as safetensors: {one_line(error)}") from None
        for name, tensor in tensors.items():
            short = name.removeprefix(family.prefix)
            if short.endswith(family.buffers):
                continue
            refuse(short in found, f"{folder} holds the tensor {name!r} twice")
            allowed = [torch.int64] if short.endswith("num_batches_tracked") else FLOATS
            refuse(
                tensor.dtype not in allowed,
                f"the tensor {name!r} in {folder} is {tensor.dtype}: quantised weights cannot be loaded",
            )
            found[short] = tensor
    return found


def shards(index):
    weight_map = read_json(index).get("weight_map")
    refuse(not isinstance(weight_map, dict) or not weight_map, f"{index} lists no weight files")
    for name in sorted({str(name) for name in weight_map.values()}):
        refuse(any(c in name for c in "/\\\0"), f"{index} lists {name!r}: only files in its own folder are read")
        refuse(not (index.parent / name).is_file(), f"{index.parent} has no {name!r}, which {index.name} lists")
        yield index.parent / name


def write_model(folder, config, tensors):
    files = folder / "config.json", folder / "model.safetensors"
    write_json(files[0], config)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, files[1], metadata={"format": "pt"})
    files[1].chmod(files[0].stat().st_mode)  # safetensors lets nobody else read it


@contextlib.contextmanager
def whole_folder(folder):
    """A new folder to write into, which takes its name when all is written."""
    folder = Path(folder).resolve()
    refuse(
        folder.is_file() or (folder.is_dir() and any(folder.iterdir())),
        f"{folder} is there already: choose another folder",
    )
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        temporary.rename(folder)  # onto an empty folder or none: fails if it is no longer that
        sync(folder.parent)
    except (OSError, SafetensorError) as error:  # a full disk
        raise UserError(f"cannot write {folder}: {one_line(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
