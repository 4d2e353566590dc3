"""What model.py computes, against a second computation wherever there is one."""

import math
from dataclasses import asdict
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from backbones import BACKBONES, LEARNED, MODES, each_model, new_model, tokens
from reference import reference_logits
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import model as model_module
from model import GPT, GPTConfig, SwiGLU, new_norm

# a mode of each site, with learned weights
each_site = pytest.mark.parametrize("mode", LEARNED)
each_mode = pytest.mark.parametrize("mode", MODES)
each_recompute = pytest.mark.parametrize("recompute", [True, False])


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def gradients(model, loss):
    """{name: gradient} of one backward pass."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def batch_with_gaps(batch=3, length=8):
    """idx and targets of which some are -1, not counted."""
    idx, targets = tokens(batch, length), tokens(batch, length, seed=2)
    targets[0, 2:5] = targets[-1, -1] = -1
    return idx, targets


class Inputs:
    """Records the first argument of every call of a module."""

    def __init__(self, module):
        self.seen = []
        module.register_forward_pre_hook(lambda _, args: self.seen.append(args[0].detach().clone()))


# The modes


@each_model()
@torch.no_grad()
def test_logits_and_loss_equal_the_reference(options):
    model = new_model(**options)
    idx, targets = batch_with_gaps()
    expected = reference_logits(model.config, model.state_dict(), idx)
    counted = [(b, t) for b in range(3) for t in range(8) if targets[b, t] != -1]
    losses = [expected[b, t].logsumexp(0) - expected[b, t, targets[b, t]] for b, t in counted]

    logits, loss = model(idx, targets)
    close(logits, expected)
    close(loss, sum(losses) / len(losses))

    logits, loss = model(idx)
    close(logits, expected[:, -1:])
    assert loss is None


@each_model(kv_heads=(2,))
@torch.no_grad()
def test_no_token_sees_the_future(options):
    model = new_model(**options)
    idx = tokens(3, 8)
    changed = idx.clone()
    at = [1, 4, 7]  # the changed token of each row
    for row, t in enumerate(at):
        changed[row, t] = (idx[row, t] + 1) % 13
    difference = (model(idx, idx)[0] - model(changed, idx)[0]).abs().amax(dim=2)
    for row, t in enumerate(at):
        assert difference[row, :t].max() < 1e-12
        assert difference[row, t:].min() > 1e-6  # the past, on the other hand, is seen


@each_model(kv_heads=(2,))
def test_gradients_equal_the_references_and_every_parameter_learns(options):
    model = new_model(**options)
    idx, targets = batch_with_gaps(batch=2)
    grads = gradients(model, model(idx, targets)[1])

    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    logits = reference_logits(model.config, state, idx)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    for (name, grad), expected in zip(grads.items(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        close(grad, expected)
        if name.endswith("attn.k.bias") and options.get("position") == "learned":
            # q·b is the same for every key, so softmax cancels it (under rope it is not: b turns with the key)
            assert grad.abs().max() < 1e-12, name
        elif name.endswith("residual_weight"):
            assert grad.isfinite().all() and grad.abs().min() > 1e-9, name
        else:
            assert grad.isfinite().all() and grad.abs().max() > 1e-9, name


@each_mode
@each_recompute
def test_layer_0_is_plain(mode, recompute):
    baseline, model = new_model(perturbed=False), new_model(residual_mode=mode, recompute=recompute)
    baseline.load_state_dict({n: p for n, p in model.state_dict().items() if not n.endswith("residual_weight")})
    layer_1 = [Inputs(m.h[1].norm1) for m in (baseline, model)]
    idx = tokens(2, 8)
    same = torch.equal(baseline(idx)[0], model(idx)[0])
    assert torch.equal(layer_1[0].seen[0], layer_1[1].seen[0])
    assert same == (mode == "baseline")


@each_mode
@each_recompute
def test_one_layer_is_the_baseline(mode, recompute):
    model = new_model(n_layer=1, residual_mode=mode, recompute=recompute)
    baseline = new_model(n_layer=1)
    baseline.load_state_dict(model.state_dict())  # strict: no raw weights either
    assert torch.equal(model(tokens(2, 8))[0], baseline(tokens(2, 8))[0])


@pytest.mark.parametrize("mean, learned", [("method3_1", "method3_2"), ("method4_1", "method4_2")])
@each_recompute
def test_learned_weights_start_as_the_mean(mean, learned, recompute):
    a = new_model(perturbed=False, residual_mode=mean, recompute=recompute)
    b = new_model(perturbed=False, residual_mode=learned, recompute=recompute)
    close(a(tokens(2, 8))[0], b(tokens(2, 8))[0], 1e-14)  # the same seed draws the same parameters


@each_mode
def test_residual_weights(mode):
    model = new_model(perturbed=False, n_layer=4, residual_mode=mode)
    weights, parameters = model.residual_weights(), dict(model.named_parameters())
    if mode not in LEARNED:
        assert weights == [None] * 4
        assert not any("residual" in name for name in parameters)
        return
    assert weights[0] is None and "h.0.residual_weight" not in parameters
    for m in (1, 2, 3):
        assert weights[m] is parameters[f"h.{m}.residual_weight"]
        assert weights[m].tolist() == [1.0] * (m + 1)


def test_modes_by_name():
    assert sorted(MODES) == "baseline method1 method2 method3_1 method3_2 method4_1 method4_2".split()


# The loss without all logits, and other ways of computing the same


@pytest.mark.parametrize("rows_per_chunk, chunks", [(None, 1), (1, 24), (5, 5), (24, 1)])  # None: the default
@pytest.mark.parametrize("tie_weights", [True, False])
def test_loss_without_logits(rows_per_chunk, chunks, tie_weights, monkeypatch):
    model = new_model(tie_weights=tie_weights)
    idx, targets = batch_with_gaps()  # 24 rows
    targets[1, :4] = model(idx, idx)[0][1, :4].argmax(-1)  # some right predictions
    if rows_per_chunk:  # the last chunk may be shorter
        smaller = partial(model_module.logit_chunks, numbers=13 * rows_per_chunk + 12)
        monkeypatch.setattr(model_module, "logit_chunks", smaller)
    assert len(list(model_module.logit_chunks(torch.zeros(24, 16), torch.zeros(13, 16)))) == chunks

    logits, loss = model(idx, targets)
    none, chunked_loss = model(idx, targets, return_logits=False)
    assert none is None
    close(chunked_loss, loss)
    with torch.no_grad():
        close(model(idx, targets, return_logits=False)[1], loss)
    # 3: in training the gradient that comes in from above is not 1
    plain, chunked = (gradients(model, 3 * part) for part in (loss, chunked_loss))
    for name in plain:
        close(chunked[name], plain[name])

    total, correct = model.score(idx, targets)
    close(total.double(), loss * (targets >= 0).sum(), 1e-6)
    assert correct == (logits.argmax(-1) == targets).sum() >= 4


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
    attention = Inputs(model.h[0].attn)
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


def test_fast_rmsnorm_and_swiglu_equal_torch():
    """Values and gradients, also of one row or one channel; a bfloat16 input is not rounded again."""
    for shape in ((2, 5, 8), (1, 1, 8), (3, 4, 1)):
        config = GPTConfig(n_embd=shape[-1], n_head=1, position="learned", norm_eps=1e-3)
        norm = new_norm(config).double()
        torch.nn.init.normal_(norm.weight)
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        plain = F.rms_norm(x, shape[-1:], norm.weight, 1e-3)
        dy = torch.randn_like(plain)
        close(norm(x), plain)
        for ours, theirs in zip(*(torch.autograd.grad(y, (x, norm.weight), dy) for y in (norm(x), plain)), strict=True):
            close(ours, theirs)
    gate, up = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    close(SwiGLU.apply(gate, up), F.silu(gate) * up)
    assert torch.autograd.gradcheck(SwiGLU.apply, (gate, up))
    norm, x = norm.float(), torch.randn(2, 3, 1).bfloat16()
    torch.testing.assert_close(norm(x), norm(x.float()), rtol=0, atol=0)


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


@each_site
@pytest.mark.parametrize("how", ["layers", "whole"])
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


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("wrap", [nn.Identity, DistributedDataParallel])
def test_what_is_compiled_does_not_grow_with_depth(wrap, checkpoint, monkeypatch, tmp_path):
    """And nothing is compiled again after the first training and evaluation steps, with DDP, too."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1)  # DDP splits graphs of large parameters
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    graphs = []
    idx, targets = batch_with_gaps()
    for n_layer in (2, 3, 9):
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
    assert graphs[0] == graphs[1] == graphs[2] > 0


