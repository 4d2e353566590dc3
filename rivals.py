"""
Other people's residual schemes, each a short function that a row of ResidualMode (model.py) names:

    run(layers, e)       the stream from the embedding e (B, T, d) to what the final norm reads
    tensors(config, m)   what layer m learns for it, at its start
    flops(config, m, plain)   what layer m costs per token beside the parts of a plain layer: 2 per coefficient and
                         channel of a mixed sum, and the matrices that make coefficients

`layers` is the model in one forward pass (class Layers): layers.attend(m, x) and layers.feed(m, x) are layer m's
sub-layers with their norms. Coefficients are made from layers.content(x): x itself, but for the measurement of depth
mixing, which appends labels to its channels (lib/mixing.py). Mixed sums stay in e's float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


class Scheme:
    """What is true of a residual mode, unless it says otherwise."""

    any_norm_position = True  # False: defined for a norm before the sub-layer
    batchnorm = True  # works with it
    can_rerun = False  # runs earlier layers again, as many as config.n_reruns
    softmax = False  # its residual_weight are raw weights under a softmax
    depth_mixing = True  # sub-layers read sums of earlier outputs (lib/mixing.py)
    model_learns = False  # tensors(config, n_layer) are the model's own


@dataclass(frozen=True)
class Rival(Scheme):
    run: Callable
    tensors: Callable
    flops: Callable
    any_norm_position: bool = False
    batchnorm: bool = True
    depth_mixing: bool = True
    model_learns: bool = False


def inverse_rms(x, eps):
    """1/√(mean x² + ε)"""
    return (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()


def rms(layers, x):
    """x/√(mean x² + ε), without a gain: what coefficients are made from."""
    x = layers.content(x)
    return x * inverse_rms(x, layers.config.norm_eps)


def matmul(a, b):
    """In the stream's own number format, whatever autocast says."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def mixed(weights, tensors):
    """Σ w_i·t_i"""
    total = weights[0] * tensors[0]
    for weight, tensor in zip(weights[1:], tensors[1:], strict=True):
        total += weight * tensor
    return total


def small_net(layers, block, x):
    """gelu(rms(x)·W_in)·W_out: what makes coefficients from a token."""
    return matmul(F.gelu(matmul(rms(layers, x), block.residual_in)), block.residual_out)


def small_net_tensors(width, hidden, out):
    start = torch.randn(width, hidden) / math.sqrt(width)
    return {"residual_in": start, "residual_out": torch.zeros(hidden, out)}  # out: nothing at first


def one_hot(size, at):
    return F.one_hot(torch.tensor(at), size).float()


# x0 (nanochat): before each layer the stream is scaled and gets some of the embedding again


def x0(layers, e):
    x, start = e, e * inverse_rms(layers.content(e), layers.config.norm_eps)
    for m, block in enumerate(layers.blocks):
        x = mixed(block.residual_weight, (x, start))
        y = x + layers.attend(m, x)
        x = y + layers.feed(m, y)
    return x


X0 = Rival(
    x0,
    tensors=lambda c, m: {"residual_weight": torch.tensor([1.0, 0.0])},
    flops=lambda c, m, plain: 4 * c.n_embd,
)


# DenseFormer (Pagliardini et al. 2024): the stream after a layer is a sum of all layers' outputs so far


def denseformer(layers, e):
    x, outputs = e, [e]
    for m, block in enumerate(layers.blocks):
        y = x + layers.attend(m, x)
        outputs.append(y + layers.feed(m, y))
        x = mixed(block.residual_weight, outputs)
    return x


DENSEFORMER = Rival(
    denseformer,
    tensors=lambda c, m: {"residual_weight": one_hot(m + 2, m + 1)},
    flops=lambda c, m, plain: 2 * c.n_embd * (m + 2),
)


# ResFormer (Zhou et al. 2024): each layer's values are mixed with those of layer 0, inside attention


def resformer(layers, e):
    x, first = e, None
    for m, block in enumerate(layers.blocks):
        a, _, v = layers.attention(m, x, value_mix=(block.residual_weight, first) if m else None)
        first = first if m else v
        y = x + a
        x = y + layers.feed(m, y)
    return x


