"""What the model's parts, the kernels and the config do, against a second computation wherever there is one."""

import json
import math
from dataclasses import asdict
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from backbones import BACKBONES, MODES, Inputs, batch_with_gaps, close, gradients, is_residual, new_model, tokens
from reference import reference_logits, rope_frequencies
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from lib import kernels
from lib.kernels import checkpointed, linear_cross_entropy, linear_scores, rms_norm, swiglu
from lib.mixing import depth_mixing
from model import GPT, GPTConfig

each_site = pytest.mark.parametrize("mode", ["method3_2", "method4_2"])
each_mode = pytest.mark.parametrize("mode", MODES)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def same_values_and_gradients(ours, plain, *inputs):
    """Of two ways to compute one tensor from these inputs."""
    close(ours, plain)
    dy = torch.randn_like(plain)
    for a, b in zip(*(torch.autograd.grad(y, inputs, dy) for y in (ours, plain)), strict=True):
        close(a, b)


# The kernels, each against its plain formula


def test_rms_norm():
    for shape in ((2, 5, 8), (1, 1, 8), (3, 4, 1), (6, 8)):  # also one row, one channel
        x, weight = random(*shape), random(shape[-1])
        plain = weight * x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + 1e-3)
        same_values_and_gradients(rms_norm(x, weight, 1e-3), plain, x, weight)
    model, x = new_model().float(), torch.randn(2, 3, 16).bfloat16()  # a bfloat16 input is not rounded again
    torch.testing.assert_close(model.norm_f(x), model.norm_f(x.float()), rtol=0, atol=0)


def test_swiglu():
    gate, up = random(3, 4), random(3, 4)
    same_values_and_gradients(swiglu(gate, up), gate * torch.sigmoid(gate) * up, gate, up)
    assert torch.autograd.gradcheck(swiglu, (gate, up))


def test_checkpointed():
    """The same values and gradients with the same random numbers, from its inputs alone."""
    x, y, weight, frozen = random(5, 4), random(5, 4), random(4, 4), random(4, 4).detach()
    calls, kept = [], []

    def function(x, y):
        calls.append(torch.is_grad_enabled())
        return F.dropout(torch.tanh(x @ weight) * (y @ frozen), 0.5)

    torch.manual_seed(1)
    plain = function(x, y)
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours = checkpointed(function, (x, y), (weight, frozen))
    assert {id(t) for t in kept} <= {id(x), id(y)}
    state = torch.get_rng_state()
    same_values_and_gradients(ours, plain, x, y, weight)
    dy_drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), dy_drawn)  # backward has left the random numbers where they were
    assert len(calls) == 3 and calls[-1]


@pytest.mark.parametrize("rows_per_chunk, chunks", [(None, 1), (1, 24), (5, 5), (24, 1)])  # None: the default
def test_linear_cross_entropy(rows_per_chunk, chunks, monkeypatch):
    if rows_per_chunk:  # the last chunk may be shorter
        smaller = partial(kernels.logit_chunks, numbers=13 * rows_per_chunk + 12)
        monkeypatch.setattr(kernels, "logit_chunks", smaller)
    assert len(list(kernels.logit_chunks(torch.zeros(24, 16), torch.zeros(13, 16)))) == chunks
    x, weight, targets = random(24, 16), random(13, 16), batch_with_gaps()[1].flatten()
    logits = x @ weight.T
    targets[8:12] = logits[8:12].argmax(dim=1)  # some right predictions
    plain = F.cross_entropy(logits, targets, ignore_index=-1)
    with torch.no_grad():
        total, hits = linear_scores(x, weight, targets)
    # the gradient that comes in from above is not 1
    same_values_and_gradients(linear_cross_entropy(x, weight, targets), plain, x, weight)
    close(total, plain * (targets >= 0).sum())
    assert hits == (logits.argmax(dim=1) == targets).sum() >= 4


# The loss without all logits, and other ways of computing the same


@pytest.mark.parametrize("tie_weights", [True, False])
def test_loss_without_logits(tie_weights):
    model = new_model(tie_weights=tie_weights)
    idx, targets = batch_with_gaps()
    logits, loss = model(idx, targets)
    none, chunked_loss = model(idx, targets, return_logits=False)
    assert none is None
    close(chunked_loss, loss)
    with torch.no_grad():
        close(model(idx, targets, return_logits=False)[1], loss)
    plain, chunked = (gradients(model, 3 * part) for part in (loss, chunked_loss))
    for name in plain:
        close(chunked[name], plain[name])
    total, correct = model.score(idx, targets)
    close(total, loss * (targets >= 0).sum())
    assert correct == (logits.argmax(-1) == targets).sum()