@each_mode
@each_recompute
def test_autocast_keeps_the_stream_in_float32(mode, recompute):
    model = new_model(residual_mode=mode, recompute=recompute).float()
    layer_2 = Inputs(model.h[2].norm1)
    idx = tokens(3, 8)
    _, expected = model(idx, idx)
    with torch.autocast("cpu", torch.bfloat16):
        _, loss = model(idx, idx)
        _, chunked = model(idx, idx, return_logits=False)
    close(loss.float(), expected, 0.05)
    close(chunked, expected, 0.05)
    assert {x.dtype for x in layer_2.seen} == {torch.float32}
    chunked.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@each_site
def test_no_attention_matrix_is_kept(mode):
    length = 37  # no other dimension is 37
    model = new_model(residual_mode=mode, block_size=length, n_kv_head=2)
    shapes = []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens(1, length), tokens(1, length))[1].backward()
    assert shapes and max(shape.count(length) for shape in shapes) == 1


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


@each_mode
def test_dropout(mode):
    model = new_model(residual_mode=mode, dropout=0.5)
    idx = tokens(3, 8)
    assert torch.equal(model(idx)[0], model(idx)[0])
    close(model(idx)[0], new_model(residual_mode=mode)(idx)[0])  # eval: none
    model.train()
    assert not torch.equal(model(idx)[0], model(idx)[0])

    # on embeddings: about half of what layer 0 reads is zero
    layer_0 = Inputs(model.h[0].norm1)
    model(idx)
    assert 0.4 < (layer_0.seen[0] == 0).double().mean() < 0.6

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


