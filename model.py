"""
A GPT whose residual connection is a one-word choice.

Read top to bottom: the residual modes, the config, the pieces of a layer (norm, attention, MLP), the layer, the model.
The methods live in two places: a row of `ResidualMode` and the loop in `GPT.combine`.
"""

import math
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from typing import get_args

import torch
import torch.nn as nn
import torch.nn.functional as F


class ResidualMode(Enum):
    """
    A mode changes one add of the layer, its site: instead of the sub-layer's own output o_m, layer m adds
    Σ w_i·o_i over the layers i = 0 … m, where o_i (i < m) comes from running layer i again on layer m's input
    (recompute=True) or from layer i's first pass (recompute=False).
    """

    #           name         site         weights w_i
    BASELINE = "baseline", None, None
    METHOD1 = "method1", "mlp", "ones"
    METHOD2 = "method2", "attention", "ones"
    METHOD3_1 = "method3_1", "mlp", "mean"  # 1/(m+1)
    METHOD3_2 = "method3_2", "mlp", "learned"  # softmax of m+1 raw weights
    METHOD4_1 = "method4_1", "attention", "mean"
    METHOD4_2 = "method4_2", "attention", "learned"

    def __new__(cls, name, site, weights):
        assert site in (None, "mlp", "attention"), site
        mode = object.__new__(cls)
        mode._value_, mode.site, mode.weights = name, site, weights
        return mode