@pytest.mark.parametrize("return_logits", [True, False])
def test_all_targets_ignored(return_logits):
    model = new_model()
    idx, targets = tokens(3, 8), torch.full((3, 8), -1)
    loss = model(idx, targets, return_logits=return_logits)[1]
    assert loss == 0
    assert not any(grad.any() for grad in gradients(model, loss).values())
    with torch.no_grad():
        assert model(idx, targets, return_logits=return_logits)[1] == 0
    assert model.score(idx, targets) == (0, 0)


def test_loss_without_logits_of_sure_predictions():
    """Chances that are 0 and 1 in floating point: the loss is still a difference of logits."""
    model = new_model()
    with torch.no_grad():
        model.lm_head.weight *= 1000
    idx, targets = batch_with_gaps()
    losses = [model(idx, targets, return_logits=kind)[1] for kind in (True, False)]
    assert losses[0] > 100
    close(*losses)
    plain, chunked = (gradients(model, loss)["wte.weight"] for loss in losses)
    close(chunked, plain)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@each_site
def test_checkpointed_reruns_have_the_same_gradients(mode, dropout):
    model = new_model(residual_mode=mode, dropout=dropout, n_kv_head=2).train()
    attention = Inputs(model.h[0].attn.v)
    idx = tokens(3, 8)
    grads, runs, next_numbers = [], [], []
    for model.checkpoint_recompute in (False, True):
        torch.manual_seed(5)
        grads.append(gradients(model, model(idx, idx)[1]))
        next_numbers.append(torch.rand(1))
        runs.append(len(attention.seen))
        attention.seen.clear()
    assert next_numbers[0] == next_numbers[1]
    assert runs == [3, 5]  # layer 0: its own pass and two re-runs; checkpointed, the two once more in backward
    for name in grads[0]:
        close(grads[0][name], grads[1][name])