RESFORMER = Rival(
    resformer,
    tensors=lambda c, m: {"residual_weight": torch.tensor([0.5, 0.5])} if m else {},
    flops=lambda c, m, plain: 4 * c.n_kv_head * c.head_size if m else 0,
    depth_mixing=False,
)


# RealFormer (He et al. 2020): attention scores add up over the layers


def realformer(layers, e):
    x, qk = e, None
    for m in range(len(layers.blocks)):
        a, qk, _ = layers.attention(m, x, earlier=qk)  # the q and k of all layers so far, concatenated
        y = x + a
        x = y + layers.feed(m, y)
    return x


REALFORMER = Rival(
    realformer,
    tensors=lambda c, m: {},
    flops=lambda c, m, plain: m * plain["attention"],  # scores, and values as wide as q and k
    depth_mixing=False,
)


# Attention Residuals (Kimi 2026): a sub-layer attends to the outputs of all sub-layers before it


def attnres(layers, e):
    sources, scales = [], []

    def add(source):
        sources.append(source.type_as(e))
        scales.append(inverse_rms(layers.content(sources[-1]), 1e-8).squeeze(-1))

    def read(query):
        scores = [matmul(layers.content(v), query) * scale for v, scale in zip(sources, scales, strict=True)]
        at_least_float32 = torch.promote_types(e.dtype, torch.float32)
        weights = torch.stack(scores).softmax(dim=0, dtype=at_least_float32).type_as(e)  # (sources, B, T)
        return mixed(len(sources) * weights.unsqueeze(-1), sources)

    add(e)
    for m, block in enumerate(layers.blocks):
        for_attention, for_mlp = block.residual_weight
        add(layers.attend(m, read(for_attention)))
        add(layers.feed(m, read(for_mlp)))
    return read(layers.residual_weight)


def attnres_flops(c, m, plain):
    sources = (2 * m + 1) + (2 * m + 2) + (2 * m + 3 if m == c.n_layer - 1 else 0)  # the last is the head's read
    return 4 * c.n_embd * sources


ATTNRES = Rival(
    attnres,
    tensors=lambda c, m: {"residual_weight": torch.zeros(2, c.n_embd) if m < c.n_layer else torch.zeros(c.n_embd)},
    flops=attnres_flops,
    model_learns=True,  # the query of the head
)


# MUDDFormer (Xiao et al. 2025): q, k, v and the residual each get a mix of all layers' outputs, made per token


def mudd(layers, e):
    outputs, (q, k, v, r) = [e], (e, e, e, e)
    for m, block in enumerate(layers.blocks):
        y = r + layers.attention(m, r, qkv=(q, k, v))[0]
        outputs.append(y + layers.feed(m, y))
        change = small_net(layers, block, outputs[-1]).unflatten(-1, block.residual_weight.shape)
        weights = change + block.residual_weight  # (B, T, C, m+2)
        *qkv, r = matmul(weights, torch.stack(outputs, dim=2)).unbind(dim=2)
        q, k, v = qkv or (None, None, None)  # after the last layer r alone
    return r


def mudd_sizes(c, m):
    """Mixes C, sources, hidden width."""
    last = m == c.n_layer - 1
    return (1 if last else 4), m + 2, 4 * (m + 2)


def mudd_tensors(c, m):
    mixes, sources, hidden = mudd_sizes(c, m)
    start = one_hot(sources, m + 1).repeat(mixes, 1)
    return {"residual_weight": start} | small_net_tensors(c.n_embd, hidden, mixes * sources)


def mudd_flops(c, m, plain):
    mixes, sources, hidden = mudd_sizes(c, m)
    return 2 * (c.n_embd * hidden + hidden * mixes * sources + mixes * sources * c.n_embd)


MUDD = Rival(mudd, mudd_tensors, mudd_flops, batchnorm=False)


# Hyper-Connections (Zhu et al. 2024) and mHC (DeepSeek 2025): several streams; a sub-layer reads a sum of them, then
# they are mixed and each gets its share of the output

