"""A slow, literal reference of the reGPT model, written from the formulas alone: it shares no code with model.py.

One sequence at a time, one head at a time, every attention matrix A_i a stored T x T matrix, everything in float64.
What travels between the sub-layers is a `Mix`: a tensor together with the factor of each source (the embedding e and
the output of each sub-layer) in it, per token. Those factors are the depth-mixing matrix.

Layer m (counted from 0) gets x; o_i below is a_i (attention output) or f_i (MLP output) of layer i:

    a_m = Attn_m(norm1_m(x))      y  = x + a_m     (method2, method4_*:  y  = x + sum_{i<=m} w_i a_i)
    f_m = MLP_m(norm2_m(y))       x' = y + f_m     (method1, method3_*:  x' = y + sum_{i<=m} w_i f_i)

The rivals each have a method of their name.
"""

import functools
import math

import torch

ONES, MEAN = ("method1", "method2"), ("method3_1", "method4_1")
LEARNED, DYNAMIC = ("method3_2", "method4_2"), ("method3_3", "method4_3")
METHODS = ("baseline", *ONES, *MEAN, *LEARNED, *DYNAMIC)
RIVALS = ("x0", "denseformer", "resformer", "realformer", "attnres", "mudd", "hc", "hc_static", "mhc")
KNOWN = METHODS + RIVALS


def sigmoid(z):
    return 1 / (1 + torch.exp(-z))


def gelu(z):
    return z * (1 + torch.erf(z / math.sqrt(2))) / 2


def softmax(z):  # over the last dimension
    e = torch.exp(z - z.max(dim=-1, keepdim=True).values)
    return e / e.sum(dim=-1, keepdim=True)


def rms(z, eps):
    return z / torch.sqrt((z**2).mean(dim=-1, keepdim=True) + eps)


def activation(name, z, beta):  # of up(x); for the gated four, of gate(x)
    if name in ("relu", "reglu"):
        return z * (z > 0)
    if name == "relu2":
        return (z * (z > 0)) ** 2
    if name in ("gelu", "geglu"):
        return gelu(z)
    if name == "gelu_tanh":
        return z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2
    if name in ("swish", "swiglu"):
        return z * sigmoid(beta * z)
    if name in ("sigmoid", "glu"):
        return sigmoid(z)
    if name == "tanh":
        return torch.tanh(z)
    if name == "leaky_relu":
        return torch.where(z > 0, z, 0.01 * z)
    if name == "elu":
        return torch.where(z > 0, z, torch.exp(z) - 1)
    raise ValueError(name)


def rope_frequencies(head_size, theta, scaling):
    """Turns per time step of each pair of channels; Llama 3 slows the long waves down, by `factor` beyond old/low."""
    frequencies = [theta ** (-2 * j / head_size) for j in range(head_size // 2)]
    if scaling is None:
        return frequencies
    factor, low, high, old = scaling
    scaled = []
    for f in frequencies:
        wavelength = 2 * math.pi / f
        if wavelength < old / high:
            scaled.append(f)
        elif wavelength > old / low:
            scaled.append(f / factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * f / factor + smooth * f)
    return scaled


class Mix:
    """A tensor (T, d), and the factors (T, sources) with which the sources stand in it."""

    def __init__(self, value, factors):
        self.value, self.factors = value, factors

    def __add__(self, other):
        return Mix(self.value + other.value, self.factors + other.factors)

    def __rmul__(self, w):  # a number for all tokens, or one per token (T,)
        w = w[:, None] if isinstance(w, torch.Tensor) and w.dim() == 1 else w
        return Mix(w * self.value, w * self.factors)


def total(mixes):
    return functools.reduce(Mix.__add__, mixes)


class Reference:
    def __init__(self, config, state):
        self.c, self.state, self.used = config, state, set()
        self.head_dim = config.n_embd // config.n_head
        self.group = config.n_head // (config.n_kv_head or config.n_head)  # query heads a kv head
        self.depth = config.n_layer * config.loops
        self.reads = []  # what each sub-layer's norm gets, and last what the final norm gets

    def p(self, name):
        """The parameter of that name; remembers that it took part."""
        self.used.add(name)
        assert self.state[name].dtype == torch.float64, f"{name} is {self.state[name].dtype}, not float64"
        return self.state[name]

    def own(self, m, name="weight"):  # what layer m's residual learned
        return self.p(f"h.{m}.residual_{name}")

    def rms(self, z):
        return rms(z, self.c.norm_eps)

    def source(self, value, number):  # 0: e, 1 + 2m: layer m's attention, 2 + 2m: its MLP
        factors = torch.zeros(len(value), 1 + 2 * self.depth, dtype=torch.float64)
        factors[:, number] = 1
        return Mix(value, factors)

    # the parts of a layer

    def linear(self, name, u):  # u W^T + b
        out = u @ self.p(f"{name}.weight").T
        return out + self.p(f"{name}.bias") if self.c.bias else out

    def norm(self, name, u):  # u: (T, d)
        kind, eps = self.c.norm, self.c.norm_eps
        if kind == "rmsnorm":  # u / sqrt(mean(u^2) + eps)
            out = rms(u, eps)
        elif kind in ("layernorm", "groupnorm"):
            # (g - mean) / sqrt(var + eps), biased variance; g: all channels of a token, or n_head groups of neighbours
            groups = u.chunk(1 if kind == "layernorm" else self.c.n_head, dim=-1)
            groups = [g - g.mean(dim=-1, keepdim=True) for g in groups]
            out = torch.cat([g / torch.sqrt((g**2).mean(dim=-1, keepdim=True) + eps) for g in groups], dim=-1)
        elif kind == "batchnorm":  # eval: by the running statistics of each channel
            out = (u - self.p(f"{name}.running_mean")) / torch.sqrt(self.p(f"{name}.running_var") + eps)
        out = out * self.p(f"{name}.weight")
        return out + self.p(f"{name}.bias") if f"{name}.bias" in self.state else out

    def layer(self, m):  # the layer whose parameters the m-th one has: the L layers run `loops` times
        return f"h.{m % self.c.n_layer}"

    def before(self, m, site, x):  # what sub-layer 1 (attention) or 2 (MLP) of layer m reads
        return self.norm(f"{self.layer(m)}.norm{site}", x) if self.c.norm_position in ("pre", "sandwich") else x

    def after(self, m, site, o):  # sandwich's second norm belongs to the sub-layer
        return self.norm(f"{self.layer(m)}.post_norm{site}", o) if self.c.norm_position == "sandwich" else o

    def add(self, m, site, x, o):  # x + o; post: norm(x + o); deepnorm: norm(alpha x + o), alpha = (2L)^(1/4)
        if self.c.norm_position in ("pre", "sandwich"):
            return x + o
        alpha = {"post": 1.0, "deepnorm": (2 * self.depth) ** 0.25}[self.c.norm_position]
        normed = self.norm(f"{self.layer(m)}.norm{site}", alpha * x.value + o.value)
        return Mix(normed, math.nan * x.factors)  # no factors behind a norm

    def project(self, m, which, x):
        """q, k or v of layer m, (T, hd) a head; with dconv then c_t = w_0 z_{t-2} + w_1 z_{t-1} + w_2 z_t."""
        name = f"{self.layer(m)}.attn.{which}"
        z = self.linear(name, self.before(m, 1, x))
        if self.c.dconv:
            w, padded = self.p(f"{name}_conv"), torch.cat([torch.zeros_like(z[:1])] * 2 + [z])
            z = sum(w[j] * padded[j : j + len(z)] for j in range(3))
        return z.split(self.head_dim, dim=-1)

    def rope(self, z):
        """Half-split: the pair (z_j, z_{j+hd/2}) at time t turns by the angle t * frequency_j."""
        half, t = self.head_dim // 2, torch.arange(len(z), dtype=torch.float64)
        out = torch.empty_like(z)
        for j, frequency in enumerate(rope_frequencies(self.head_dim, self.c.rope_theta, self.c.rope_scaling)):
            angle = t * frequency
            out[:, j] = z[:, j] * torch.cos(angle) - z[:, j + half] * torch.sin(angle)
            out[:, j + half] = z[:, j + half] * torch.cos(angle) + z[:, j] * torch.sin(angle)
        return out

    def scores(self, m, x_q, x_k):
        """q k^T / sqrt(hd) of layer m, one (T, T) matrix a query head."""
        q, k = self.project(m, "q", x_q), self.project(m, "k", x_k)
        if self.c.position == "rope":
            q, k = [self.rope(z) for z in q], [self.rope(z) for z in k]
        return [q[j] @ k[j // self.group].T / math.sqrt(self.head_dim) for j in range(self.c.n_head)]

    def attention_matrices(self, scores):
        """A = softmax(scores + causal mask)."""
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        return [softmax(s.masked_fill(future, -math.inf)) for s in scores]

    def attention(self, m, A, v):
        """(A v) W^O of layer m for given attention matrices and values: no residual."""
        heads = [A[j] @ v[j // self.group] for j in range(self.c.n_head)]
        a = self.after(m, 1, self.linear(f"{self.layer(m)}.attn.o", torch.cat(heads, dim=-1)))
        return self.source(a, 1 + 2 * m)

    def mlp(self, m, y):
        """f_m = MLP_m(norm2_m(y)): no residual."""
        u, name, kind = self.before(m, 2, y), f"{self.layer(m)}.mlp", self.c.activation
        if kind in ("glu", "swiglu", "geglu", "reglu"):
            z = activation(kind, self.linear(f"{name}.gate", u), self.c.swish_beta) * self.linear(f"{name}.up", u)
        else:
            z = activation(kind, self.linear(f"{name}.up", u), self.c.swish_beta)
        return self.source(self.after(m, 2, self.linear(f"{name}.down", z)), 2 + 2 * m)

    def A(self, m, x):  # layer m's attention, first pass: it reads the Mix x
        self.reads.append(x)
        A = self.attention_matrices(self.scores(m, x.value, x.value))
        return self.attention(m, A, self.project(m, "v", x.value))

    def F(self, m, y):  # layer m's MLP, first pass
        self.reads.append(y)
        return self.mlp(m, y.value)

    def B(self, m, x):  # a plain layer
        y = self.add(m, 1, x, self.A(m, x))
        return self.add(m, 2, y, self.F(m, y))

    # the methods

    def weights(self, m, x):
        """w_0 ... w_m, each a number or one per token; x (T, d) is layer m's input."""
        mode = self.c.residual_mode
        if mode in ("baseline", *ONES) or m == 0:  # layer 0 has no weights: its own output counts 1
            return [1.0] * (m + 1)
        if mode in MEAN:
            return [1 / (m + 1)] * (m + 1)
        raw = self.own(m)
        if mode in DYNAMIC:
            raw = raw + gelu(self.rms(x) @ self.own(m, "in")) @ self.own(m, "out")
        w = softmax(raw)
        assert w.shape[-1] == m + 1
        return [w[..., i] for i in range(m + 1)]

    def methods(self, e):
        on_attention = self.c.residual_mode in ("method2", "method4_1", "method4_2", "method4_3")
        on_mlp = self.c.residual_mode in ("method1", "method3_1", "method3_2", "method3_3")
        reruns = self.c.reruns  # how many of the nearest earlier layers
        if reruns is None:
            reruns = self.depth if self.c.recompute else 0
        x, A, a, f = e, [], [], []  # of each layer's own first pass
        for m in range(self.depth):
            w, near = self.weights(m, x.value), range(max(0, m - reruns), m)
            self.reads.append(x)
            A.append(self.attention_matrices(self.scores(m, x.value, x.value)))
            a.append(self.attention(m, A[m], self.project(m, "v", x.value)))
            # a_i = (A_i norm1_i(x) W^V_i) W^O_i, this layer's x with the A_i that layer i had
            a_again = {i: self.attention(i, A[i], self.project(i, "v", x.value)) for i in near}
            o = total(w[i] * a_again.get(i, a[i]) for i in range(m + 1)) if on_attention else a[m]
            y = self.add(m, 1, x, o)
            f.append(self.F(m, y))
            # h_i = x + a_i; f_i = MLP_i(norm2_i(h_i))
            f_again = {i: self.mlp(i, self.add(i, 1, x, a_again[i]).value) for i in near}
            o = total(w[i] * f_again.get(i, f[i]) for i in range(m + 1)) if on_mlp else f[m]
            x = self.add(m, 2, y, o)
        return x

    # the rivals

    def x0(self, e):
        x = e
        factor = 1 / torch.sqrt((e.value**2).mean(dim=-1) + self.c.norm_eps)  # of e in rms(e)
        for m in range(self.depth):
            keep, start = self.own(m)
            x = self.B(m, keep * x + start * (factor * e))
        return x

    def denseformer(self, e):
        x, X = e, [e]
        for m in range(self.depth):
            X.append(self.B(m, x))
            alpha = self.own(m)
            assert len(alpha) == len(X)
            x = total(alpha[j] * X[j] for j in range(m + 2))
        return x

    def resformer(self, e):
        x = e
        for m in range(self.depth):
            self.reads.append(x)
            v = self.project(m, "v", x.value)
            if m == 0:
                first = v
            else:
                of_first, of_own = self.own(m)
                v = [of_first * first[j] + of_own * v[j] for j in range(len(v))]
            A = self.attention_matrices(self.scores(m, x.value, x.value))
            y = x + self.attention(m, A, v)
            x = y + self.F(m, y)
        return x

    def realformer(self, e):
        x, so_far = e, [0.0] * self.c.n_head
        for m in range(self.depth):
            self.reads.append(x)
            scores = self.scores(m, x.value, x.value)
            so_far = [so_far[j] + scores[j] for j in range(self.c.n_head)]
            y = x + self.attention(m, self.attention_matrices(so_far), self.project(m, "v", x.value))
            x = y + self.F(m, y)
        return x

    def attnres(self, e):
        V = [e]

        def read(w):
            n = len(V)
            alpha = softmax(torch.stack([rms(V_i.value, 1e-8) @ w for V_i in V], dim=-1))  # (T, n)
            return total(n * alpha[:, i] * V[i] for i in range(n))

        for m in range(self.depth):
            V.append(self.A(m, read(self.own(m)[0])))
            V.append(self.F(m, read(self.own(m)[1])))
        return read(self.p("residual_weight"))

    def mudd(self, e):
        X, q, k, v, r = [e], e, e, e, e
        for m in range(self.depth):
            self.reads.append(r)
            A = self.attention_matrices(self.scores(m, q.value, k.value))
            y = r + self.attention(m, A, self.project(m, "v", v.value))
            X.append(y + self.F(m, y))
            last, n = m == self.depth - 1, m + 2
            C = 1 if last else 4
            inner = gelu(self.rms(X[-1].value) @ self.own(m, "in"))
            assert inner.shape[-1] == 4 * n
            D = inner @ self.own(m, "out")  # (T, C n), D[c, j] at c n + j
            mixes = [total((D[:, c * n + j] + self.own(m)[c, j]) * X[j] for j in range(n)) for c in range(C)]
            if last:
                return mixes[0]
            q, k, v, r = mixes

    def hc(self, e, dynamic=True):
        n = 4
        H = [e] * n
        for m in range(self.depth):
            for s, sublayer in enumerate((self.A, self.F)):
                M = []  # of each stream its row (T, n + 2)
                for i in range(n):
                    row = self.own(m)[s, i].expand(len(e.value), n + 2)
                    if dynamic:
                        read_and_mix, write = self.own(m, "scale")[s]
                        scale = torch.stack([read_and_mix] * (n + 1) + [write])
                        row = row + scale * torch.tanh(self.rms(H[i].value) @ self.own(m, "dynamic")[s])
                    M.append(row)
                o = sublayer(m, total(M[i][:, 0] * H[i] for i in range(n)))
                H = [total(M[i][:, 1 + j] * H[i] for i in range(n)) + M[j][:, n + 1] * o for j in range(n)]
        return total(1 / n * H_i for H_i in H)

    def hc_static(self, e):
        return self.hc(e, dynamic=False)

    def mhc(self, e):
        n = 4
        H = [e] * n
        for m in range(self.depth):
            for s, sublayer in enumerate((self.A, self.F)):
                z = self.rms(torch.cat([H_i.value for H_i in H], dim=-1)) @ self.own(m, "dynamic")[s]
                scale, b = self.own(m, "scale")[s], self.own(m)[s]
                pre = scale[0] * z[:, :n] + b[:n]
                post = scale[1] * z[:, n : 2 * n] + b[n : 2 * n]
                R = torch.exp(scale[2] * z[:, 2 * n :] + b[2 * n :])
                R = [[R[:, n * i + j] for j in range(n)] for i in range(n)]
                for _ in range(20):
                    R = [[R[i][j] / sum(R[i]) for j in range(n)] for i in range(n)]
                    R = [[R[i][j] / sum(R[k][j] for k in range(n)) for j in range(n)] for i in range(n)]
                o = sublayer(m, total(sigmoid(pre[:, i]) * H[i] for i in range(n)))
                H = [total(R[i][j] * H[i] for i in range(n)) + 2 * sigmoid(post[:, j]) * o for j in range(n)]
        return total(1 / n * H_i for H_i in H)

    # the model

    def hidden(self, tokens):
        """tokens (T,) -> the Mix that the final norm gets."""
        e = self.p("wte.weight")[tokens]
        if self.c.position == "learned":
            e = e + self.p("wpe.weight")[: len(tokens)]
        mode = self.c.residual_mode
        assert mode in KNOWN, mode
        x = (self.methods if mode in METHODS else getattr(self, mode))(self.source(e, 0))
        self.reads.append(x)
        assert len(self.reads) == 2 * self.depth + 1
        return x

    def logits(self, tokens):  # tokens: (T,) -> (T, vocab)
        x = self.hidden(tokens).value
        if self.c.norm_position in ("pre", "sandwich"):
            x = self.norm("norm_f", x)
        return x @ self.p("lm_head.weight").T


def run(config, state, idx):
    """Per row of the token ids idx (B, T): its logits, and its Reference, which has recorded what was read."""
    assert idx.shape[1] <= config.block_size
    references = [Reference(config, state) for _ in idx]
    return [reference.logits(tokens) for reference, tokens in zip(references, idx, strict=True)], references


def reference_logits(config, state, idx):
    """Logits at every position, (B, T, vocab) in float64, of token ids idx (B, T); eval mode, no dropout."""
    assert not config.tie_weights or torch.equal(state["wte.weight"], state["lm_head.weight"])
    rows, references = run(config, state, idx)
    unused = {n for n in state if not n.endswith("num_batches_tracked")} - references[0].used
    assert not unused, f"in the state but not in the formulas: {sorted(unused)}"
    out = torch.stack(rows)
    assert out.dtype == torch.float64 and out.shape == (*idx.shape, config.vocab_size)
    return out


def reference_reads(config, state, idx):
    """What each sub-layer in turn, and last the head, reads before its norm: 2 depth + 1 tensors (B, T, d)."""
    _, references = run(config, state, idx)
    return [torch.stack([mix.value for mix in mixes]) for mixes in zip(*(r.reads for r in references), strict=True)]


def reference_mixing(config, state, idx):
    """The depth-mixing matrix (2 depth + 1 readers × as many sources), mean over tokens; None where there is none."""
    if config.norm_position in ("post", "deepnorm") or config.residual_mode in ("resformer", "realformer"):
        return None
    _, references = run(config, state, idx)
    readers = zip(*(r.reads for r in references), strict=True)
    return torch.stack([torch.cat([mix.factors for mix in mixes]).mean(dim=0) for mixes in readers])