def test_checkpointed_reruns_have_the_same_number_format_in_backward():
    model = new_model(residual_mode="method3_2").float()
    model.checkpoint_recompute = True
    projected = Inputs(model.h[0].attn.o)
    idx = tokens(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        _, loss = model(idx, idx, return_logits=False)
    forward = len(projected.seen)
    loss.backward()
    assert forward == 3 and len(projected.seen) == 5
    assert {x.dtype for x in projected.seen} == {torch.bfloat16}


def test_checkpointed_reruns_of_a_frozen_layer():
    model = new_model(residual_mode="method3_2")
    model.h[0].requires_grad_(False)
    idx = tokens(3, 8)
    grads = []
    for model.checkpoint_recompute in (False, True):
        model.zero_grad()
        model(idx, idx)[1].backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and not any(name.startswith("h.0.") for name in grads[0])
    for name in grads[0]:
        close(grads[0][name], grads[1][name])


@pytest.mark.parametrize("target", [-2, -100, 13])  # the vocabulary has 13
@pytest.mark.parametrize("return_logits", [True, False])
def test_only_minus_one_is_an_ignored_target(target, return_logits):
    model, (idx, targets) = new_model(), batch_with_gaps()
    targets[1, 1] = target
    for grad_enabled in (True, False):
        with torch.set_grad_enabled(grad_enabled), pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            model(idx, targets, return_logits=return_logits)


def test_a_second_backward_of_the_chunked_loss_is_refused():
    """It scales its gradients in place: twice would be wrong, so it must not pass silently."""
    model = new_model()
    idx, targets = batch_with_gaps()
    _, loss = model(idx, targets, return_logits=False)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("mode, how", [("method3_2", "layers"), ("method3_2", "whole"), ("method4_2", "whole")])
def test_compiled_equals_eager(mode, how):
    model = compiled = new_model(residual_mode=mode, n_layer=2, n_kv_head=2)
    idx, targets = batch_with_gaps()
    _, loss = model(idx, targets, return_logits=False)
    eager = gradients(model, loss)
    if how == "layers":  # what training does
        model.compile_layers()
    else:  # one graph, run without generated code, which would take a compiler most of a minute to build
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for model.checkpoint_recompute in (False, True) if how == "layers" else (False,):
        _, again = compiled(idx, targets, return_logits=False)
        close(again, loss)
        for name, grad in gradients(model, again).items():
            close(grad, eager[name])


@pytest.mark.parametrize(
    "wrap, checkpoint", [(nn.Identity, True), (DistributedDataParallel, False), (DistributedDataParallel, True)]
)
def test_what_is_compiled_does_not_grow_with_depth(wrap, checkpoint, monkeypatch, tmp_path):
    """And nothing is compiled again after the first training and evaluation steps, with DDP, too."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1)  # DDP splits graphs of large parameters
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    graphs = []
    idx, targets = batch_with_gaps()
    for n_layer in (2, 4):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = new_model(residual_mode="method3_2", n_layer=n_layer)
        model.checkpoint_recompute = checkpoint
        model.compile_layers()
        wrapped = model if wrap is nn.Identity else wrap(model)
        for error_on_recompile in (False, True, True):
            with torch._dynamo.config.patch(error_on_recompile=error_on_recompile):
                wrapped(idx, targets, return_logits=False)[1].backward()
                model.score(idx, targets)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.distributed.destroy_process_group()
    assert graphs[0] == graphs[1] > 0


# The parts


@pytest.mark.parametrize(
    "activation, options, function",
    [
        ("relu", {}, torch.nn.ReLU()),
        ("relu2", {}, lambda z: torch.nn.ReLU()(z) ** 2),
        ("gelu", {}, torch.nn.GELU()),
        ("gelu_tanh", {}, torch.nn.GELU(approximate="tanh")),
        ("swish", {}, torch.nn.SiLU()),
        ("swish", {"swish_beta": 2.5}, lambda z: F.silu(2.5 * z) / 2.5),
        ("sigmoid", {}, torch.nn.Sigmoid()),
        ("tanh", {}, torch.nn.Tanh()),
        ("leaky_relu", {}, torch.nn.LeakyReLU()),
        ("elu", {}, torch.nn.ELU()),
        ("glu", {}, lambda gate, up: F.glu(torch.cat((up, gate), dim=-1))),
        ("swiglu", {}, lambda gate, up: F.silu(gate) * up),
        ("swiglu", {"swish_beta": 2.5}, lambda gate, up: F.silu(2.5 * gate) / 2.5 * up),
        ("geglu", {}, lambda gate, up: F.gelu(gate) * up),
        ("reglu", {}, lambda gate, up: F.relu(gate) * up),
    ],
)
def test_activations_are_torchs(activation, options, function):
    model = new_model(activation=activation, bias=True, **options)
    mlp, x = model.h[0].mlp, torch.randn(2, 3, 16, dtype=torch.float64)
    projections = [mlp.up(x)] if mlp.gate is None else [mlp.gate(x), mlp.up(x)]
    close(mlp(x), mlp.down(function(*projections)))
    idx = tokens(2, 5)
    close(model(idx, idx)[0], reference_logits(model.config, model.state_dict(), idx))


@pytest.mark.parametrize("activation", ["glu", "swiglu", "geglu", "reglu", "relu", "relu2", "gelu_tanh"])
def test_ffn_width(activation):
    gated = "glu" in activation
    for width, two_thirds in [(4096, 11008), (768, 2048), (96, 256), (97, 512)]:
        config = GPTConfig(n_embd=width, n_head=1, position="learned", activation=activation)
        assert config.ffn_hidden == (two_thirds if gated else 4 * width)
    model = GPT(GPTConfig(n_layer=1, n_embd=16, ffn_hidden=20, activation=activation))
    assert model.h[0].mlp.up.weight.shape == (20, 16)
    assert (model.h[0].mlp.gate is not None) == gated


def test_deepnorm_alpha():
    model = new_model(norm_position="deepnorm", n_layer=8)  # (2·8)^¼ = 2
    with torch.no_grad():
        model.h[0].attn.o.weight.zero_()
        model.h[0].mlp.down.weight.zero_()
    first, second = Inputs(model.h[0].norm1), Inputs(model.h[0].norm2)
    idx = tokens(2, 8)
    model(idx)
    close(first.seen[0], 2 * model.wte(idx))
    close(second.seen[0], 2 * model.h[0].norm1(first.seen[0]))


def std_is(parameter, std):
    # the deviation of n draws is off by std/√(2n), here at most 0.6 %
    assert parameter.numel() >= 16384
    assert parameter.std().item() == pytest.approx(std, rel=0.03)
    assert abs(parameter.mean().item()) < 0.05 * std


def test_init_of_deepnorm():
    model = new_model(perturbed=False, norm_position="deepnorm", n_layer=2, n_embd=256, n_kv_head=1, ffn_hidden=512)
    beta = 16**-0.25  # (8·2)^-¼ = ½
    for name, gain in {"q": 1, "k": 1, "v": beta, "o": beta}.items():
        weight = getattr(model.h[1].attn, name).weight
        std_is(weight, gain * math.sqrt(2 / sum(weight.shape)))
    for linear in (model.h[1].mlp.gate, model.h[1].mlp.up, model.h[1].mlp.down):
        std_is(linear.weight, beta * math.sqrt(2 / (256 + 512)))


@pytest.mark.parametrize("norm_position", ["pre", "post", "sandwich"])
def test_init_of_gpt2(norm_position):
    # 8 layers, so that 16 sub-layers add up: output projections start √16 times smaller
    options = {"norm_position": norm_position, "norm": "layernorm", "bias": True, "position": "learned"}
    options |= {"n_layer": 8, "n_embd": 128, "ffn_hidden": 256, "vocab_size": 256, "block_size": 128}
    model = new_model(perturbed=False, residual_mode="method3_2", **options)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif p.dim() == 1:  # norms and raw residual weights
            assert (p == 1).all(), name
        else:
            std_is(p, 0.005 if name.endswith(("attn.o.weight", "mlp.down.weight")) else 0.02)


def test_dconv_starts_as_the_identity():
    plain, convolved = new_model(perturbed=False), new_model(perturbed=False, dconv=True)
    convolved.load_state_dict(plain.state_dict(), strict=False)
    close(convolved(tokens(2, 8))[0], plain(tokens(2, 8))[0])


def test_batchnorm_in_training_and_eval():
    model = new_model(perturbed=False, norm="batchnorm")
    norm, idx = model.h[0].norm1, tokens(3, 8)
    x = model.wte(idx)  # what layer 0 reads
    flat = x.reshape(24, 16)

    # eval: by the running statistics, at first 0 and 1; they stay, and the rows do not see each other
    close(norm(x), x / math.sqrt(1 + 1e-3))
    close(model(idx)[0][:1], model(idx[:1])[0])
    assert not norm.running_mean.any()

    # training: by this batch's, over all its tokens; the running ones move a tenth of the way
    model.train()
    model(idx)
    close(norm.running_mean, 0.1 * flat.mean(0))
    close(norm.running_var, 0.9 + 0.1 * flat.var(0))
    close(norm(x), (x - flat.mean(0)) / (flat.var(0, correction=0) + 1e-3).sqrt())


@pytest.mark.parametrize("backbone", [name for name in BACKBONES if name != "batchnorm"])
@torch.no_grad()
def test_loops(backbone):
    """The layers once more, from the top: as a reference, as a deeper model with the same parameters, and cached."""
    model, idx = new_model(**BACKBONES[backbone], n_layer=2, loops=3), tokens(3, 8)
    logits = model(idx, idx)[0]
    close(logits, reference_logits(model.config, model.state_dict(), idx))

    deeper = new_model(**BACKBONES[backbone], n_layer=6)
    assert model.config.depth == deeper.config.depth == 6
    assert model.num_params() < deeper.num_params()
    for name, tensor in deeper.state_dict().items():
        if name.startswith("h."):
            _, m, rest = name.split(".", 2)
            name = f"h.{int(m) % 2}.{rest}"
        tensor.copy_(model.state_dict()[name])
    close(deeper(idx, idx)[0], logits)
    assert model.flops_per_token(8) == deeper.flops_per_token(8)

    caches = [m.new_cache(3, 8) for m in (model, deeper)]
    for t in range(8):
        for m, cache in zip((model, deeper), caches, strict=True):
            close(m(idx[:, t : t + 1], cache=cache)[0], logits[:, t : t + 1])
    assert caches[0].nbytes() == caches[1].nbytes()
    assert depth_mixing(model, idx) == depth_mixing(deeper, idx)


def test_loops_start_as_their_depth():
    options = {"perturbed": False, "n_embd": 256, "n_kv_head": 1, "ffn_hidden": 512, "n_layer": 2, "loops": 4}
    model = new_model(**options)
    std_is(model.h[0].mlp.down.weight, 0.02 / 4)
    std_is(model.h[1].mlp.up.weight, 0.02)
    model = new_model(norm_position="deepnorm", **options)
    std_is(model.h[1].mlp.down.weight, (8 * 8) ** -0.25 * math.sqrt(2 / (256 + 512)))


def test_rope_scaling_is_transformers():
    """Llama 3: short waves as they are, long ones slower, between them a bit of both."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = (8.0, 1.0, 4.0, 64.0)
    names = "factor low_freq_factor high_freq_factor original_max_position_embeddings".split()
    options = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 8, "vocab_size": 13}
    parameters = {"rope_type": "llama3", "rope_theta": 100.0, **dict(zip(names, scaling, strict=True))}
    parameters["original_max_position_embeddings"] = 64
    config = LlamaConfig(**options, num_hidden_layers=2, intermediate_size=24, rope_parameters=parameters)
    theirs = LlamaRotaryEmbedding(config).inv_freq.double()
    ours = torch.tensor(rope_frequencies(32, 100.0, scaling), dtype=torch.float64)
    close(ours, theirs, 1e-6)
    ratio = ours / torch.tensor(rope_frequencies(32, 100.0, None), dtype=torch.float64)
    assert ratio[0] == 1 and ratio[-1] == 1 / 8 and ((ratio > 0.126) & (ratio < 0.999)).any()

    torch.manual_seed(0)
    llama = LlamaForCausalLM(config).double().eval()
    options = {"n_layer": 2, "n_head": 2, "n_embd": 64, "ffn_hidden": 24, "norm_eps": config.rms_norm_eps}
    model = new_model(**options, rope_scaling=scaling)
    for layer, block in zip(llama.model.layers, model.h, strict=True):
        for name in "qkvo":
            getattr(layer.self_attn, f"{name}_proj").weight = getattr(block.attn, name).weight
        for name in ("gate", "up", "down"):
            getattr(layer.mlp, f"{name}_proj").weight = getattr(block.mlp, name).weight
        layer.input_layernorm.weight = block.norm1.weight
        layer.post_attention_layernorm.weight = block.norm2.weight
    llama.model.embed_tokens.weight, llama.model.norm.weight = model.wte.weight, model.norm_f.weight
    llama.lm_head.weight = model.lm_head.weight
    idx = tokens(2, 8)
    logits = model(idx, idx)[0]
    close(logits, llama(idx).logits, 1e-5)  # its tables are float32
    close(logits, reference_logits(model.config, model.state_dict(), idx))
    unscaled = new_model(**options)
    assert (logits - unscaled(idx, idx)[0]).abs().max() > 1e-3


