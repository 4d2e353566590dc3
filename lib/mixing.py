"""
The depth-mixing matrix: with which factor each output so far stands in what a sub-layer or the head reads. It is
measured, not derived: every tensor carries one more channel per source, 1 where it comes from and 0 elsewhere, and a
mode mixes these channels as it mixes the others.
"""

import torch

from model import Layers


class LabelledLayers(Layers):
    """Sub-layers see the content; what they put out gets a label of its own; what they read is noted."""

    def __init__(self, model, rope, mask):
        super().__init__(model, rope, mask)
        self.width, self.sources, self.read = model.config.n_embd, 1 + 2 * model.config.depth, []

    def content(self, x):
        return x[..., : self.width]

    def labelled(self, x, source, factor=1.0):
        labels = x.new_zeros(*x.shape[:-1], self.sources)
        labels[..., source : source + 1] = factor
        return torch.cat((x, labels.type_as(x)), dim=-1)

    def note(self, x):
        """The mean over all tokens of the labels' channels."""
        self.read.append(x[..., self.width :].flatten(0, 1).mean(dim=0).tolist())

    def attention(self, m, x, qkv=None, earlier=None, value_mix=None):
        self.note(x)
        qkv = qkv and [self.content(z) for z in qkv]
        a, qk, v = super().attention(m, self.content(x), qkv, earlier, value_mix)
        return self.labelled(a, 1 + 2 * m), qk, v

    def feed(self, m, y):
        self.note(y)
        return self.labelled(super().feed(m, self.content(y)), 2 + 2 * m)

    def rerun(self, i, m, site, weight, x):
        o = super().rerun(i, m, site, weight, self.content(x))
        return self.labelled(o, 2 * i + (1 if site == "attention" else 2), weight)


@torch.no_grad()
def depth_mixing(model, idx):
    """
    Rows: each sub-layer and the head; columns: the embedding and each sub-layer's output, as {"rows", "columns",
    "matrix"}; the mean over the tokens idx (B, T). None where outputs are not added up (post, deepnorm) or a mode mixes
    inside attention. The plain residual is 1 for all that came before.
    """
    config = model.config
    if config.norm_position not in ("pre", "sandwich") or not config.mode.scheme.depth_mixing:
        return None
    was_training = model.training
    model.eval()
    x, rope, mask = model.embed(idx)
    layers = LabelledLayers(model, rope, mask)
    layers.note(config.mode.scheme.run(layers, layers.labelled(x, 0)))
    model.train(was_training)
    sublayers = [f"{site} {m}" for m in range(config.depth) for site in ("attention", "mlp")]
    return {"rows": [*sublayers, "head"], "columns": ["embedding", *sublayers], "matrix": layers.read}
