"""The models under test: tiny, in float64, every parameter moved away from its initial value."""

from itertools import combinations, product

import pytest
import torch

from model import GPT, GPTConfig, ResidualMode

MODES = [mode.value for mode in ResidualMode]

BACKBONES = {
    "llama": {},
    "gpt2": {"norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "bias": True, "tie_weights": True},
    "post": {"norm_position": "post", "bias": True},
    "sandwich": {"norm_position": "sandwich", "norm": "layernorm"},
    "deepnorm": {"norm_position": "deepnorm", "norm": "layernorm", "bias": True, "activation": "relu"},
    "primer_ez": {"activation": "relu2", "dconv": True},
    "groupnorm": {"norm": "groupnorm", "bias": True, "activation": "geglu", "rope_scaling": (8.0, 1.0, 4.0, 16.0)},
    "batchnorm": {"norm": "batchnorm", "activation": "tanh"},
}
# where a method's earlier outputs come from; the other modes have only the first
SOURCES = {"rerun": {}, "stored": {"recompute": False}, "nearest": {"reruns": 1}}

# eps and theta are not the defaults, so that a layer which forgets the config's is noticed
SMALL = {"n_layer": 3, "n_head": 4, "n_embd": 16, "ffn_hidden": 24, "vocab_size": 13, "block_size": 8}
SMALL |= {"norm_eps": 1e-3, "rope_theta": 100.0}


def options_of(backbone, mode, source, n_kv_head):
    return {**BACKBONES[backbone], "n_kv_head": n_kv_head, "residual_mode": mode, **SOURCES[source]}


def can_run(case):
    try:
        config = GPTConfig(**{**SMALL, **options_of(*case)})
    except ValueError:
        return False
    return case[2] == "rerun" or config.n_reruns != GPTConfig(**SMALL, residual_mode=case[1]).n_reruns


def covering(cases):
    """Few of the cases, in which each pair of values that occurs together in any case is found."""
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def each_model(backbones=tuple(BACKBONES)):
    """Parametrises a test by `options`, the config of a model: every pair of backbone, mode, source and KV heads."""
    cases = covering([case for case in product(backbones, MODES, SOURCES, (4, 2)) if can_run(case)])
    return pytest.mark.parametrize(
        "options", [pytest.param(options_of(*case), id="-".join(map(str, case))) for case in cases]
    )


def new_model(perturbed=True, seed=0, **options):
    """A model in eval mode. Perturbed: norms are not ones, biases not zero, residual tensors not as they start."""
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


def batch_with_gaps(batch=3, length=8):
    """idx and targets of which some are -1, not counted."""
    idx, targets = tokens(batch, length), tokens(batch, length, seed=2)
    targets[0, 2:5] = targets[-1, -1] = -1
    return idx, targets


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def gradients(model, loss):
    """{name: gradient} of one backward pass."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def is_residual(name):
    return name.rsplit(".", 1)[-1].startswith("residual_")


class Inputs:
    """Records the first argument of every call of a module."""

    def __init__(self, module):
        self.seen = []
        module.register_forward_pre_hook(lambda _, args: self.seen.append(args[0].detach().clone()))