@each_mode
def test_dropout(mode):
    model = new_model(residual_mode=mode, dropout=0.5)
    idx = tokens(3, 8)
    assert torch.equal(model(idx)[0], model(idx)[0])
    close(model(idx)[0], new_model(residual_mode=mode)(idx)[0])  # eval: none
    model.train()
    assert not torch.equal(model(idx)[0], model(idx)[0])

    # on embeddings: about half of what layer 0 reads is zero
    reads = []
    model.hidden(idx, watch=lambda m, site, x: reads.append(x))
    assert 0.4 < (reads[0] == 0).double().mean() < 0.6

    # not on attention probabilities: without the embeddings' dropout layer 0 attends as in eval
    values = Inputs(model.h[0].attn.o)
    model.dropout.eval()
    model(idx)
    runs = len(values.seen)
    model.eval()
    model(idx)
    close(values.seen[0], values.seen[runs])


@each_site
def test_each_rerun_draws_its_own_dropout(mode):
    model = new_model(residual_mode=mode, dropout=0.5).train()
    masks = []
    model.h[0].dropout.register_forward_hook(lambda _, args, out: masks.append(out == 0))
    model(tokens(3, 8))
    # layer 0's attention and MLP, and in layers 1 and 2 its attention (and MLP, for that site) again
    assert len(masks) == (6 if mode == "method3_2" else 4)
    shares = [(a == b).double().mean() for i, a in enumerate(masks) for b in masks[:i]]
    assert max(shares) < 0.75  # of independent masks half agrees


