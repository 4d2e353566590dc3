"""Hugging Face folders in and out: the same logits as transformers' own code, and nothing let in by a stranger's."""

import json
import os
import random
import resource
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from lib import hf
from lib.errors import UserError
from model import GPT, GPTConfig, ResidualMode, initial_residual

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

GPT2 = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 4}
LLAMA = {
    "vocab_size": 50,
    "max_position_embeddings": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def rope(theta, **scaling):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | scaling}


# theta 100 and heads of 8: the four wavelengths are 6 (stays as it is), 20 (in between), 63 and 199 (times the factor)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"rope_type": "llama3"}


VARIANTS = {
    "gpt2": ("gpt2", {}),
    "gpt2 untied, wide, gelu": ("gpt2", {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "gelu"}),
    "gpt2 relu, eps": ("gpt2", {"activation_function": "relu", "layer_norm_epsilon": 0.3}),
    "gpt2 torch's tanh": ("gpt2", {"activation_function": "gelu_pytorch_tanh", "reorder_and_upcast_attn": True}),
    "llama": ("llama", {}),
    "llama tied, grouped": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "llama one kv head, theta, eps": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 0.3, **rope(77.0)}),
    "llama biases, gelu": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama relu": ("llama", {"hidden_act": "relu", "head_dim": 8}),
    "llama 3's rope": ("llama", rope(100.0, **LLAMA3)),
}


def new_theirs(family, **settings):
    """A model of theirs whose every parameter, norms and biases too, is random and large enough to matter."""
    torch.manual_seed(1)
    if family == "gpt2":
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | settings))
    else:
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | settings))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:  # norms around 1, biases around 0
                parameter.add_(torch.randn_like(parameter), alpha=0.4)
            else:
                parameter.normal_(std=0.3)
    return theirs.eval()


@pytest.fixture
def saved(tmp_path):
    """A function that writes a model of theirs into a folder and gives both."""

    def save(family, max_shard_size="5GB", **settings):
        theirs = new_theirs(family, **settings)
        folder = tmp_path / "theirs"
        theirs.save_pretrained(folder, max_shard_size=max_shard_size)
        return theirs, folder

    return save


def edit_config(folder, remove=(), **settings):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in remove}))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def tokens():
    return torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def logits(model, idx=None):
    idx = tokens() if idx is None else idx
    return model.eval()(idx, idx)[0] if isinstance(model, GPT) else model(idx).logits


def assert_same(ours, theirs, **tolerance):
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs.float(), **{"rtol": 0, "atol": 1e-4, **tolerance})


def refused(folder, *parts, **overrides):
    """from_pretrained refuses the folder with one sentence that holds the parts."""
    with pytest.raises(ValueError) as caught:
        GPT.from_pretrained(folder, **overrides)
    message = str(caught.value)
    assert type(caught.value) is UserError and "\n" not in message
    for part in parts:
        assert part in message
    return message