@dataclass
class GPTConfig:
    block_size: int = 128  # longest context
    vocab_size: int = 320  # 257 byte-level ids rounded up to a multiple of 64
    n_layer: int = 6
    n_head: int = 4
    n_kv_head: int | None = None  # grouped-query attention; None: n_head
    n_embd: int = 96
    ffn_hidden: int | None = None  # None: 4·n_embd, gated: ⅔ of that rounded up to a multiple of 256
    dropout: float = 0.0  # on embeddings and sub-layer outputs, never on attention probabilities
    bias: bool = False  # in linear layers and layernorm
    norm: str = "rmsnorm"  # layernorm, rmsnorm, groupnorm, batchnorm
    norm_position: str = "pre"  # pre, post, sandwich, deepnorm
    norm_eps: float = 1e-5
    activation: str = "swiglu"  # a key of ACTIVATIONS
    swish_beta: float = 1.0  # swish and swiglu: x·sigmoid(beta·x)
    position: str = "rope"  # rope, learned
    rope_theta: float = 10000.0
    dconv: bool = False  # Primer's causal depth-wise convolution of q, k and v
    tie_weights: bool = False  # head = token embedding
    residual_mode: str = "baseline"  # a name in ResidualMode
    recompute: bool = True  # earlier layers run again on this layer's input; False: their first outputs are reused

    def __post_init__(self):
        for field in fields(self):
            setattr(self, field.name, checked_type(field.name, getattr(self, field.name), field.type))
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.ffn_hidden is None:
            gated = -(-8 * self.n_embd // 768) * 256  # 8/3·d rounded up to a multiple of 256
            self.ffn_hidden = gated if self.activation in GATED else 4 * self.n_embd
        self.head_size = self.n_embd // max(1, self.n_head)

        check_choice("norm_position", self.norm_position, ("pre", "post", "sandwich", "deepnorm"))
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("position", self.position, ("rope", "learned"))
        check_choice("residual_mode", self.residual_mode, [mode.value for mode in ResidualMode])
        self.mode = ResidualMode(self.residual_mode)
        refuse(self.norm == "instancenorm", "norm 'instancenorm' averages over time: a token would see the future")
        check_choice("norm", self.norm, NORMS)

        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "ffn_hidden"):
            refuse(getattr(self, name) < 1, f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("norm_eps", "rope_theta"):
            refuse(getattr(self, name) <= 0, f"{name} must be more than 0, not {getattr(self, name)}")
        refuse(not 0 <= self.dropout < 1, f"dropout must be at least 0 and less than 1, not {self.dropout}")
        refuse(self.n_embd % self.n_head, f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
        refuse(self.n_head % self.n_kv_head, f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}")
        refuse(
            self.position == "rope" and self.head_size % 2,
            f"rope turns pairs of channels: n_embd/n_head={self.head_size} must be even",
        )
        refuse(
            self.swish_beta != 1 and ACTIVATIONS[self.activation] is not swish,
            f"swish_beta={self.swish_beta} has no effect on activation '{self.activation}'",
        )
        refuse(
            self.norm == "batchnorm" and self.mode.site and self.recompute,
            "a batchnorm cannot be re-run, since later layers' inputs would mix into its running statistics: "
            "set recompute=False or another norm",
        )


def refuse(condition, sentence):
    if condition:
        raise ValueError(sentence)


def check_choice(name, value, choices):
    refuse(value not in choices, f"{name} '{value}' is not known: choose one of {', '.join(choices)}")


def checked_type(name, value, expected):
    """The value, if it is of the type; an int is made a float where one is expected, a bool is no number."""
    try:
        value = float(value) if expected is float and type(value) is int else value
    except OverflowError:
        refuse(True, f"{name} is too large")
    kind = getattr(expected, "__name__", expected)
    refuse(type(value) not in (get_args(expected) or (expected,)), f"{name} must be {kind}, not {value!r}")
    refuse(expected is float and not math.isfinite(value), f"{name} must be finite, not {value}")
    return value


# Norms: all take and return (B, T, C)


class TokenRows:
    """Torch's norms of (N, C): each token is a row."""

    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)


class GroupNorm(TokenRows, nn.GroupNorm):
    """Groups of channels, never of time steps."""


class BatchNorm(TokenRows, nn.BatchNorm1d):
    """Statistics over all tokens of the batch in training, so a token sees the future there; running ones in eval."""


class FewPassRMSNorm(torch.autograd.Function):
    """weight·x/rms(x). Torch's own is not fused on a CPU: its backward there takes three times as long."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.size(-1)
        scale = (mean_square + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight, scale = ctx.saved_tensors
        xhat, dxhat = x * scale, dy * weight
        along = (xhat * dxhat).mean(dim=-1, keepdim=True)  # the output does not change when x only grows
        dweight = (dy * xhat).flatten(0, -2).sum(dim=0)
        return dxhat.addcmul_(xhat, along, value=-1).mul_(scale), dweight, None


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return FewPassRMSNorm.apply(x.type_as(self.weight), self.weight, self.eps)


NORMS = {
    "layernorm": lambda c: nn.LayerNorm(c.n_embd, eps=c.norm_eps, bias=c.bias),
    "rmsnorm": lambda c: RMSNorm(c.n_embd, eps=c.norm_eps),
    "groupnorm": lambda c: GroupNorm(c.n_head, c.n_embd, eps=c.norm_eps),
    "batchnorm": lambda c: BatchNorm(c.n_embd, eps=c.norm_eps),
}


def new_norm(config):
    return NORMS[config.norm](config)


def swish(x, beta):
    return x * torch.sigmoid(beta * x)  # F.silu for beta = 1


ACTIVATIONS = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swish": swish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": F.leaky_relu,  # slope 0.01
    "elu": F.elu,
    # the gated ones multiply the activation of one projection with another projection
    "glu": torch.sigmoid,
    "swiglu": swish,
    "geglu": F.gelu,
    "reglu": F.relu,
}
GATED = ("glu", "swiglu", "geglu", "reglu")


class SwiGLU(torch.autograd.Function):
    """silu(gate)·up, keeping two tensors for backward and not three."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        if self.activation is swish:
            self.activation = F.silu if config.swish_beta == 1 else partial(swish, beta=config.swish_beta)
        self.gate = None
        if config.activation in GATED:
            self.gate = nn.Linear(config.n_embd, config.ffn_hidden, bias=config.bias)
        self.up = nn.Linear(config.n_embd, config.ffn_hidden, bias=config.bias)
        self.down = nn.Linear(config.ffn_hidden, config.n_embd, bias=config.bias)

    def forward(self, x):
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        gate, up = self.gate(x), self.up(x)
        return self.down(SwiGLU.apply(gate, up) if self.activation is F.silu else self.activation(gate) * up)


def rotate(x, cos, sin):
    """Rotary position: channel j turns with channel j + hd/2. x (B, H, T, hd), cos and sin (T, hd/2)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention. A re-run keeps the attention weights of the first pass, as the q and k that make them."""

    def __init__(self, config):
        super().__init__()
        self.head_size = config.head_size
        self.grouped = config.n_kv_head < config.n_head
        kv_width = config.n_kv_head * config.head_size
        self.q = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.k = nn.Linear(config.n_embd, kv_width, bias=config.bias)
        self.v = nn.Linear(config.n_embd, kv_width, bias=config.bias)
        self.o = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.q_conv = self.k_conv = self.v_conv = None
        if config.dconv:  # row j of a filter multiplies the projection at time t-2+j
            self.q_conv = nn.Parameter(torch.empty(3, config.n_embd))
            self.k_conv = nn.Parameter(torch.empty(3, kv_width))
            self.v_conv = nn.Parameter(torch.empty(3, kv_width))

    def project(self, name, x, memory):
        """x (B, T, C) to the q, k or v of each head: (B, heads, T, head size)."""
        x, conv = getattr(self, name)(x), getattr(self, name + "_conv")
        if conv is not None:
            x = F.pad(x, (0, 0, 2, 0)) if memory is None else memory.with_last_two(name, x)
            x = x[:, :-2] * conv[0] + x[:, 1:-1] * conv[1] + x[:, 2:] * conv[2]
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2).contiguous()  # a copy, but attention is faster

    def forward(self, x, rope, mask, qk, memory):
        """In the first pass qk is None: it is made and returned. In a re-run the kept qk attends to new values."""
        if qk is None:
            q, k = self.project("q", x, memory), self.project("k", x, memory)
            if rope is not None:
                q, k = rotate(q, *rope), rotate(k, *rope)
            if memory is not None:
                k = memory.append("k", k)
            qk = q, k
        q, k = qk
        v = self.project("v", x, memory)
        if memory is not None:
            v = memory.append("v", v)
        causal = mask is None and q.size(2) > 1  # a single new token may see all
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.grouped)
        return self.o(y.transpose(1, 2).flatten(2)), qk