# About the model


@each_site
def test_a_training_step_is_three_forward_passes(mode):
    model, idx = new_model(residual_mode=mode), tokens(2, 8)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        _, loss = model(idx, idx)
        forward = counter.get_total_flops()
        loss.backward()
    assert counter.get_total_flops() == 3 * forward


@pytest.mark.parametrize("tie_weights", [True, False])
def test_optimizer_groups(tie_weights):
    model = new_model(residual_mode="method3_2", bias=True, norm="layernorm", dconv=True, tie_weights=tie_weights)
    optimizer = model.configure_optimizers(0.5, 0.1, (0.8, 0.9), residual_lr_scale=3.0)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {}
    for group in optimizer.param_groups:
        assert group["betas"] == (0.8, 0.9)
        for p in group["params"]:
            assert names[id(p)] not in groups
            groups[names[id(p)]] = group
    assert set(groups) == set(names.values())
    for name, p in model.named_parameters():
        residual = is_residual(name)
        assert groups[name]["weight_decay"] == (0.5 if p.dim() >= 2 else 0), name
        assert groups[name]["lr"] == pytest.approx(0.3 if residual else 0.1), name
        assert groups[name]["lr_scale"] == (3.0 if residual else 1.0), name

    # without a gradient a step is the decay alone
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        close(p.detach(), before[name] * (1 - 0.1 * 0.5) if p.dim() >= 2 else before[name])


