"""What is kept of the tokens so far, how the next one is sampled, and the loop. The first argument is a model."""

import math

import torch

from lib.errors import refuse


class Cache:
    """
    What a forward pass over new tokens needs of the tokens before them. An entry is one attention: layer m's own
    (keys and values), or that of a layer that m runs again at one of its sites (values, since its keys are known).
    """

    def __init__(self, batch, length):
        self.batch, self.length, self.position, self.entries = batch, length, 0, {}

    def start_of(self, idx):
        """The position at which new tokens idx (B, T) begin, if there is room for them."""
        end = self.position + idx.size(1)
        refuse(end > self.length, f"{end} tokens do not fit into the cache={self.length}")
        refuse(len(idx) != self.batch, f"a batch of {len(idx)} does not fit to the cache's {self.batch}")
        return self.position

    def entry(self, *key):
        return self.entries.setdefault(key, CacheEntry(self))

    def repeat(self, times):
        """Each row becomes `times` rows: several continuations of one prompt."""
        self.batch *= times
        for entry in self.entries.values():
            entry.tensors = {name: t.repeat_interleave(times, dim=0) for name, t in entry.tensors.items()}

    def nbytes(self):
        return sum(tensor.nbytes for entry in self.entries.values() for tensor in entry.tensors.values())


class CacheEntry:
    """One attention's keys and values so far, and what its convolutions look back on."""

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


def new_cache(model, batch, length):
    block_size = model.config.block_size
    refuse(length > block_size, f"a cache of {length} tokens is longer than block_size={block_size}")
    return Cache(batch, length)


@torch.no_grad()
def stream(
    model,
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
    block_size tokens, counted from position 0. Up to there a new token costs one token's work; beyond, every token's
    position shifts at each step and nothing cached stays true, so a new token costs a whole forward pass. A row that
    has come to stop_id continues as stop_id; when all have, the generation ends. Ids from real_vocab on (the padding
    of the vocabulary) are never sampled.
    """
    refuse(temperature < 0, f"temperature must not be negative, not {temperature}")
    refuse(top_k is not None and top_k < 1, f"top_k must be at least 1, not {top_k}")
    refuse(top_p is not None and not 0 < top_p <= 1, f"top_p must be more than 0 and at most 1, not {top_p}")
    block_size = model.config.block_size
    cache = new_cache(model, len(idx), min(idx.size(1) + max_new_tokens, block_size)) if use_cache else None
    stopped = torch.zeros(len(idx) * num_samples, dtype=torch.bool, device=idx.device)
    new = idx
    for step in range(max_new_tokens):
        if cache is not None and idx.size(1) <= block_size:
            logits, _ = model(new, cache=cache)
        else:
            logits, _ = model(idx[:, -block_size:])
        logits = logits[:, -1]
        if step == 0 and num_samples > 1:  # the prompt is read once for all samples
            idx, logits = (t.repeat_interleave(num_samples, dim=0) for t in (idx, logits))
            if cache is not None:
                cache.repeat(num_samples)
        next_id = sample_id(logits[:, :real_vocab], temperature, top_k, top_p, generator)
        if stop_id is not None:
            next_id = next_id.masked_fill(stopped, stop_id)
            stopped |= next_id == stop_id
        yield next_id
        if stop_id is not None and stopped.all():
            return
        new = next_id.unsqueeze(1)
        idx = torch.cat((idx, new), dim=1)


def generate(
    model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=True, generator=None, stop_id=None
):
    """idx (B, T) -> (B, T + new): what `stream` yields, behind idx."""
    steps = stream(model, idx, max_new_tokens, temperature, top_k, top_p, use_cache, generator, stop_id)
    return torch.cat([idx] + [ids.unsqueeze(1) for ids in steps], dim=1)


def sample_id(logits, temperature, top_k, top_p, generator):
    """One id per row of logits (B, V): the best for temperature 0, else one of the top_k and top_p most likely."""
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