@each_model(backbones=("llama", "gpt2"))
def test_flops_per_token(options):
    model, seq_len = new_model(**options), 7
    idx = tokens(2, seq_len)
    # The plain implementation of attention, since the counter knows matrix multiplications: QKᵀ and AV are its only
    # batched ones. It multiplies all T² pairs of tokens; a causal one needs T(T+1)/2 of them.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx)
    counts = dict(counter.get_flop_counts()["Global"])
    attention = counts.pop(torch.ops.aten.bmm)
    assert set(counts) <= {torch.ops.aten.mm, torch.ops.aten.addmm}
    executed = sum(counts.values()) + attention * (seq_len + 1) / (2 * seq_len)
    assert model.flops_per_token(seq_len) * idx.numel() == pytest.approx(executed, rel=1e-9)


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
        residual = name.endswith("residual_weight")
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
    config = GPTConfig(residual_mode="method3_2", recompute=False, n_head=8)  # what a checkpoint keeps
    assert GPTConfig(**asdict(config)) == config


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
    ({"residual_mode": "method5"}, f"residual_mode 'method5' {' '.join(MODES)}"),
    ({"residual_mode": "Method1"}, f"residual_mode 'Method1' {' '.join(MODES)}"),
    *[
        ({"norm": "batchnorm", "residual_mode": m}, "batchnorm re-run recompute=False")
        for m in MODES
        if m != "baseline"
    ],
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
    for mode in MODES:
        GPTConfig(norm="batchnorm", residual_mode=mode, recompute=False)


def test_too_long_a_sequence():
    model = new_model()
    with pytest.raises(ValueError, match=r"9 tokens.*block_size=8"):
        model(tokens(1, 9))
    with pytest.raises(ValueError, match=r"9 tokens.*block_size=8"):
        model(tokens(1, 9), tokens(1, 9))