class Block(nn.Module):
    """
    A layer, in the parts that the residual modes put together:

        x ──┬── attend ── (+) ──┬── feed ── (+) ── x'
            └──────────────┘    └────────────┘

        pre         attend: Attn(norm1(x))               (+): x + a
        sandwich    attend: post_norm1(Attn(norm1(x)))   (+): x + a
        post        attend: Attn(x)                      (+): norm1(x + a)
        deepnorm    attend: Attn(x)                      (+): norm1(α·x + a)

    and the same for feed, with the MLP and norm2.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.norm_first = config.norm_position in ("pre", "sandwich")
        self.alpha = (2 * config.n_layer) ** 0.25 if config.norm_position == "deepnorm" else 1.0
        self.norm1, self.attn = new_norm(config), Attention(config)
        self.norm2, self.mlp = new_norm(config), MLP(config)
        self.post_norm1 = self.post_norm2 = nn.Identity()
        if config.norm_position == "sandwich":
            self.post_norm1, self.post_norm2 = new_norm(config), new_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        self.residual_weight = None  # raw weights of layers 0 … layer
        if config.mode.weights == "learned" and layer > 0:
            self.residual_weight = nn.Parameter(torch.ones(layer + 1))

    def attend(self, x, rope=None, mask=None, qk=None, memory=None):
        a, qk = self.attn(self.norm1(x) if self.norm_first else x, rope, mask, qk, memory)
        return self.dropout(self.post_norm1(a)), qk

    def add_attention(self, x, a):
        return x + a if self.norm_first else self.norm1(self.alpha * x + a)

    def feed(self, y):
        f = self.mlp(self.norm2(y) if self.norm_first else y)
        return self.dropout(self.post_norm2(f))

    def add_mlp(self, y, f):
        return y + f if self.norm_first else self.norm2(self.alpha * y + f)

    def rerun(self, site, weight, x, qk, mask=None, memory=None):
        """weight·o, where o is this layer's output on a later layer's input x with the kept attention weights."""
        o, _ = self.attend(x, mask=mask, qk=qk, memory=memory)
        if site == "mlp":
            o = self.feed(self.add_attention(x, o))
        return weight * o


class ForgetfulRerun(torch.autograd.Function):
    """
    Block.rerun that keeps its inputs alone: backward runs it once more. (Torch's own checkpoint keeps the graph of a
    re-run, small pieces between the freed tensors that stop the C library from giving their place to the next ones. Its
    reentrant kind does not, but adds to a parameter's gradient several times in a step, which DDP refuses.)
    """

    @staticmethod
    def forward(ctx, block, site, weight, x, q, k, *parameters):  # inputs are what gets a gradient
        ctx.block, ctx.site = block, site
        ctx.save_for_backward(weight, x, q, k)
        device = x.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.random = torch if device == "cpu" else torch.get_device_module(device)
        ctx.random_state = ctx.random.get_rng_state() if block.dropout.p > 0 else None
        return block.rerun(site, weight, x, (q, k))

    @staticmethod
    def backward(ctx, grad):
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        weight, x, q, k = inputs
        if ctx.random_state is not None:  # the same dropout
            random_state = ctx.random.get_rng_state()
            ctx.random.set_rng_state(ctx.random_state)
        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            o = ctx.block.rerun(ctx.site, weight, x, (q, k))
        if ctx.random_state is not None:
            ctx.random.set_rng_state(random_state)
        inputs += ctx.block.parameters()
        grads = iter(torch.autograd.grad(o, [t for t in inputs if t.requires_grad], grad, allow_unused=True))
        return None, None, *(next(grads) if t.requires_grad else None for t in inputs)


class PairMemory:
    """What generation keeps of one attention: its keys and values so far, and what the convolutions look back on."""

    def __init__(self, cache):
        self.cache, self.tensors = cache, {}

    def append(self, name, new):
        """Store new (B, H, t, hd) behind what is there; return all of it."""
        start, end = self.cache.position, self.cache.position + new.size(2)
        if name not in self.tensors:
            self.tensors[name] = new.new_empty(*new.shape[:2], self.cache.length, new.size(3))
        self.tensors[name][:, :, start:end] = new
        return self.tensors[name][:, :, :end]

    def with_last_two(self, name, x):
        """x (B, t, C) behind the two time steps before it, zeros at the beginning."""
        name += "_conv"
        before = self.tensors.get(name, x.new_zeros(x.size(0), 2, x.size(2)))
        x = torch.cat((before, x), dim=1)
        self.tensors[name] = x[:, -2:]
        return x


class Cache:
    """
    What a forward pass over new tokens needs of the tokens before them. The pair (m, i) is layer i's attention inside
    layer m: keys and values for m = i, and for a re-run (i < m) its values, since its keys are layer i's own.
    """

    def __init__(self, batch, length):
        self.batch, self.length, self.position, self.pairs = batch, length, 0, {}

    def pair(self, m, i):
        return self.pairs.setdefault((m, i), PairMemory(self))

    def repeat(self, times):
        """Each row becomes `times` rows: several continuations of one prompt."""
        self.batch *= times
        for memory in self.pairs.values():
            memory.tensors = {name: t.repeat_interleave(times, dim=0) for name, t in memory.tensors.items()}

    def nbytes(self):
        return sum(tensor.nbytes for memory in self.pairs.values() for tensor in memory.tensors.values())


class ChunkedLoss(torch.autograd.Function):
    """
    Mean cross-entropy of the logits x·Wᵀ, a few rows at a time: all logits at once would need N × V numbers. Each
    chunk's logits become their own gradient in place and are multiplied while they are there, so that backward has
    nothing to compute again.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, dtype):  # (N, C), (V, C), (N,); target -1: not counted
        total, dx, dweight = 0.0, torch.empty_like(x), torch.zeros_like(weight)
        weight, low = weight.to(dtype), x.to(dtype)  # what autocast would do
        targets, ignored = without_ignored(targets)
        counted = low.masked_fill(ignored, 0)
        for rows, logits in logit_chunks(low, weight):
            losses, p = score_rows(logits, targets[rows], logits.amax(dim=1, keepdim=True))
            total += losses.masked_fill(ignored[rows], 0).sum()
            dlogits = p.scatter_add_(1, targets[rows], -torch.ones_like(losses)).to(dtype)
            dx[rows] = dlogits @ weight
            if dtype == dweight.dtype:  # no second V × C tensor
                dweight.addmm_(dlogits.T, counted[rows])
            else:
                dweight += dlogits.T @ counted[rows]
        count = (~ignored).sum()
        ctx.save_for_backward(dx.masked_fill_(ignored, 0), dweight, count)
        return total / count

    @staticmethod
    def backward(ctx, grad):
        dx, dweight, count = ctx.saved_tensors
        scale = grad / count  # here and not above, so that float16 gradients do not underflow
        return dx.mul_(scale), dweight.mul_(scale), None, None  # in place: torch refuses a second backward


