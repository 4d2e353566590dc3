"""The models under test: tiny, in float64, every parameter moved away from its initial value."""

import pytest
import torch

from model import GPT, GPTConfig, ResidualMode

MODES = [mode.value for mode in ResidualMode]
LEARNED = ["method3_2", "method4_2"]

BACKBONES = {
    "llama": {},
    "gpt2": {"norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "bias": True, "tie_weights": True},
    "post": {"norm_position": "post", "bias": True},
    "sandwich": {"norm_position": "sandwich", "norm": "layernorm"},
    "deepnorm": {"norm_position": "deepnorm", "norm": "layernorm", "bias": True, "activation": "relu"},
    "primer_ez": {"activation": "relu2", "dconv": True},
    "groupnorm": {"norm": "groupnorm", "bias": True, "activation": "geglu"},
    "batchnorm": {"norm": "batchnorm"},  # not with re-runs
}

# eps and theta are not the defaults, so that a layer which forgets the config's is noticed
SMALL = {"n_layer": 3, "n_head": 4, "n_embd": 16, "ffn_hidden": 24, "vocab_size": 13, "block_size": 8}
SMALL |= {"norm_eps": 1e-3, "rope_theta": 100.0}


def can_run(backbone, mode, recompute):
    return BACKBONES[backbone].get("norm") != "batchnorm" or mode == "baseline" or not recompute


def each_model(kv_heads=(4, 2), backbones=tuple(BACKBONES)):
    """Parametrises a test by `options`, the config of a model: every mode × recompute × backbone × KV heads."""
    cases = []
    for backbone in backbones:
        for n_kv_head in kv_heads:
            for mode in MODES:
                for recompute in (True, False):
                    if can_run(backbone, mode, recompute):
                        options = {**BACKBONES[backbone], "n_kv_head": n_kv_head}
                        options |= {"residual_mode": mode, "recompute": recompute}
                        name = f"{backbone}-kv{n_kv_head}-{mode}-{'rerun' if recompute else 'reuse'}"
                        cases.append(pytest.param(options, id=name))
    return pytest.mark.parametrize("options", cases)


def new_model(perturbed=True, seed=0, **options):
    """A model in eval mode. Perturbed: norms are not ones, biases not zero, raw residual weights not equal."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**SMALL, **options})).double().eval()
    if perturbed:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.3)
            for name, buffer in model.named_buffers():  # batchnorm's running statistics
                if buffer.is_floating_point():
                    buffer.copy_(
                        1 + torch.rand_like(buffer) if name.endswith("var") else 0.3 * torch.randn_like(buffer)
                    )
    return model


def tokens(batch, length, vocab=SMALL["vocab_size"], seed=1):
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
