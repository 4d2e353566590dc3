"""
A GPT whose residual connection is a one-word choice.

Read top to bottom: residual modes, config, norms, attention, MLP, the layer, the model, one forward pass. A mode is a
row of `ResidualMode`: `LayerSum` are the methods that this project is about, which come from unpublished notes; other
people's schemes stand in rivals.py.
"""

import math
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

import rivals
from configurator import checked
from lib import generation, state
from lib.activations import ACTIVATIONS, GATED, activation
from lib.checks import check_combinations, check_values
from lib.errors import refuse
from lib.kernels import checkpointed, linear_cross_entropy, linear_scores, rms_norm, swiglu
from lib.rope import rope_tables, rotate


class LayerSum(rivals.Scheme):
    """
    The methods. At one add of layer m, the site, the sub-layer's own output o_m becomes Σ w_i·o_i over the
    layers 0 … m. An earlier o_i comes from running layer i again on layer m's input x, with the attention weights of
    its first pass, or is what that first pass put out. Without a site: the plain residual.
    """

    def __init__(self, site=None, weights=None):
        self.site, self.weights = site, weights
        self.can_rerun, self.softmax = site is not None, weights in ("learned", "dynamic")

    def run(self, layers, x):
        outputs = []  # of each layer's first pass, at the site
        for m, block in enumerate(layers.blocks):
            a = layers.attend(m, x)
            if self.site == "attention":
                a = self.total(layers, m, x, a, outputs)
            y = block.add_attention(x, a)
            f = layers.feed(m, y)
            if self.site == "mlp":
                f = self.total(layers, m, x, f, outputs)
            x = block.add_mlp(y, f)
        return x

    def total(self, layers, m, x, own, outputs):
        """Σ w_i·o_i of layer m, whose input is x and whose own output is o_m."""
        c = layers.config
        outputs.append(own if c.n_reruns < c.n_layer - 1 else None)  # None: every use of it is a re-run
        if m == 0:
            return own
        w = self.layer_weights(layers, m, x)
        total = (w[m] * own).type_as(x)  # under autocast the sum is in x's float32
        for i in range(m):
            total += layers.rerun(i, m, self.site, w[i], x) if m - i <= c.n_reruns else w[i] * outputs[i]
        return total

    def layer_weights(self, layers, m, x):
        """w_0 … w_m of layer m: numbers, or (B, T, 1) each."""
        block = layers.blocks[m]
        if self.weights == "dynamic":
            raw = block.residual_weight + rivals.small_net(layers, block, x)  # (B, T, m+1)
            return raw.softmax(dim=-1).movedim(-1, 0).unsqueeze(-1)
        if self.weights == "learned":
            return block.residual_weight.softmax(dim=0)
        ones = x.new_ones(m + 1)
        return ones / (m + 1) if self.weights == "mean" else ones

    def tensors(self, c, m):
        if not self.softmax or m == 0:
            return {}
        own = torch.tensor([0.0] * m + [math.log(19 * m)])  # the softmax gives the layer's own output 95 %
        raw = own if c.residual_start == "own" else torch.ones(m + 1)
        net = rivals.small_net_tensors(c.n_embd, 4 * (m + 1), m + 1) if self.weights == "dynamic" else {}
        return {"residual_weight": raw} | net

    def flops(self, c, m, plain):
        if self.site is None or m == 0:
            return 0
        rerun = plain["values"] + plain["attention"] + (plain["mlp"] if self.site == "mlp" else 0)
        net = 2 * 4 * (m + 1) * (c.n_embd + m + 1) if self.weights == "dynamic" else 0
        return min(m, c.n_reruns) * rerun + net + 2 * (m + 1) * c.n_embd