def test_num_params_of_known_models():
    gpt2 = {"norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "bias": True, "tie_weights": True}
    gpt2 |= {"vocab_size": 50257, "block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768}
    llama = {"vocab_size": 32000, "block_size": 4096, "n_layer": 32, "n_head": 32, "n_embd": 4096}
    with torch.device("meta"):  # shapes without numbers
        assert GPT(GPTConfig(**gpt2)).num_params() == 124_439_808
        assert GPT(GPTConfig(**llama)).num_params() == 6_738_415_616
        # a layer m > 0 adds m+1 raw weights: 2 + 3 + … + 12
        assert GPT(GPTConfig(**gpt2, residual_mode="method4_2")).num_params() == 124_439_808 + 77


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_crop_block_size(position):
    model = new_model(position=position)
    idx = tokens(2, 5)
    before, parameters = model(idx, idx)[0], model.num_params()
    model.crop_block_size(5)
    assert torch.equal(model(idx, idx)[0], before)
    assert model.num_params() == parameters - (3 * 16 if position == "learned" else 0)
    assert model.config.block_size == 5
    with pytest.raises(ValueError, match=r"6 tokens.*block_size=5"):
        model(tokens(2, 6))
    with pytest.raises(ValueError, match=r"block_size=5.*6"):
        model.crop_block_size(6)


def test_config_survives_a_dict():
    options = {
        "residual_mode": "method3_2",
        "reruns": 2,
        "residual_start": "own",
        "rope_scaling": (8.0, 1.0, 4.0, 64.0),
    }
    for config in (GPTConfig(recompute=False, n_head=8), GPTConfig(**options), GPTConfig(loops=3)):
        kept = json.loads(json.dumps(asdict(config)))  # as in a checkpoint
        if kept["rope_scaling"] is not None:
            kept["rope_scaling"] = tuple(kept["rope_scaling"])
        assert GPTConfig(**kept) == config


@pytest.mark.parametrize("options", [BACKBONES["gpt2"], BACKBONES["batchnorm"] | {"recompute": False}])
def test_from_state(options):
    model = new_model(residual_mode="method3_2", **options)
    state, idx = model.state_dict(), tokens(2, 8)
    copy = GPT.from_state(model.config, dict(state)).eval()
    assert torch.equal(copy(idx)[0], model(idx)[0])
    assert (copy.lm_head.weight is copy.wte.weight) == model.config.tie_weights
    assert all(p.requires_grad for p in copy.parameters())

    name = "h.2.residual_weight"
    for wrong in (
        {n: t for n, t in state.items() if n != name},
        state | {name: torch.ones(4)},
        state | {"h.3.residual_weight": torch.ones(4)},
    ):
        with pytest.raises(ValueError, match=r"h\.[23]\.residual_weight") as refusal:
            GPT.from_state(model.config, wrong)
        assert "\n" not in str(refusal.value)


# Bad input: one sentence that names the values

BAD = [
    ({"n_head": 3}, "n_embd=16 n_head=3"),
    ({"n_kv_head": 3}, "n_head=4 n_kv_head=3"),
    ({"n_kv_head": 8}, "n_head=4 n_kv_head=8"),
    ({"n_embd": 12}, "rope 3 even"),
    ({"n_layer": 0}, "n_layer 1 0"),
    ({"n_head": 0}, "n_head 1 0"),
    ({"n_kv_head": 0}, "n_kv_head 1 0"),
    ({"vocab_size": -5}, "vocab_size 1 -5"),
    ({"block_size": 0}, "block_size 1 0"),
    ({"ffn_hidden": 0}, "ffn_hidden 1 0"),
    ({"dropout": 1.0}, "dropout 1.0"),
    ({"dropout": -0.1}, "dropout -0.1"),
    ({"dropout": math.nan}, "dropout nan"),
    ({"norm_eps": 0.0}, "norm_eps 0.0"),
    ({"rope_theta": math.inf}, "rope_theta inf"),
    ({"swish_beta": math.nan}, "swish_beta nan"),
    ({"swish_beta": 2.0, "activation": "gelu"}, "swish_beta=2.0 no effect 'gelu'"),
    ({"norm": "instancenorm"}, "'instancenorm' time future"),
    ({"norm": "layer"}, "norm 'layer' layernorm rmsnorm groupnorm batchnorm"),
    ({"norm_position": "before"}, "norm_position 'before' pre post sandwich deepnorm"),
    ({"activation": "silu"}, "activation 'silu' relu relu2 gelu gelu_tanh swish sigmoid glu swiglu geglu reglu"),
    ({"position": "alibi"}, "position 'alibi' rope learned"),
    ({"rope_scaling": (8.0, 1.0, 4.0)}, "rope_scaling"),
    ({"rope_scaling": (8.0, 4.0, 4.0, 8192.0)}, "rope_scaling"),
    ({"rope_scaling": (0.0, 1.0, 4.0, 8192.0)}, "rope_scaling"),
    ({"rope_scaling": (8.0, 1.0, 4.0, math.nan)}, "rope_scaling"),
    ({"rope_scaling": (8.0, 1.0, 4.0, "8192")}, "rope_scaling"),
    ({"rope_scaling": "8,1,4,8192"}, "rope_scaling"),
    ({"rope_scaling": (8.0, 1.0, 4.0, 8192.0), "position": "learned"}, "rope_scaling learned"),
    ({"residual_mode": "no_such"}, f"residual_mode 'no_such' {' '.join(MODES)}"),
    ({"residual_mode": "Method1"}, f"residual_mode 'Method1' {' '.join(MODES)}"),
    ({"n_layer": "4"}, "n_layer int '4'"),
    ({"n_layer": 4.0}, "n_layer int 4.0"),
    ({"n_layer": True}, "n_layer int True"),
    ({"n_layer": None}, "n_layer int None"),
    ({"n_kv_head": "2"}, "n_kv_head int '2'"),
    ({"n_kv_head": True}, "n_kv_head int True"),
    ({"dropout": "0.1"}, "dropout float '0.1'"),
    ({"dropout": False}, "dropout float False"),
    ({"bias": 1}, "bias bool 1"),
    ({"bias": "False"}, "bias bool 'False'"),
    ({"norm": None}, "norm str None"),
    ({"residual_mode": 3}, "residual_mode str 3"),
]


@pytest.mark.parametrize("options, words", BAD, ids=[str(options) for options, _ in BAD])
def test_bad_config_is_refused_with_a_sentence(options, words):
    with pytest.raises(ValueError) as refusal:
        GPTConfig(**{"n_head": 4, "n_embd": 16, **options})
    sentence = str(refusal.value)
    assert "\n" not in sentence
    for word in words.split():
        assert word in sentence


def test_unusual_but_good_configs():
    GPTConfig(dropout=0, norm_eps=1)  # an int will do for a float
    GPTConfig(n_embd=12, n_head=4, position="learned")  # an odd head size, without rope
    GPTConfig(norm="batchnorm")


def test_too_long_a_sequence():
    model = new_model()
    with pytest.raises(ValueError, match=r"9 tokens.*block_size=8"):
        model(tokens(1, 9))
    with pytest.raises(ValueError, match=r"9 tokens.*block_size=8"):
        model(tokens(1, 9), tokens(1, 9))
