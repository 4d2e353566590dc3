"""Generation: the cache is exact (test_modes.py), its size as said, and what is sampled is what the logits say."""

import numpy as np
import pytest
import torch
from backbones import MODES, close, each_model, new_model, tokens
from reference import KNOWN

BLOCK = 8  # the small models' block_size


def text_by_hand(model, idx, new, generator=None):
    """nanoGPT's meaning: the last block_size tokens are the context. Greedy without a generator."""
    for _ in range(new):
        logits = model(idx[:, -BLOCK:])[0][:, -1]
        best = logits.argmax(dim=-1, keepdim=True)
        sampled = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator) if generator else best
        idx = torch.cat((idx, sampled), dim=1)
    return idx


def calls(model):
    """The shapes of the token ids that the model is called with, as they come."""
    shapes = []
    model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    return shapes


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# The cache


@each_model()
@torch.no_grad()
def test_greedy_text_past_block_size(options):
    model, prompt = new_model(**options), tokens(2, 2)
    expected = text_by_hand(model, prompt, BLOCK + 1)
    assert torch.equal(model.generate(prompt, BLOCK + 1, temperature=0), expected)


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_sampled_text_past_block_size(mode):
    """Greedy text tends to repeat itself; sampled text does not."""
    model, prompt = new_model(residual_mode=mode, dconv=True), tokens(3, 3)
    expected = text_by_hand(model, prompt, 2 * BLOCK, seeded(0))
    for use_cache in (True, False):
        text = model.generate(prompt, 2 * BLOCK, use_cache=use_cache, generator=seeded(0))
        assert torch.equal(text, expected)


def test_a_prompt_longer_than_the_context():
    model = new_model(residual_mode="method3_2")
    prompt = tokens(2, BLOCK + 3)
    assert torch.equal(model.generate(prompt, 4, temperature=0), text_by_hand(model, prompt, 4))


def test_a_new_token_costs_one_token_up_to_block_size():
    model = new_model(residual_mode="method4_2")
    shapes = calls(model)
    model.generate(tokens(2, 3), 8)
    assert shapes == [(2, 3)] + [(2, 1)] * 5 + [(2, BLOCK)] * 2
    shapes.clear()
    model.generate(tokens(2, 3), 3, use_cache=False)
    assert shapes == [(2, 3), (2, 4), (2, 5)]


@each_model(backbones=("llama", "primer_ez"))
@torch.no_grad()
def test_cache_memory(options):
    model = new_model(**options)
    layers, width, kv_width, number = 3, 16, 4 * options["n_kv_head"], 8  # bytes in a float64
    reruns = sum(min(m, model.config.n_reruns) for m in range(layers))
    for batch, length in ((1, 4), (3, 4), (3, 8)):
        # keys and values of each layer, and the values of each layer inside each later one that runs it again
        expected = number * batch * length * kv_width * (2 * layers + reruns)
        if model.config.dconv:  # and of each convolution the last two time steps
            expected += number * batch * 2 * (layers * (width + 2 * kv_width) + reruns * kv_width)
        cache = model.new_cache(batch, length)
        for position in range(2):  # it is made for the whole length at once
            model(tokens(batch, 1), cache=cache)
            assert cache.position == position + 1
            if options["residual_mode"] in KNOWN:
                assert cache.nbytes() == expected


def test_what_does_not_fit_is_refused_with_a_sentence():
    model = new_model(residual_mode="method3_2")
    with pytest.raises(ValueError, match=r"cache of 9 tokens.*block_size=8"):
        model.new_cache(1, 9)
    cache, idx = model.new_cache(2, 4), tokens(2, 4)
    model(idx[:, :3], cache=cache)
    with pytest.raises(ValueError, match=r"5 tokens.*cache=4"):
        model(idx[:, :2], cache=cache)
    with pytest.raises(ValueError, match=r"batch of 1.*cache"):
        model(idx[:1, 3:], cache=cache)
    close(model(idx[:, 3:], cache=cache)[0], model(idx)[0])  # the refusals have left the cache as it was


# Sampling


def allowed_probabilities(logits, temperature, top_k, top_p):
    """What a token's chance should be, in numpy: the k best, then the fewest of these that make up top_p."""
    chances = np.exp((logits - logits.max()) / temperature)
    best_first = sorted(range(len(logits)), key=lambda i: -chances[i])[:top_k]
    chances /= chances[best_first].sum()
    kept, mass = [], 0.0
    for i in best_first:
        kept.append(i)
        mass += chances[i]
        if top_p is not None and mass >= top_p:
            break
    probabilities = np.zeros(len(logits))
    probabilities[kept] = chances[kept] / chances[kept].sum()
    return probabilities


def agrees(counts, probabilities):
    """Nothing impossible is sampled, and each count is within five standard deviations (and 5, for the rare ones)."""
    assert (counts[probabilities == 0] == 0).all()
    expected = counts.sum() * probabilities
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected * (1 - probabilities)) + 5).all()


def first_samples(model, prompt, samples=20_000, **options):
    (ids,) = model.stream(prompt, 1, num_samples=samples, generator=seeded(0), **options)
    return np.bincount(ids.numpy(), minlength=13)