class ResidualMode(Enum):
    BASELINE = "baseline", LayerSum()
    METHOD1 = "method1", LayerSum("mlp", "ones")
    METHOD2 = "method2", LayerSum("attention", "ones")
    METHOD3_1 = "method3_1", LayerSum("mlp", "mean")  # 1/(m+1)
    METHOD3_2 = "method3_2", LayerSum("mlp", "learned")  # softmax of m+1 raw weights
    METHOD3_3 = "method3_3", LayerSum("mlp", "dynamic")  # raw weights that depend on the token
    METHOD4_1 = "method4_1", LayerSum("attention", "mean")
    METHOD4_2 = "method4_2", LayerSum("attention", "learned")
    METHOD4_3 = "method4_3", LayerSum("attention", "dynamic")
    X0 = "x0", rivals.X0
    DENSEFORMER = "denseformer", rivals.DENSEFORMER
    RESFORMER = "resformer", rivals.RESFORMER
    REALFORMER = "realformer", rivals.REALFORMER
    ATTNRES = "attnres", rivals.ATTNRES
    MUDD = "mudd", rivals.MUDD
    HC = "hc", rivals.HC
    HC_STATIC = "hc_static", rivals.HC_STATIC
    MHC = "mhc", rivals.MHC

    def __new__(cls, name, scheme):
        mode = object.__new__(cls)
        mode._value_, mode.scheme = name, scheme
        return mode


@dataclass
class GPTConfig:
    # the model
    block_size: int = 128  # longest context
    vocab_size: int = 320  # in training, if it is not given, the data's rounded up to a multiple of 64
    n_layer: int = 6  # layers
    n_head: int = 4  # attention heads
    n_kv_head: int | None = None  # grouped-query attention; None: n_head
    n_embd: int = 96  # width
    ffn_hidden: int | None = None  # None: 4·n_embd, gated: ⅔ of that rounded up to a multiple of 256
    dropout: float = 0.0  # on embeddings and sub-layer outputs, never on attention probabilities
    bias: bool = False  # in linear layers and layernorm
    norm: str = "rmsnorm"  # one of NORMS
    norm_position: str = "pre"  # pre, post, sandwich, deepnorm
    norm_eps: float = 1e-5  # ε of every norm
    activation: str = "swiglu"  # one of ACTIVATIONS; those with glu are gated
    swish_beta: float = 1.0  # swish and swiglu: x·sigmoid(beta·x)
    position: str = "rope"  # rope, learned
    rope_theta: float = 10000.0  # base of rope's wavelengths
    rope_scaling: tuple | None = None  # Llama 3's: factor, low and high frequency factor, original length
    dconv: bool = False  # Primer's causal depth-wise convolution of q, k and v
    tie_weights: bool = False  # head = token embedding
    # the residual connection
    residual_mode: str = "baseline"  # one of ResidualMode
    recompute: bool = True  # earlier layers run again on this layer's input; False: their first outputs are reused
    reruns: int | None = None  # only so many of the earlier layers, the nearest, run again; None: all
    residual_start: str = "even"  # of weights under a softmax: even, own (95 % for the layer's own output)
    loops: int = 1  # run all layers so many times; for the baseline

    def __post_init__(self):
        for field in fields(self):
            setattr(self, field.name, checked(field.name, getattr(self, field.name), field.type))
        check_values(self, NORMS, ACTIVATIONS, [mode.value for mode in ResidualMode])
        self.mode, self.depth = ResidualMode(self.residual_mode), self.n_layer * self.loops
        self.n_kv_head, self.head_size = self.n_kv_head or self.n_head, self.n_embd // self.n_head
        gated = 256 * math.ceil(8 * self.n_embd / 768)  # 8/3·d rounded up to a multiple of 256
        self.ffn_hidden = self.ffn_hidden or (gated if self.activation in GATED else 4 * self.n_embd)
        nearest = self.reruns if self.reruns is not None else self.n_layer - 1 if self.recompute else 0
        self.n_reruns = nearest if self.mode.scheme.can_rerun else 0  # how many earlier layers a layer runs again
        check_combinations(self)


class TokenRows:
    """Torch's norms of (N, C): each token is a row."""

    def forward(self, x):
        return super().forward(x.flatten(0, -2)).view_as(x)


class GroupNorm(TokenRows, nn.GroupNorm):
    """Groups of channels, never of time steps."""


class BatchNorm(TokenRows, nn.BatchNorm1d):
    """Statistics over all tokens of the batch in training, so a token sees the future there; running ones in eval."""


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return rms_norm(x.type_as(self.weight), self.weight, self.eps)


NORMS = {
    "layernorm": lambda c: nn.LayerNorm(c.n_embd, eps=c.norm_eps, bias=c.bias),
    "rmsnorm": lambda c: RMSNorm(c.n_embd, eps=c.norm_eps),
    "groupnorm": lambda c: GroupNorm(c.n_head, c.n_embd, eps=c.norm_eps),
    "batchnorm": lambda c: BatchNorm(c.n_embd, eps=c.norm_eps),
}