STREAMS = 4


def hyper_connections(connections):
    """connections(layers, block, s, H) -> read (…, n), mix (…, n, n), write (…, n) for sub-layer s; H (B, T, n, d)."""

    def run(layers, e):
        H = e.unsqueeze(2).expand(-1, -1, STREAMS, -1)
        for m, block in enumerate(layers.blocks):
            for s, sublayer in enumerate((layers.attend, layers.feed)):
                read, mix, write = connections(layers, block, s, H)
                # the sub-layer's input and the mixed streams: n + 1 sums of the n streams
                both = matmul(torch.cat((read.unsqueeze(-2), mix.transpose(-1, -2)), dim=-2), H)
                h, H = both[:, :, 0], both[:, :, 1:]
                H = H + write.unsqueeze(-1) * sublayer(m, h).unsqueeze(2)
        return H.mean(dim=2)

    return run


def static(layers, block, s, H):
    M = block.residual_weight[s]
    return M[:, 0], M[:, 1:-1], M[:, -1]


def dynamic(layers, block, s, H):
    change = matmul(rms(layers, H), block.residual_dynamic[s]).tanh()
    scale = repeated(block.residual_scale[s], (STREAMS + 1, 1))  # one number for read and mix, one for write
    M = block.residual_weight[s] + scale * change  # (B, T, n, n+2)
    return M[..., 0], M[..., 1:-1], M[..., -1]


def doubly_stochastic(layers, block, s, H):
    n = STREAMS
    H = layers.content(H).flatten(2)  # the streams, concatenated
    z = matmul(H * inverse_rms(H, layers.config.norm_eps), block.residual_dynamic[s])
    z = repeated(block.residual_scale[s], (n, n, n * n)) * z + block.residual_weight[s]
    pre, post, R = z.split((n, n, n * n), dim=-1)
    R = (R - R.amax(dim=-1, keepdim=True)).unflatten(-1, (n, n)).exp()  # a common factor goes away with the first sums
    for _ in range(20):
        R = R / R.sum(dim=-1, keepdim=True)
        R = R / R.sum(dim=-2, keepdim=True)
    return pre.sigmoid(), R, 2 * post.sigmoid()


def repeated(numbers, times):
    return torch.cat([number.expand(n) for number, n in zip(numbers, times, strict=True)])


def static_tensors(c, m):
    read = torch.stack([one_hot(STREAMS, (2 * m + s) % STREAMS) for s in (0, 1)])
    mix, write = torch.eye(STREAMS).expand(2, -1, -1), torch.ones(2, STREAMS)
    return {"residual_weight": torch.cat((read.unsqueeze(-1), mix, write.unsqueeze(-1)), dim=-1)}


def dynamic_tensors(c, m):
    more = {"residual_dynamic": torch.zeros(2, c.n_embd, STREAMS + 2), "residual_scale": torch.full((2, 2), 0.01)}
    return static_tensors(c, m) | more


def doubly_stochastic_tensors(c, m):
    coefficients = STREAMS**2 + 2 * STREAMS
    return {
        "residual_weight": torch.zeros(2, coefficients),
        "residual_dynamic": 0.02 * torch.randn(2, STREAMS * c.n_embd, coefficients),
        "residual_scale": torch.full((2, 3), 0.01),
    }


def streams_flops(matrix):
    """matrix: whether a matrix makes the coefficients, from each stream or from all of them at once."""

    def flops(c, m, plain):
        coefficients = STREAMS * (STREAMS + 2)
        made = {None: 0, "each": coefficients, "all": STREAMS * coefficients}[matrix]
        mean = STREAMS if m == c.n_layer - 1 else 0
        return 2 * c.n_embd * (2 * (coefficients + made) + mean)

    return flops


HC = Rival(hyper_connections(dynamic), dynamic_tensors, streams_flops("each"))
HC_STATIC = Rival(hyper_connections(static), static_tensors, streams_flops(None))
MHC = Rival(hyper_connections(doubly_stochastic), doubly_stochastic_tensors, streams_flops("all"))