def matmul_dtype(x):
    """What autocast, if it is on, makes of x in a matrix multiplication."""
    autocast = torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if autocast else x.dtype


def logit_chunks(x, weight, numbers=2**24):
    """(rows, their logits, at least float32) with about `numbers` logits at a time, all in the same memory."""
    step = max(1, numbers // weight.size(0))
    buffer = x.new_empty(min(step, x.size(0)), weight.size(0))
    for start in range(0, x.size(0), step):
        rows = x[start : start + step]
        logits = torch.mm(rows, weight.T, out=buffer[: rows.size(0)])
        yield slice(start, start + step), logits.to(torch.promote_types(x.dtype, torch.float32))


def without_ignored(targets):
    """(N,) -> ids (N, 1) with 0 in place of -1, and where that was."""
    ignored = (targets == -1).unsqueeze(1)
    return targets.unsqueeze(1).masked_fill(ignored, 0), ignored


def score_rows(logits, targets, best):
    """(n, V), (n, 1), their maxima (n, 1) -> losses (n, 1), and the softmax, which takes the logits' place."""
    right = logits.gather(1, targets)
    p = torch.softmax(logits, dim=1, out=logits)
    return best - p.amax(dim=1, keepdim=True).log() - right, p  # log Σ exp from the best, whose p is never near 0


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.checkpoint_recompute = False  # make re-runs again in backward instead of keeping their activations
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm_f = new_norm(config) if config.norm_position in ("pre", "sandwich") else nn.Identity()
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.wte.weight
        self.init_parameters()

    @torch.no_grad()
    def init_parameters(self):
        config = self.config
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif p.dim() == 1:
                pass  # norms and raw residual weights are made as ones
            elif name.endswith("_conv"):  # the identity: all of time t, nothing of t-1 and t-2
                p.copy_(torch.tensor([[0.0], [0.0], [1.0]]))
            elif config.norm_position == "deepnorm" and name.startswith("h."):
                is_qk = name.endswith(("attn.q.weight", "attn.k.weight"))
                nn.init.xavier_normal_(p, gain=1.0 if is_qk else (8 * config.n_layer) ** -0.25)
            elif name.endswith(("attn.o.weight", "mlp.down.weight")):  # 2·n_layer of them add up in the stream
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))
            else:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx, targets=None, return_logits=True, cache=None):
        """
        idx (B, T) -> logits, loss. With targets: logits at every position (None if not return_logits, which saves
        their memory). Without: the last position's. With a cache, idx holds only the tokens that are new to it.
        """
        x = self.norm_f(self.hidden(idx, cache))
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        if return_logits:
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        if torch.is_grad_enabled():
            return None, ChunkedLoss.apply(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), matmul_dtype(x))
        return None, self.score_of(x, targets)[0] / (targets != -1).sum()

    def hidden(self, idx, cache=None):
        """The stream after the last layer: (B, T) -> (B, T, C)."""
        site, recompute = self.config.mode.site, self.config.recompute
        x, rope, mask = self.embed(idx, cache)
        kept = []  # what each layer leaves for the later ones: its (q, k) to run it again, or its output
        for m, block in enumerate(self.h):
            a, qk = block.attend(x, rope, mask, memory=cache and cache.pair(m, m))
            if site == "attention":
                kept.append(qk if recompute else a)
                a = self.combine(m, x, a, kept, mask, cache)
            y = block.add_attention(x, a)
            f = block.feed(y)
            if site == "mlp":
                kept.append(qk if recompute else f)
                f = self.combine(m, x, f, kept, mask, cache)
            x = block.add_mlp(y, f)
        if cache is not None:
            cache.position += idx.size(1)
        return x

    def combine(self, m, x, own, kept, mask, cache):
        """Σ w_i·o_i over the layers 0 … m. The last, o_m, is layer m's own output; x is its input."""
        if m == 0:
            return own
        site, weights = self.config.mode.site, self.mixing_weights(m)
        total = (weights[m] * own).type_as(x)  # under autocast the sum is in x's float32
        for i, earlier in enumerate(self.h[:m]):
            if not self.config.recompute:
                total += weights[i] * kept[i]
            elif self.checkpoint_recompute and torch.is_grad_enabled() and cache is None:
                total += ForgetfulRerun.apply(earlier, site, weights[i], x, *kept[i], *earlier.parameters())
            else:
                total += earlier.rerun(site, weights[i], x, kept[i], mask, cache and cache.pair(m, i))
        return total

    def mixing_weights(self, m):
        """w_0 … w_m of layer m."""
        if self.config.mode.weights == "learned":
            return self.h[m].residual_weight.softmax(dim=0)
        ones = self.wte.weight.new_ones(m + 1)
        return {"ones": ones, "mean": ones / (m + 1)}[self.config.mode.weights]

    def embed(self, idx, cache):
        """x (B, T, C), and for the positions of idx the rope tables and, if several tokens join a cache, the mask."""
        start = cache.position if cache else 0
        end = start + idx.size(1)
        limit = cache.length if cache else self.config.block_size
        refuse(end > limit, f"{end} tokens do not fit into {'the cache' if cache else 'block_size'}={limit}")
        if cache:
            refuse(cache.batch != len(idx), f"a batch of {len(idx)} does not fit to the cache's {cache.batch}")
        positions = torch.arange(start, end, device=idx.device)
        x, rope, mask = self.wte(idx), None, None
        if self.wpe is not None:
            x = x + self.wpe(positions)
        else:
            hd, dtype = self.config.head_size, torch.promote_types(x.dtype, torch.float32)
            frequencies = self.config.rope_theta ** -(torch.arange(0, hd, 2, device=idx.device, dtype=dtype) / hd)
            angles = positions[:, None] * frequencies
            rope = angles.cos(), angles.sin()
        if start > 0 and idx.size(1) > 1:
            mask = torch.ones(idx.size(1), end, dtype=torch.bool, device=idx.device).tril(diagonal=start)
        return self.dropout(x), rope, mask

    @torch.no_grad()
    def score(self, idx, targets):
        """What an evaluation adds up: the sum of the losses and the number of right predictions, as 0-d tensors."""
        return self.score_of(self.norm_f(self.hidden(idx)), targets)

    def score_of(self, x, targets):
        """The same from the normed stream."""
        dtype, loss, hits = matmul_dtype(x), 0.0, 0
        targets, ignored = without_ignored(targets.flatten())
        for rows, logits in logit_chunks(x.flatten(0, 1).to(dtype), self.lm_head.weight.to(dtype)):
            best, predicted = logits.max(dim=1, keepdim=True)
            hits += ((predicted == targets[rows]) & ~ignored[rows]).sum()
            loss += score_rows(logits, targets[rows], best)[0].masked_fill(ignored[rows], 0).sum()
        return loss, hits

    # generation

    def new_cache(self, batch, length):
        block_size = self.config.block_size
        refuse(length > block_size, f"a cache of {length} tokens is longer than block_size={block_size}")
        return Cache(batch, length)

    @torch.no_grad()
    def stream(
        self,
        idx,
        max_new_tokens,
        temperature=1.0,
        top_k=None,
        top_p=None,
        use_cache=True,
        generator=None,
        stop_id=None,
        num_samples=1,
        real_vocab=None,
    ):
        """
        Continue idx (B, T): yields the next ids, (B·num_samples,), one step at a time. The context is always the last
        block_size tokens, counted from position 0. Up to there a new token costs one token's work; beyond, every
        token's position shifts at each step and nothing cached stays true, so a new token costs a whole forward pass.
        A row that has drawn stop_id goes on as stop_id; when all have, the stream ends. Ids from real_vocab on (the
        padding of the vocabulary) are never drawn.
        """
        refuse(temperature < 0, f"temperature must not be negative, not {temperature}")
        refuse(top_k is not None and top_k < 1, f"top_k must be at least 1, not {top_k}")
        refuse(top_p is not None and not 0 < top_p <= 1, f"top_p must be more than 0 and at most 1, not {top_p}")
        block_size = self.config.block_size
        cache = self.new_cache(len(idx), min(idx.size(1) + max_new_tokens, block_size)) if use_cache else None
        stopped = torch.zeros(len(idx) * num_samples, dtype=torch.bool, device=idx.device)
        new = idx
        for step in range(max_new_tokens):
            if cache is not None and idx.size(1) <= block_size:
                logits, _ = self(new, cache=cache)
            else:
                logits, _ = self(idx[:, -block_size:])
            logits = logits[:, -1]
            if step == 0 and num_samples > 1:  # one prefill for all samples
                idx, logits = (t.repeat_interleave(num_samples, dim=0) for t in (idx, logits))
                if cache is not None:
                    cache.repeat(num_samples)
            next_id = draw(logits[:, :real_vocab], temperature, top_k, top_p, generator)
            if stop_id is not None:
                next_id = next_id.masked_fill(stopped, stop_id)
                stopped |= next_id == stop_id
            yield next_id
            if stop_id is not None and stopped.all():
                return
            new = next_id.unsqueeze(1)
            idx = torch.cat((idx, new), dim=1)

    def generate(
        self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=True, generator=None, stop_id=None
    ):
        """idx (B, T) -> (B, T + new): what `stream` yields, behind idx."""
        steps = self.stream(idx, max_new_tokens, temperature, top_k, top_p, use_cache, generator, stop_id)
        return torch.cat([idx] + [ids.unsqueeze(1) for ids in steps], dim=1)

    def compile_layers(self):
        """torch.compile what layers are made of, once for all layers and re-runs."""
        for block in self.h:
            block.attend, block.feed = torch.compile(block.attend), torch.compile(block.feed)

    # about the model

    def residual_weights(self):
        """One entry a layer: the raw weights (m+1), or None."""
        return [block.residual_weight for block in self.h]

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len):
        """
        Matrix-multiply FLOPs of a forward pass as executed, re-runs and their QKᵀ included; a token attends to
        (seq_len + 1)/2 tokens on average. A training step is three times that.
        """
        c = self.config
        block = self.h[0]
        size = {name: sum(p.numel() for p in m.parameters() if p.dim() == 2) for name, m in block.attn.named_children()}
        mlp = sum(p.numel() for p in block.mlp.parameters() if p.dim() == 2)
        attention = 2 * 2 * c.n_embd * (seq_len + 1) / 2  # QKᵀ and AV
        layer = 2 * (sum(size.values()) + mlp) + attention
        rerun = 2 * (size["v"] + size["o"] + (mlp if c.mode.site == "mlp" else 0)) + attention
        reruns = c.n_layer * (c.n_layer - 1) // 2 if c.mode.site and c.recompute else 0
        return c.n_layer * layer + reruns * rerun + 2 * self.lm_head.weight.numel()

    def crop_block_size(self, block_size):
        was = self.config.block_size
        refuse(block_size > was, f"block_size={was} can be cropped, not raised to {block_size}")
        self.config.block_size = block_size
        if self.wpe is not None:
            self.wpe.weight = nn.Parameter(self.wpe.weight[:block_size].clone())
            self.wpe.num_embeddings = block_size

    def configure_optimizers(self, weight_decay, learning_rate, betas, residual_lr_scale=1.0):
        """AdamW: decay for matrices, none for norms, biases and raw residual weights, which may learn faster."""
        residual = [p for p in self.residual_weights() if p is not None]
        others = [p for name, p in self.named_parameters() if not name.endswith("residual_weight")]
        groups = [
            {"params": [p for p in others if p.dim() >= 2], "weight_decay": weight_decay, "lr_scale": 1.0},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0, "lr_scale": 1.0},
            {"params": residual, "weight_decay": 0.0, "lr_scale": residual_lr_scale},
        ]
        for group in groups:
            group["lr"] = learning_rate * group["lr_scale"]
        return torch.optim.AdamW([g for g in groups if g["params"]], betas=betas, fused=True)

    @classmethod
    def from_state(cls, config, state):
        """A model around tensors that are there already; nothing is allocated until their names and shapes fit."""
        refuse(config.n_layer > len(state), f"n_layer={config.n_layer}, but there are only {len(state)} tensors")
        with torch.device("meta"):
            model = cls(config)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        given = {name: tuple(tensor.shape) for name, tensor in state.items()}
        for name in sorted(shapes.keys() | given.keys()):
            if shapes.get(name) != given.get(name):
                raise ValueError(
                    f"tensor {name} should be {shapes.get(name, 'absent')}, is {given.get(name, 'absent')}"
                )
        model.load_state_dict(state, assign=True)
        if config.tie_weights:
            model.lm_head.weight = model.wte.weight
        return model

    @classmethod
    def from_pretrained(cls, name_or_dir, **overrides):
        """A Hugging Face GPT-2 or Llama, by hub name or folder; overrides as listed in hf.OVERRIDES."""
        from hf import load_pretrained

        return load_pretrained(cls, name_or_dir, overrides)

    def save_pretrained(self, folder):
        """A folder that transformers opens; for a baseline of GPT-2's or Llama's form."""
        from hf import save_pretrained

        save_pretrained(self, folder)


def draw(logits, temperature, top_k, top_p, generator):
    """One id a row from logits (B, V): the best for temperature 0, else a draw from the top_k and top_p most likely."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p is not None:
        ordered, order = logits.softmax(dim=-1).sort(descending=True)
        enough = ordered.cumsum(dim=-1) - ordered >= top_p  # the more likely ones alone reach top_p
        logits = logits.masked_fill(enough.gather(1, order.argsort()), -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(1)