@pytest.mark.parametrize("real_vocab", [None, 9])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.5, 0.9])
@pytest.mark.parametrize("top_k", [None, 1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_logits(temperature, top_k, top_p, real_vocab):
    model, prompt = new_model(), tokens(1, 3)
    logits = model(prompt)[0][0, -1].detach().numpy()
    probabilities = allowed_probabilities(logits[:real_vocab], temperature, top_k, top_p)
    probabilities = np.pad(probabilities, (0, 13 - len(probabilities)))
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "real_vocab": real_vocab}
    agrees(first_samples(model, prompt, **options), probabilities)


def test_top_p_at_its_edge():
    model = new_model()
    with torch.no_grad():  # logits that are the logarithms of these chances, whatever the prompt
        chances = torch.tensor([0.0625, 0.5, 0.125, 0.25] + [0.0625 / 9] * 9, dtype=torch.float64)
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, 0] = chances.log()
        model.norm_f = torch.nn.Identity()
        model.hidden = lambda idx, cache: torch.ones(*idx.shape, 16, dtype=torch.float64)
    for top_p, ids in ((0.49, {1}), (0.51, {1, 3}), (0.74, {1, 3}), (0.76, {1, 3, 2}), (0.9, {0, 1, 2, 3})):
        assert set(np.flatnonzero(first_samples(model, tokens(1, 2), top_p=top_p))) == ids


@pytest.mark.parametrize("mode", ["baseline", "method3_2", "method4_2"])
@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_many_samples_from_one_prefill(mode, use_cache):
    """The second token depends on the first, so this is about the repeated cache too."""
    model, prompt = new_model(residual_mode=mode, dconv=True, vocab_size=5), tokens(1, 3, vocab=5)
    shapes = calls(model)
    steps = list(model.stream(prompt, 2, num_samples=5_000, use_cache=use_cache, generator=seeded(0)))
    assert shapes == [(1, 3), (5_000, 1 if use_cache else 4)]
    first, second = (ids.numpy() for ids in steps)
    joint = model(prompt)[0][0, -1].softmax(0)[:, None] * torch.stack(
        [model(torch.cat((prompt, torch.tensor([[i]])), dim=1))[0][0, -1].softmax(0) for i in range(5)]
    )
    agrees(np.bincount(5 * first + second, minlength=25), joint.numpy().ravel())


@pytest.mark.parametrize("mode", MODES)
def test_greedy_samples_are_all_the_same(mode):
    model, prompt = new_model(residual_mode=mode, dconv=True), tokens(2, 3)
    steps = model.stream(prompt, BLOCK, temperature=0, num_samples=3)
    texts = torch.stack(list(steps), dim=1)
    one = text_by_hand(model, prompt, BLOCK)[:, 3:]
    assert torch.equal(texts, one[[0, 0, 0, 1, 1, 1]])  # the samples of a prompt stand together


def test_padding_of_the_vocabulary_is_never_sampled():
    model = new_model()
    with torch.no_grad():  # ids from 7 on would win
        model.lm_head.weight[7:] = 10 * model(tokens(1, 3))[0][0, -1].sign()[7:, None] * model.lm_head.weight[7:]
    prompt = tokens(1, 3)
    assert model(prompt)[0].argmax() >= 7
    for options in ({"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"use_cache": False}):
        steps = model.stream(prompt, 12, num_samples=50, real_vocab=7, **options)
        assert torch.stack(list(steps)).max() < 7


def test_a_generator_makes_the_text_repeatable():
    model, prompt = new_model(residual_mode="method3_2"), tokens(2, 3)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    text = model.generate(prompt, 12, generator=seeded(7))
    assert torch.equal(torch.get_rng_state(), state)  # the global one is left alone
    torch.manual_seed(2)
    assert torch.equal(model.generate(prompt, 12, generator=seeded(7)), text)
    assert torch.equal(model.generate(prompt, 12, generator=seeded(7), use_cache=False), text)
    assert not torch.equal(model.generate(prompt, 12, generator=seeded(8)), text)


def test_top_k_of_one_and_temperature_zero_are_greedy():
    model, prompt = new_model(), tokens(3, 2)
    expected = text_by_hand(model, prompt, 10)
    for options in ({"temperature": 0}, {"temperature": 0.0, "top_k": 5, "top_p": 0.9}, {"top_k": 1}, {"top_p": 1e-6}):
        assert torch.equal(model.generate(prompt, 10, **options), expected)


def test_stop_id():
    model, prompt = new_model(), tokens(4, 2)
    free = text_by_hand(model, prompt, 20)[:, 2:]
    stopping_everywhere = 0
    for stop_id in range(13):
        hits = [row.index(stop_id) if stop_id in row else 20 for row in free.tolist()]
        length = min(20, max(hits) + 1)  # until the last row has stopped
        expected = free[:, :length].clone()
        for row, hit in enumerate(hits):
            expected[row, hit:] = stop_id
        text = model.generate(prompt, 20, temperature=0, stop_id=stop_id)
        assert torch.equal(text, torch.cat((prompt, expected), dim=1))
        stopping_everywhere += length < 20
    assert 0 < stopping_everywhere < 13  # both ways of ending were seen


def test_stream_and_generate_agree():
    model, prompt = new_model(residual_mode="method4_2"), tokens(3, 2)
    options = {"temperature": 0.9, "top_k": 6, "top_p": 0.95}
    text = model.generate(prompt, 12, generator=seeded(3), stop_id=5, **options)
    steps = list(model.stream(prompt, 12, generator=seeded(3), stop_id=5, **options))
    assert all(ids.shape == (3,) for ids in steps)
    assert torch.equal(text, torch.cat((prompt, torch.stack(steps, dim=1)), dim=1))
    assert torch.equal(model.generate(prompt, 0), prompt)


def test_stream_yields_before_it_goes_on():
    model = new_model()
    shapes = calls(model)
    steps = model.stream(tokens(1, 3), 3)
    next(steps)
    assert shapes == [(1, 3)]
    assert not next(steps).requires_grad