class Attention(nn.Module):
    """Causal self-attention in two halves: make q and k; read values with them, which is all that a re-run does."""

    def __init__(self, config):
        super().__init__()
        self.head_size, self.grouped = config.head_size, config.n_kv_head < config.n_head
        kv_width = config.n_kv_head * config.head_size
        for name, width in (("q", config.n_embd), ("k", kv_width), ("v", kv_width)):
            self.add_module(name, nn.Linear(config.n_embd, width, bias=config.bias))
            conv = nn.Parameter(torch.empty(3, width)) if config.dconv else None  # row j multiplies time t-2+j
            self.register_parameter(f"{name}_conv", conv)
        self.o = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def project(self, name, x, cache):
        """x (B, T, C) to the q, k or v of each head: (B, heads, T, head size)."""
        x, conv = getattr(self, name)(x), getattr(self, name + "_conv")
        if conv is not None:
            x = F.pad(x, (0, 0, 2, 0)) if cache is None else cache.with_last_two(name, x)
            x = x[:, :-2] * conv[0] + x[:, 1:-1] * conv[1] + x[:, 2:] * conv[2]
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2).contiguous()  # a copy, but attention is faster

    def query_key(self, for_q, for_k, rope, cache, earlier):
        """earlier: q and k of other layers. Joined, they add up: [q0 q1]·[k0 k1] = q0·k0 + q1·k1."""
        q, k = self.project("q", for_q, cache), self.project("k", for_k, cache)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        k = k if cache is None else cache.append("k", k)
        if earlier is not None:
            q, k = torch.cat((earlier[0], q), dim=-1), torch.cat((earlier[1], k), dim=-1)
        return q, k

    def read(self, q, k, x, mask, cache, value_mix):
        """value_mix: two weights, and other values to mix with x's."""
        v = self.project("v", x, cache)
        if value_mix is not None:
            (w0, w1), others = value_mix
            v = (w0 * others + w1 * v).type_as(v)
        seen = v if cache is None else cache.append("v", v)
        if q.size(-1) > self.head_size:  # torch's fused kernel wants q, k and v of one width
            seen = F.pad(seen, (0, q.size(-1) - self.head_size))
        causal, scale = mask is None and q.size(2) > 1, 1 / math.sqrt(self.head_size)  # a single new token may see all
        y = F.scaled_dot_product_attention(q, k, seen, mask, 0.0, causal, scale=scale, enable_gqa=self.grouped)
        return self.o(y[..., : self.head_size].transpose(1, 2).flatten(2)), v


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.activation = activation(config.activation, config.swish_beta)
        linear = partial(nn.Linear, bias=config.bias)
        self.gate = linear(config.n_embd, config.ffn_hidden) if config.activation in GATED else None
        self.up = linear(config.n_embd, config.ffn_hidden)
        self.down = linear(config.ffn_hidden, config.n_embd)

    def forward(self, x):
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        gate, up = self.gate(x), self.up(x)
        return self.down(swiglu(gate, up) if self.activation is F.silu else self.activation(gate) * up)


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

    def __init__(self, config):
        super().__init__()
        new_norm, sandwich = partial(NORMS[config.norm], config), config.norm_position == "sandwich"
        self.norm_first = config.norm_position in ("pre", "sandwich")
        self.alpha = (2 * config.depth) ** 0.25 if config.norm_position == "deepnorm" else 1.0
        self.norm1, self.attn = new_norm(), Attention(config)
        self.norm2, self.mlp = new_norm(), MLP(config)
        self.post_norm1, self.post_norm2 = (new_norm() if sandwich else nn.Identity() for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)

    def attend(self, x, rope=None, mask=None, cache=None, qk=None, earlier=None, value_mix=None):
        """x (B, T, C), or (3, B, T, C) with an input for each of q, k and v -> a, (q, k), v. A re-run brings its qk."""
        x = self.norm1(x) if self.norm_first else x
        for_q, for_k, for_v = x if x.dim() == 4 else (x, x, x)
        q, k = self.attn.query_key(for_q, for_k, rope, cache, earlier) if qk is None else qk
        a, v = self.attn.read(q, k, for_v, mask, cache, value_mix)
        return self.dropout(self.post_norm1(a)), (q, k), v

    def add_attention(self, x, a):
        return x + a if self.norm_first else self.norm1(self.alpha * x + a)

    def feed(self, y):
        f = self.mlp(self.norm2(y) if self.norm_first else y)
        return self.dropout(self.post_norm2(f))

    def add_mlp(self, y, f):
        return y + f if self.norm_first else self.norm2(self.alpha * y + f)

    def rerun(self, site, weight, x, q, k, mask=None, cache=None):
        """weight·o, where o is this layer's output on a later layer's input x with the attention weights of q and k."""
        o, _, _ = self.attend(x, mask=mask, cache=cache, qk=(q, k))
        if site == "mlp":
            o = self.feed(self.add_attention(x, o))
        return weight * o


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.checkpoint_recompute = False  # make re-runs again in backward instead of keeping their activations
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm_f = NORMS[config.norm](config) if config.norm_position in ("pre", "sandwich") else nn.Identity()
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.wte.weight
        self.init_parameters()
        for name, start in initial_residual(config).items():  # last: one seed gives every mode the same backbone
            layer, _, own_name = name.rpartition(".")
            self.get_submodule(layer).register_parameter(own_name, nn.Parameter(start))

    @torch.no_grad()
    def init_parameters(self):
        config = self.config
        for name, p in self.named_parameters():
            if p.dim() == 1:
                p.fill_(0.0 if name.endswith("bias") else 1.0)  # 1: norms
            elif name.endswith("_conv"):  # the identity: all of time t, nothing of t-1 and t-2
                p.copy_(torch.tensor([[0.0], [0.0], [1.0]]))
            elif config.norm_position == "deepnorm" and name.startswith("h."):
                is_qk = name.endswith(("attn.q.weight", "attn.k.weight"))
                nn.init.xavier_normal_(p, gain=1.0 if is_qk else (8 * config.depth) ** -0.25)
            elif name.endswith(("attn.o.weight", "mlp.down.weight")):  # 2·depth of them add up in the stream
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.depth))
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
        x, targets, head = x.flatten(0, 1), targets.flatten(), self.lm_head.weight
        counted = (targets != -1).sum().clamp(min=1)
        if return_logits:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum") / counted
            return logits.view(*idx.shape, -1), loss
        if torch.is_grad_enabled():
            return None, linear_cross_entropy(x, head, targets)
        return None, linear_scores(x, head, targets)[0] / counted

    def hidden(self, idx, cache=None, watch=None):
        """(B, T) -> the stream after the last layer. watch(m, "attention" or "mlp", x) sees what sub-layers read."""
        x, rope, mask = self.embed(idx, cache)
        x = self.config.mode.scheme.run(Layers(self, rope, mask, cache, watch), x)
        if cache is not None:
            cache.position += idx.size(1)
        return x

    def embed(self, idx, cache=None):
        """x (B, T, C), and for the positions of idx the rope tables and, if several tokens join a cache, the mask."""
        start = cache.start_of(idx) if cache else 0
        end, limit = start + idx.size(1), self.config.block_size
        refuse(end > limit, f"{end} tokens do not fit into block_size={limit}")
        positions = torch.arange(start, end, device=idx.device)
        x, rope, mask = self.wte(idx), None, None
        if self.wpe is not None:
            x = x + self.wpe(positions)
        else:
            rope = rope_tables(self.config, positions, torch.promote_types(x.dtype, torch.float32))
        if start > 0 and idx.size(1) > 1:
            mask = torch.ones(idx.size(1), end, dtype=torch.bool, device=idx.device).tril(diagonal=start)
        return self.dropout(x), rope, mask

    @torch.no_grad()
    def score(self, idx, targets):
        """What an evaluation adds up: the sum of the losses and the number of right predictions, as 0-d tensors."""
        x = self.norm_f(self.hidden(idx))
        return linear_scores(x.flatten(0, 1), self.lm_head.weight, targets.flatten())

    new_cache, stream, generate = generation.new_cache, generation.stream, generation.generate
    from_state, crop_block_size = classmethod(state.from_state), state.crop_block_size

    def compile_layers(self):
        """torch.compile what layers are made of, once for all layers and re-runs."""
        for block in self.h:
            block.attend, block.feed = torch.compile(block.attend), torch.compile(block.feed)

    def residual_tensors(self):
        """{name: tensor} of all that the mode learns."""
        return {name: p for name, p in self.named_parameters() if name.rpartition(".")[2].startswith("residual_")}

    def residual_weights(self):
        """One entry per layer: the raw weights (m+1) under a softmax, or None."""
        softmax = self.config.mode.scheme.softmax
        return [getattr(block, "residual_weight", None) if softmax else None for block in self.h]

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len):
        """A forward pass as executed: matrices, attention, re-runs, mixed sums. A training step is three times that."""
        c, attn, mlp = self.config, self.h[0].attn, self.h[0].mlp
        plain = {
            "query_key": 2 * (attn.q.weight.numel() + attn.k.weight.numel()),
            "attention": 2 * 2 * c.n_embd * (seq_len + 1) / 2,  # QKᵀ and AV, causal: half of all pairs
            "values": 2 * (attn.v.weight.numel() + attn.o.weight.numel()),
            "mlp": 2 * sum(p.numel() for p in mlp.parameters() if p.dim() == 2),
        }
        of_mode = sum(c.mode.scheme.flops(c, m, plain) for m in range(c.n_layer))
        return c.depth * sum(plain.values()) + of_mode + 2 * self.lm_head.weight.numel()

    def configure_optimizers(self, weight_decay, learning_rate, betas, residual_lr_scale=1.0):
        """AdamW: decay for matrices, none for norms, biases and residual tensors, which may learn faster."""
        residual = self.residual_tensors()
        others = [p for name, p in self.named_parameters() if name not in residual]
        groups = [
            {"params": [p for p in others if p.dim() >= 2], "weight_decay": weight_decay, "lr_scale": 1.0},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0, "lr_scale": 1.0},
            {"params": list(residual.values()), "weight_decay": 0.0, "lr_scale": residual_lr_scale},
        ]
        groups = [group | {"lr": learning_rate * group["lr_scale"]} for group in groups if group["params"]]
        return torch.optim.AdamW(groups, betas=betas, fused=True)

    @classmethod
    def from_pretrained(cls, name_or_dir, **overrides):
        """A Hugging Face GPT-2 or Llama, by hub name or folder; overrides as listed in lib.hf.OVERRIDES."""
        from lib.hf import load_pretrained

        return load_pretrained(cls, name_or_dir, overrides)

    def save_pretrained(self, folder):
        """A folder that transformers opens; for a baseline of GPT-2's or Llama's form."""
        from lib.hf import save_pretrained

        save_pretrained(self, folder)