# the same logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_round_trip(variant, saved, tmp_path):
    family, settings = VARIANTS[variant]
    theirs, folder = saved(family, **settings)
    expected = logits(theirs)
    assert expected.std() > 0.5  # else the tolerance would prove nothing
    ours = GPT.from_pretrained(folder)
    assert_same(logits(ours), expected)
    assert (ours.lm_head.weight is ours.wte.weight) == theirs.config.tie_word_embeddings
    assert all(p.requires_grad and p.is_contiguous() and p.device.type == "cpu" for p in ours.parameters())

    ours.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(theirs)
    assert_same(logits(again), expected)
    assert {name: t.shape for name, t in again.state_dict().items()} == {
        name: t.shape for name, t in theirs.state_dict().items()
    }
    assert_same(logits(GPT.from_pretrained(tmp_path / "ours")), expected)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_our_own_models_open_in_transformers(family, tmp_path):
    forms = {
        "gpt2": GPTConfig(
            norm="layernorm", position="learned", activation="gelu_tanh", bias=True, tie_weights=True, dropout=0.25
        ),
        "llama": GPTConfig(n_kv_head=2, rope_theta=500.0, norm_eps=1e-3, bias=True, dropout=0.25),
    }
    ours = GPT(forms[family])
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.1)
    ours.save_pretrained(tmp_path / "new" / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "ours")
    assert_same(logits(ours), logits(theirs))
    assert theirs.config.eos_token_id is None  # no id of another tokenizer ends a text
    if family == "gpt2":
        assert theirs.config.resid_pdrop == theirs.config.embd_pdrop == 0.25 and theirs.config.attn_pdrop == 0
    else:
        assert theirs.config.rope_parameters["rope_theta"] == 500.0
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new" / "ours").iterdir()}
    assert modes["config.json"] == modes["model.safetensors"]
    assert os.listdir(tmp_path / "new") == ["ours"]  # nothing temporary left


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_shards(family, saved):
    theirs, folder = saved(family, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2 and not (folder / "model.safetensors").exists()
    assert_same(logits(GPT.from_pretrained(folder)), logits(theirs))


def test_weights_are_a_copy(saved):
    theirs, folder = saved("llama")
    ours = GPT.from_pretrained(str(folder))
    path = folder / "model.safetensors"
    with open(path, "r+b") as file:  # a mapped file would show through
        file.write(b"\xff" * path.stat().st_size)
    assert_same(logits(ours), logits(theirs))


def test_pickled_weights(saved):
    """Not looked at beside safetensors, refused without; and what the refusal says to do helps."""
    theirs, folder = saved("gpt2")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    assert_same(logits(GPT.from_pretrained(folder)), logits(theirs))
    (folder / "model.safetensors").unlink()
    message = refused(folder, "model.safetensors", "transformers")
    advice = message[message.index("AutoModelForCausalLM") :]
    exec(advice, {"AutoModelForCausalLM": transformers.AutoModelForCausalLM})
    assert_same(logits(GPT.from_pretrained(folder)), logits(theirs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32(dtype, saved):
    theirs, folder = saved("llama")
    theirs.to(dtype).save_pretrained(folder)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_same(logits(GPT.from_pretrained(folder)), logits(theirs))


def test_old_gpt2_files(saved):
    """No prefix, the masks as buffers, no keys that came later."""
    theirs, folder = saved("gpt2")
    tensors = load_file(folder / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert "wte.weight" in old and "transformer.wte.weight" in tensors
    for layer in range(3):
        old[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        old[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(old, folder / "model.safetensors")
    later = ("n_inner", "tie_word_embeddings", "activation_function", "add_cross_attention", "scale_attn_weights")
    edit_config(folder, remove=later)
    assert_same(logits(GPT.from_pretrained(folder)), logits(theirs))


@pytest.mark.parametrize("scaling", [{}, {"rope_scaling": None}, {"rope_scaling": {"type": "default"}}])
def test_old_llama_files(scaling, saved):
    """rope_theta at the top level, rope tables as buffers."""
    theirs, folder = saved("llama", **rope(33.0))
    assert "rope_theta" not in json.loads((folder / "config.json").read_text())
    edit_config(folder, remove=("rope_parameters", "head_dim", "mlp_bias"), rope_theta=33.0, **scaling)
    edit_weights(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    ours = GPT.from_pretrained(folder)
    assert ours.config.rope_theta == 33.0
    assert_same(logits(ours), logits(theirs))
    edit_config(folder, remove=("rope_theta",))
    assert GPT.from_pretrained(folder).config.rope_theta == 10000.0


@pytest.mark.parametrize("spelling", ["rope_type", "type", "rope_parameters"])
def test_llama3_rope(spelling, saved):
    """As transformers 5 writes it and as older ones did: the same numbers, and they matter."""
    theirs, folder = saved("llama", **rope(100.0, **LLAMA3))
    if spelling != "rope_parameters":
        scaling = {spelling if key == "rope_type" else key: value for key, value in LLAMA3.items()}
        edit_config(folder, remove=("rope_parameters",), rope_theta=100.0, rope_scaling=scaling)
    ours = GPT.from_pretrained(folder)
    assert ours.config.rope_scaling == (8, 1, 4, 32)
    assert_same(logits(ours), logits(theirs))
    edit_config(folder, remove=("rope_scaling",), **rope(100.0))
    plain = GPT.from_pretrained(folder)
    assert plain.config.rope_scaling is None
    assert (logits(plain) - logits(ours)).abs().max() > 0.1


def test_a_tied_head_in_the_file(saved):
    theirs, folder = saved("gpt2")
    edit_weights(folder, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].clone()}))
    assert_same(logits(GPT.from_pretrained(folder)), logits(theirs))
    edit_weights(folder, lambda t: t["lm_head.weight"].add_(1))
    refused(folder, "lm_head.weight")  # which of the two is meant depends on transformers' version


# overrides


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_smaller_block_size(family, saved):
    theirs, folder = saved(family)
    ours = GPT.from_pretrained(folder, block_size=8)
    assert ours.config.block_size == 8
    assert_same(logits(ours, tokens()[:, :8]), logits(theirs, tokens()[:, :8]))
    with pytest.raises(ValueError, match="block_size"):
        logits(ours)
    refused(folder, "block_size", "16", "17", block_size=17)
    refused(folder, "block_size", block_size=0)
    refused(folder, "block_size", block_size="8")


def test_residual_mode(saved):
    theirs, folder = saved("llama", num_key_value_heads=2)
    baseline = logits(theirs)
    for recompute in (True, False):
        learned = GPT.from_pretrained(folder, residual_mode="method3_2", recompute=recompute)
        mean = GPT.from_pretrained(folder, residual_mode="method3_1", recompute=recompute)
        assert learned.config.recompute is recompute
        raw = learned.residual_weights()
        assert raw[0] is None and [w.tolist() for w in raw[1:]] == [[1.0] * 2, [1.0] * 3]
        assert all(w.requires_grad for w in raw[1:])
        assert_same(logits(learned), logits(mean), atol=1e-5)
        assert (logits(mean) - baseline).abs().max() > 0.1
    again = GPT.from_pretrained(folder, residual_mode="method3_2", recompute=True)
    assert (logits(again) - logits(learned)).abs().max() > 0.1  # recompute is not ignored


@pytest.mark.parametrize("mode", [mode.value for mode in ResidualMode])
def test_every_mode_starts_as_a_new_model(mode, saved):
    """The backbone is the file's; what the mode learns is what a new model has, and the seed decides what that is."""
    _, folder = saved("llama")
    baseline = GPT.from_pretrained(folder)
    torch.manual_seed(5)
    ours = GPT.from_pretrained(folder, residual_mode=mode)
    torch.manual_seed(5)
    start = initial_residual(ours.config)
    state = ours.state_dict()
    assert state.keys() == baseline.state_dict().keys() | start.keys()
    for name, tensor in (baseline.state_dict() | start).items():
        assert torch.equal(state[name], tensor), name
    assert all(parameter.requires_grad for parameter in ours.parameters())
    drawn = [name for name in start if not torch.equal(initial_residual(ours.config)[name], start[name])]
    assert bool(drawn) == (mode in ("method3_3", "method4_3", "mudd", "mhc"))
    if mode in ("x0", "denseformer", "attnres", "mudd", "hc", "hc_static"):
        assert_same(logits(ours), logits(baseline))


def test_cheaper_starts(saved):
    """reruns and residual_start reach the model."""
    theirs, folder = saved("llama")
    settings = {"all": {}, "one": {"reruns": 1}, "none": {"reruns": 0}, "stored": {"recompute": False}}
    results = {
        name: logits(GPT.from_pretrained(folder, residual_mode="method3_2", **s)) for name, s in settings.items()
    }
    assert torch.equal(results["none"], results["stored"])
    for other in ("one", "none"):
        assert (results["all"] - results[other]).abs().max() > 0.1
    own = GPT.from_pretrained(folder, residual_mode="method3_2", residual_start="own")
    far, near = ((result - logits(theirs)).abs().mean() for result in (results["all"], logits(own)))
    assert near < far / 2
    refused(folder, "reruns", reruns=1, recompute=False, residual_mode="method3_2")
    refused(folder, "residual_start", residual_start="own")


def test_dropout_and_unknown_overrides(saved):
    _, folder = saved("gpt2")
    ours = GPT.from_pretrained(folder, dropout=0.5)
    assert ours.dropout.p == ours.h[2].dropout.p == 0.5
    assert GPT.from_pretrained(folder).dropout.p == 0
    message = refused(folder, "n_layer", n_layer=2)
    assert all(name in message for name in hf.OVERRIDES)
    refused(folder, "dropout", dropout=1.5)
    refused(folder, "method9", "method3_2", residual_mode="method9")


# refusals


@pytest.mark.parametrize(
    ("family", "settings", "word"),
    [
        ("gpt2", {"model_type": "mamba"}, "'mamba'"),
        ("gpt2", {"model_type": None}, "'None'"),
        ("gpt2", {"model_type": ["gpt2"]}, "gpt2"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("gpt2", {"activation_function": "mish"}, "'mish'"),
        ("gpt2", {"activation_function": ["gelu"]}, "activation_function"),
        ("gpt2", {"n_layer": "3"}, "n_layer"),
        ("gpt2", {"n_layer": None}, "n_layer"),
        ("gpt2", {"n_head": 5}, "n_head"),
        ("gpt2", {"n_embd": -32}, "n_embd"),
        ("gpt2", {"layer_norm_epsilon": 0}, "norm_eps"),
        ("gpt2", {"tie_word_embeddings": "yes"}, "tie_weights"),
        ("llama", {"hidden_act": "gelu_new"}, "'gelu_new'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"head_dim": 16}, "head_dim=16"),
        ("llama", {"attention_bias": True}, "biases"),
        ("llama", {"mlp_bias": True}, "biases"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling"),
        ("llama", {"rope_scaling": LLAMA3 | {"mscale": 1.0}}, "rope_scaling"),
        ("llama", {"rope_scaling": LLAMA3 | {"rope_type": "default"}}, "rope_scaling"),
        ("llama", {"rope_scaling": LLAMA3 | {"factor": "8"}}, "rope_scaling"),
        ("llama", {"rope_scaling": LLAMA3 | {"factor": 0}}, "rope_scaling"),
        ("llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "rope_scaling"),
        ("llama", {"rope_scaling": LLAMA3 | {"rope_type": ["llama3"]}}, "rope_scaling"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_scaling": [2.0]}, "rope_scaling"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_parameters"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta"),
        ("llama", {"num_key_value_heads": 3}, "n_kv_head"),
    ],
)
def test_refused_configs(family, settings, word, saved):
    _, folder = saved(family)
    edit_config(folder, **settings)
    refused(folder, "config.json", word)


def test_refused_config_without_a_size(saved):
    _, folder = saved("gpt2")
    edit_config(folder, remove=("n_embd",))
    refused(folder, "n_embd")


def test_refused_tensors(saved):
    name = "model.layers.1.mlp.up_proj.weight"
    changes = {
        "absent": lambda t: t.pop(name),
        "(24, 32)": lambda t: t.update({name: t[name][:24].clone()}),
        "int8": lambda t: t.update({name: t[name].to(torch.int8)}),
        "float8": lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}),
        "twice": lambda t: t.update({name.removeprefix("model."): t[name].clone()}),
    }
    for word, change in changes.items():
        _, folder = saved("llama")
        edit_weights(folder, change)
        refused(folder, word, "h.1.mlp.up.weight" if word in ("absent", "(24, 32)") else "layers.1.mlp.up_proj.weight")
    for odd in (torch.ones(()), torch.ones(32, 3, 32), torch.ones(7), torch.ones(0, 96)):
        _, folder = saved("gpt2")
        edit_weights(folder, lambda t: t.update({"transformer.h.1.attn.c_attn.weight": odd}))  # noqa: B023
        refused(folder, "h.1.attn.")
    _, folder = saved("llama")
    edit_weights(folder, lambda t: t.update({"model.layers.1.mlp.extra": torch.ones(1)}))
    refused(folder, "layers.1.mlp.extra")
    _, folder = saved("llama")
    edit_config(folder, tie_word_embeddings=False, num_hidden_layers=2)
    refused(folder, "layers.2.")
    _, folder = saved("llama", tie_word_embeddings=True)
    edit_config(folder, tie_word_embeddings=False)
    refused(folder, "absent", "lm_head.weight")


def test_missing_files(tmp_path, saved):
    refused(tmp_path, "config.json")
    _, folder = saved("gpt2", max_shard_size="20KB")
    next(folder.glob("model-00002*")).unlink()
    refused(folder, "model-00002")
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "no model.safetensors")


def test_the_hub(monkeypatch, saved):
    import huggingface_hub

    theirs, folder = saved("gpt2")
    asked = []

    def download(name, allow_patterns):
        asked.append((name, *allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert_same(logits(GPT.from_pretrained("somebody/gpt2")), logits(theirs))
    assert asked == [("somebody/gpt2", "*config.json", "tokenizer.json", "*.safetensors*")]

    def fail(name, allow_patterns):
        raise OSError("no network\nand a second line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    refused("somebody/gpt2", "somebody/gpt2", "no network", "local folder")


# strangers


def test_code_in_the_folder_is_ignored(saved, tmp_path):
    theirs, folder = saved("llama")
    proof = tmp_path / "executed"
    (folder / "evil.py").write_text(f"open({str(proof)!r}, 'w')\nclass Evil: pass\n")
    edit_config(folder, auto_map={"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"})
    assert_same(logits(GPT.from_pretrained(folder)), logits(theirs))
    assert not proof.exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a\\b", "..", "", 7, "x\0y"])
def test_an_index_stays_in_its_folder(name, saved):
    _, folder = saved("gpt2")
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": name}}))
    refused(folder, "index.json")
    for weight_map in ({}, [], None, "x"):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(folder, "index.json")


@pytest.mark.parametrize("size", [10**6, 10**12, 10**18, 10**40])
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("gpt2", "vocab_size"),
        ("gpt2", "n_positions"),
        ("gpt2", "n_embd"),
        ("gpt2", "n_layer"),
        ("gpt2", "n_inner"),
        ("llama", "vocab_size"),
        ("llama", "hidden_size"),
        ("llama", "num_hidden_layers"),
        ("llama", "intermediate_size"),
    ],
)
def test_giant_sizes(family, key, size, giant_folders):
    folder, config = giant_folders[family]
    (folder / "config.json").write_text(json.dumps(config | {key: size, "head_dim": None}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_more_layers_than_tensors(tmp_path):
    """Enough numbers in the file for a thousand layers of width 1, but not the tensors."""
    save_file({"wte.weight": torch.zeros(20000, 1)}, tmp_path / "model.safetensors")
    sizes = {"vocab_size": 2, "n_positions": 2, "n_embd": 1, "n_layer": 1000, "n_head": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    refused(tmp_path, "bigger")


@pytest.fixture(scope="module")
def giant_folders(tmp_path_factory):
    folders = {}
    for family in ("gpt2", "llama"):
        folder = tmp_path_factory.mktemp(family)
        new_theirs(family).save_pretrained(folder)
        folders[family] = folder, json.loads((folder / "config.json").read_text())
    return folders


def test_broken_json(saved):
    _, folder = saved("gpt2")
    for text in (b"", b"{", b"[]", b"7", b"\xff\xfe\x00", b'{"model_type": "gpt2"', b"[" * 10**5, b"9" * 5000):
        (folder / "config.json").write_bytes(text)
        refused(folder, "config.json", "JSON")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")  # reading it would wait for ever
    refused(folder, "config.json")


def test_odd_values_in_config(giant_folders):
    """Any JSON value at any key: a model or a sentence."""
    draw = random.Random(4)
    values = [None, True, 0, -1, 1, 3, 8, 64, 0.5, 1e400, 10**30, "", "gelu", "a\nb", [], [1], {}, {"rope_theta": None}]
    outcomes = {"loaded": 0, "refused": 0}
    for folder, config in giant_folders.values():
        for key in [*config, "rope_scaling", "rope_theta", "quantization_config", "scale_attn_weights"]:
            for value in draw.sample(values, 4):
                (folder / "config.json").write_text(json.dumps(config | {key: value}))
                try:
                    GPT.from_pretrained(folder)
                    outcomes["loaded"] += 1
                except UserError as error:
                    assert "\n" not in str(error)
                    outcomes["refused"] += 1
    assert min(outcomes.values()) > 50


def test_damaged_weights(saved):
    """Cut short, random bytes, and single damaged bytes in the part that is not numbers: a sentence or a model."""
    draw = random.Random(3)
    _, folder = saved("gpt2", n_layer=1)
    path = folder / "model.safetensors"
    good = path.read_bytes()
    for data in (good[:-1], good[: len(good) // 2], good[:7], b"", draw.randbytes(2000), b"\xff" * 64):
        path.write_bytes(data)
        refused(folder, path.name)
    outcomes = set()
    for _ in range(150):
        data = bytearray(good)
        data[draw.randrange(2000)] = draw.randrange(256)
        path.write_bytes(data)
        try:
            GPT.from_pretrained(folder)
            outcomes.add("loaded")
        except UserError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    assert "refused" in outcomes


# what cannot be saved


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"residual_mode": "method3_2"}, ["residual_mode", "'method3_2'"]),
        ({"loops": 2}, ["loops must be 1, not 2"]),
        ({"norm": "layernorm"}, ["llama", "norm must be 'rmsnorm', not 'layernorm'"]),
        ({"norm_position": "post", "dconv": True}, ["norm_position", "'post'", "dconv"]),
        ({"activation": "glu"}, ["activation", "'glu'", "swiglu, geglu, reglu"]),
        ({"swish_beta": 2.0}, ["swish_beta"]),
        ({"position": "learned"}, ["gpt2", "norm must be 'layernorm'", "bias must be True", "activation"]),
        (
            {"position": "learned", "norm": "layernorm", "bias": True, "activation": "gelu", "n_kv_head": 2},
            ["n_kv_head=2"],
        ),
    ],
)
def test_forms_that_transformers_does_not_have(settings, words, tmp_path):
    with pytest.raises(ValueError) as caught:
        GPT(GPTConfig(n_layer=2, **settings)).save_pretrained(tmp_path / "ours")
    for word in words:
        assert word in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_saving_overwrites_nothing(tmp_path):
    ours = GPT(GPTConfig(n_layer=1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(ValueError, match="already"):
            ours.save_pretrained(tmp_path / name)
    assert (tmp_path / "full" / "mine.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["file", "full"] and os.listdir(tmp_path / "full") == ["mine.txt"]
    with pytest.raises(ValueError, match="cannot write"):
        ours.save_pretrained(tmp_path / "file" / "below")
    (tmp_path / "empty").mkdir()
    ours.save_pretrained(tmp_path / "empty")
    assert sorted(os.listdir(tmp_path / "empty")) == ["config.json", "model.safetensors"]


def test_saving_is_all_or_nothing(tmp_path):
    """A file size limit stands for a full disk."""
    ours = GPT(GPTConfig(n_layer=2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(ValueError, match="cannot write"):
            ours.save_pretrained(tmp_path / "ours")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []
