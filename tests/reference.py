"""A slow, literal reference of the reGPT model, written from the formulas alone: it shares no code with model.py.

One sequence at a time, one head at a time, every attention matrix A_i a stored T x T matrix, everything in float64.
Layer m (counted from 0) gets x; o_i below is a_i (attention output) or f_i (MLP output) of layer i:

    a_m = Attn_m(norm1_m(x))      y  = x + a_m     (method2, method4_*:  y  = x + sum_{i<=m} w_i a_i)
    f_m = MLP_m(norm2_m(y))       x' = y + f_m     (method1, method3_*:  x' = y + sum_{i<=m} w_i f_i)
"""

import math

import torch


def sigmoid(z):
    return 1 / (1 + torch.exp(-z))


def softmax(z):  # over the last dimension
    e = torch.exp(z - z.max(dim=-1, keepdim=True).values)
    return e / e.sum(dim=-1, keepdim=True)


def activation(name, z, beta):  # of up(x); for the gated four, of gate(x)
    if name in ("relu", "reglu"):
        return z * (z > 0)
    if name == "relu2":
        return (z * (z > 0)) ** 2
    if name in ("gelu", "geglu"):
        return z * (1 + torch.erf(z / math.sqrt(2))) / 2
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


class Reference:
    def __init__(self, config, state):
        self.c, self.state, self.used = config, state, set()
        self.head_dim = config.n_embd // config.n_head
        self.group = config.n_head // (config.n_kv_head or config.n_head)  # query heads a kv head

    def p(self, name):
        """The parameter of that name; remembers that it took part."""
        self.used.add(name)
        assert self.state[name].dtype == torch.float64, f"{name} is {self.state[name].dtype}, not float64"
        return self.state[name]

    def linear(self, name, u):  # u W^T + b
        out = u @ self.p(f"{name}.weight").T
        return out + self.p(f"{name}.bias") if self.c.bias else out

    def norm(self, name, u):  # u: (T, d)
        kind, eps = self.c.norm, self.c.norm_eps
        if kind == "rmsnorm":  # u / sqrt(mean(u^2) + eps)
            out = u / torch.sqrt((u**2).mean(dim=-1, keepdim=True) + eps)
        elif kind in ("layernorm", "groupnorm"):
            # (g - mean) / sqrt(var + eps), biased variance; g: all channels of a token, or n_head groups of neighbours
            groups = u.chunk(1 if kind == "layernorm" else self.c.n_head, dim=-1)
            groups = [g - g.mean(dim=-1, keepdim=True) for g in groups]
            out = torch.cat([g / torch.sqrt((g**2).mean(dim=-1, keepdim=True) + eps) for g in groups], dim=-1)
        elif kind == "batchnorm":  # eval: by the running statistics of each channel
            out = (u - self.p(f"{name}.running_mean")) / torch.sqrt(self.p(f"{name}.running_var") + eps)
        out = out * self.p(f"{name}.weight")
        return out + self.p(f"{name}.bias") if f"{name}.bias" in self.state else out

    def project(self, i, which, u):
        """q, k or v of layer i, (T, hd) a head; with dconv then c_t = w_0 z_{t-2} + w_1 z_{t-1} + w_2 z_t."""
        z = self.linear(f"h.{i}.attn.{which}", u)
        if self.c.dconv:
            w, padded = self.p(f"h.{i}.attn.{which}_conv"), torch.cat([torch.zeros_like(z[:1])] * 2 + [z])
            z = sum(w[j] * padded[j : j + len(z)] for j in range(3))
        return z.split(self.head_dim, dim=-1)

    def rope(self, z):
        """Half-split: the pair (z_j, z_{j+hd/2}) at time t turns by the angle t * theta^(-2j/hd)."""
        half, t = self.head_dim // 2, torch.arange(len(z), dtype=torch.float64)
        out = torch.empty_like(z)
        for j in range(half):
            angle = t * self.c.rope_theta ** (-2 * j / self.head_dim)
            out[:, j] = z[:, j] * torch.cos(angle) - z[:, j + half] * torch.sin(angle)
            out[:, j + half] = z[:, j + half] * torch.cos(angle) + z[:, j] * torch.sin(angle)
        return out

    def before(self, i, site, x):  # what sub-layer 1 (attention) or 2 (MLP) of layer i reads
        return self.norm(f"h.{i}.norm{site}", x) if self.c.norm_position in ("pre", "sandwich") else x

    def after(self, i, site, o):  # sandwich's second norm belongs to the sub-layer
        return self.norm(f"h.{i}.post_norm{site}", o) if self.c.norm_position == "sandwich" else o

    def add(self, i, site, x, o):  # x + o; post: norm(x + o); deepnorm: norm(alpha x + o), alpha = (2L)^(1/4)
        if self.c.norm_position in ("pre", "sandwich"):
            return x + o
        alpha = {"post": 1.0, "deepnorm": (2 * self.c.n_layer) ** 0.25}[self.c.norm_position]
        return self.norm(f"h.{i}.norm{site}", alpha * x + o)

    def attention_matrices(self, i, x):
        """A_i = softmax(q k^T / sqrt(hd) + causal mask), one (T, T) matrix a query head."""
        u, T, A = self.before(i, 1, x), len(x), []
        q, k = self.project(i, "q", u), self.project(i, "k", u)
        if self.c.position == "rope":
            q, k = [self.rope(z) for z in q], [self.rope(z) for z in k]
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        for j in range(self.c.n_head):
            scores = q[j] @ k[j // self.group].T / math.sqrt(self.head_dim)
            A.append(softmax(scores.masked_fill(future, -math.inf)))
        return A

    def attention(self, i, A_i, x):
        """a_i = (A_i norm1_i(x) W^V_i) W^O_i for given attention matrices: no residual."""
        v = self.project(i, "v", self.before(i, 1, x))
        heads = [A_i[j] @ v[j // self.group] for j in range(self.c.n_head)]
        return self.after(i, 1, self.linear(f"h.{i}.attn.o", torch.cat(heads, dim=-1)))

    def mlp(self, i, y):
        """f_i = MLP_i(norm2_i(y)): no residual."""
        u, name, kind = self.before(i, 2, y), f"h.{i}.mlp", self.c.activation
        if kind in ("glu", "swiglu", "geglu", "reglu"):
            z = activation(kind, self.linear(f"{name}.gate", u), self.c.swish_beta) * self.linear(f"{name}.up", u)
        else:
            z = activation(kind, self.linear(f"{name}.up", u), self.c.swish_beta)
        return self.after(i, 2, self.linear(f"{name}.down", z))

    def weighted_sum(self, m, o):  # o = [o_0, ..., o_m]
        if self.c.residual_mode in ("method1", "method2"):
            w = [1.0] * (m + 1)
        elif self.c.residual_mode in ("method3_1", "method4_1"):
            w = [1 / (m + 1)] * (m + 1)
        elif self.c.residual_mode in ("method3_2", "method4_2"):  # layer 0 has no weights: its own output counts 1
            w = softmax(self.p(f"h.{m}.residual_weight")) if m > 0 else [1.0]
        assert len(w) == len(o) == m + 1
        return sum(w[i] * o[i] for i in range(m + 1))

    def logits(self, tokens):  # tokens: (T,) -> (T, vocab)
        again = self.c.recompute
        on_attention = self.c.residual_mode in ("method2", "method4_1", "method4_2")
        on_mlp = self.c.residual_mode in ("method1", "method3_1", "method3_2")
        assert on_attention or on_mlp or self.c.residual_mode == "baseline", self.c.residual_mode
        x = self.p("wte.weight")[tokens]
        if self.c.position == "learned":
            x = x + self.p("wpe.weight")[: len(tokens)]
        A, a, f = [], [], []  # of each layer's own first pass
        for m in range(self.c.n_layer):
            A.append(self.attention_matrices(m, x))
            a.append(self.attention(m, A[m], x))
            if on_attention:  # re-run: a_i = (A_i norm1_i(x) W^V_i) W^O_i, this layer's x with the A_i that layer i had
                a_earlier = [self.attention(i, A[i], x) if again else a[i] for i in range(m)]
                y = self.add(m, 1, x, self.weighted_sum(m, [*a_earlier, a[m]]))
            else:
                y = self.add(m, 1, x, a[m])
            f.append(self.mlp(m, y))
            if on_mlp:  # re-run: h_i = x + (A_i norm1_i(x) W^V_i) W^O_i; f_i = MLP_i(norm2_i(h_i))
                h = [self.add(i, 1, x, self.attention(i, A[i], x)) for i in range(m)]
                f_earlier = [self.mlp(i, h[i]) if again else f[i] for i in range(m)]
                x = self.add(m, 2, y, self.weighted_sum(m, [*f_earlier, f[m]]))
            else:
                x = self.add(m, 2, y, f[m])
        if self.c.norm_position in ("pre", "sandwich"):
            x = self.norm("norm_f", x)
        return x @ self.p("lm_head.weight").T


def reference_logits(config, state, idx):
    """Logits at every position, (B, T, vocab) in float64, of token ids idx (B, T); eval mode, no dropout."""
    assert idx.shape[1] <= config.block_size
    assert not config.tie_weights or torch.equal(state["wte.weight"], state["lm_head.weight"])
    reference = Reference(config, state)
    out = torch.stack([reference.logits(tokens) for tokens in idx])
    unused = {n for n in state if not n.endswith("num_batches_tracked")} - reference.used
    assert not unused, f"in the state but not in the formulas: {sorted(unused)}"
    assert out.dtype == torch.float64 and out.shape == (*idx.shape, config.vocab_size)
    return out