def initial_residual(config):
    """{name: tensor} of all that the mode learns, at its start."""
    scheme, layers = config.mode.scheme, range(config.n_layer)
    starts = {f"h.{m}.{name}": start for m in layers for name, start in scheme.tensors(config, m).items()}
    return starts | (scheme.tensors(config, config.n_layer) if scheme.model_learns else {})


class Layers:
    """The layers in one forward pass: with positions, mask and cache in here, a residual mode reads as its formula."""

    def __init__(self, model, rope, mask, cache=None, watch=None):
        self.config, self.blocks = model.config, [*model.h] * model.config.loops
        self.residual_weight = getattr(model, "residual_weight", None)
        self.rope, self.mask, self.cache, self.watch = rope, mask, cache, watch
        self.forget_reruns = model.checkpoint_recompute and torch.is_grad_enabled() and cache is None
        self.qk = []  # of each layer's first pass, if it is going to be run again

    def attend(self, m, x):
        return self.attention(m, x)[0]

    def attention(self, m, x, qkv=None, earlier=None, value_mix=None):
        """a, (q, k) and v of layer m. qkv: inputs of their own; x is then only what a is going to be added to."""
        if self.watch:
            self.watch(m, "attention", x)
        x, cache = x if qkv is None else torch.stack(qkv), self.cache and self.cache.entry(m)
        a, qk, v = self.blocks[m].attend(x, self.rope, self.mask, cache, earlier=earlier, value_mix=value_mix)
        self.qk.append(qk if self.config.n_reruns else None)
        return a, qk, v

    def feed(self, m, y):
        if self.watch:
            self.watch(m, "mlp", y)
        return self.blocks[m].feed(y)

    def rerun(self, i, m, site, weight, x):
        block, inputs = self.blocks[i], (weight, x, *self.qk[i])
        if self.forget_reruns:
            return checkpointed(partial(block.rerun, site), inputs, tuple(block.parameters()))
        return block.rerun(site, *inputs, self.mask, self.cache and self.cache.entry(m, i, site))

    def content(self, x):
        """The channels that coefficients are made from: all. (lib/mixing.py carries further ones along.)"""
        return x
