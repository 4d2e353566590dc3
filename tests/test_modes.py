"""
What every residual mode must do. All tests walk `ResidualMode`, so that a new row is tested by being there; where
reference.py knows the row it is a second computation, where it does not all else holds.
"""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from backbones import MODES, SMALL, batch_with_gaps, close, each_model, gradients, is_residual, new_model, tokens
from reference import DYNAMIC, KNOWN, LEARNED, METHODS, RIVALS, reference_logits, reference_mixing, reference_reads
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lib.checkpoint import load_checkpoint, save_checkpoint
from lib.mixing import depth_mixing
from model import GPT, GPTConfig, initial_residual

each_mode = pytest.mark.parametrize("mode", MODES)
AS_BASELINE = ("x0", "denseformer", "attnres", "mudd", "hc", "hc_static")  # when they start


def baseline_of(model):
    """The baseline with this model's backbone."""
    baseline = new_model(**{**options_of(model), "residual_mode": "baseline"})
    baseline.load_state_dict({name: t for name, t in model.state_dict().items() if not is_residual(name)})
    return baseline


def options_of(model):
    return {name: getattr(model.config, name) for name in GPTConfig.__dataclass_fields__ if name != "residual_start"}


# A second computation


@each_model()
@torch.no_grad()
def test_logits_and_loss_equal_the_reference(options):
    if options["residual_mode"] not in KNOWN:
        return
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


@pytest.mark.parametrize("n_layer", [1, 2])
@torch.no_grad()
def test_few_layers_equal_the_reference(n_layer):
    for mode in KNOWN:
        model, idx = new_model(residual_mode=mode, n_layer=n_layer), tokens(2, 8)
        close(model(idx, idx)[0], reference_logits(model.config, model.state_dict(), idx))


@each_model()
def test_gradients_equal_the_references_and_every_parameter_learns(options):
    model = new_model(**options)
    idx, targets = batch_with_gaps(batch=2)
    grads = gradients(model, model(idx, targets)[1])  # of every parameter: DDP waits for all
    for name, grad in grads.items():
        if name.endswith("attn.k.bias") and options.get("position") == "learned":
            # q·b is the same for every key, so softmax cancels it (under rope it is not: b turns with the key)
            assert grad.abs().max() < 1e-12, name
        else:
            assert grad.isfinite().all() and grad.abs().max() > 1e-9, name

    if options["residual_mode"] not in KNOWN:
        return
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    logits = reference_logits(model.config, state, idx)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    for grad, expected in zip(grads.values(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        close(grad, expected)


@each_model(backbones=("llama", "sandwich", "post", "deepnorm"))
@torch.no_grad()
def test_what_is_read_and_the_depth_mixing_matrix_equal_the_references(options):
    model, idx = new_model(**options), tokens(3, 8)
    seen = []
    x = model.hidden(idx, watch=lambda m, site, x: seen.append((m, site, x)))
    assert [(m, site) for m, site, _ in seen] == [(m, site) for m in range(3) for site in ("attention", "mlp")]
    close(x, model.hidden(idx))
    mixing = depth_mixing(model, idx)
    if mixing is not None:
        matrix = torch.tensor(mixing["matrix"], dtype=torch.float64)
        assert matrix.shape == (7, 7) == (len(mixing["rows"]), len(mixing["columns"]))
        assert not matrix.triu(1).any()  # nobody reads what does not exist yet
    if options["residual_mode"] not in KNOWN:
        return
    expected = reference_reads(model.config, model.state_dict(), idx)
    for (_, _, read), reference in zip([*seen, (None, None, x)], expected, strict=True):
        close(read, reference)
    expected = reference_mixing(model.config, model.state_dict(), idx)
    assert (mixing is None) == (expected is None)
    if mixing is not None:
        close(matrix, expected)
        if options["residual_mode"] == "baseline":
            assert torch.equal(matrix, torch.ones(7, 7).double().tril())


# The rules of every mode


@each_model()
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


@each_model()
@torch.no_grad()
def test_cached_logits_equal_a_full_pass(options):
    model = new_model(**options)
    idx = tokens(3, 8)
    full, _ = model(idx, idx)
    for batch in (1, 3):
        for ends in ((1, 2, 3, 4), (5, 6, 7), (3, 7, 8)):  # a prompt of one token, of several, in two pieces
            cache = model.new_cache(batch, 8)
            for start, end in pairwise((0, *ends)):
                logits, _ = model(idx[:batch, start:end], cache=cache)
                close(logits, full[:batch, end - 1 : end])


@each_mode
def test_learns(mode):
    model = new_model(perturbed=False, residual_mode=mode).float().train()
    start = {name: p.detach().clone() for name, p in model.residual_tensors().items()}
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    idx, targets = batch_with_gaps()
    losses = []
    for _ in range(12):
        _, loss = model(idx, targets, return_logits=False)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(13), rel=0.05) and losses[-1] < 0.8 * losses[0]
    for name, p in model.residual_tensors().items():
        assert not torch.equal(p, start[name]), name


@each_mode
def test_checkpointed_reruns_have_the_same_gradients(mode):
    model = new_model(residual_mode=mode, dropout=0.3, n_kv_head=2, n_layer=4, reruns=2).train()
    idx, targets = batch_with_gaps()
    grads = []
    for model.checkpoint_recompute in (False, True):
        torch.manual_seed(5)
        grads.append(gradients(model, model(idx, targets)[1]))
    for name in grads[0]:
        close(grads[0][name], grads[1][name])


@each_mode
def test_survives_saving_and_loading_to_the_same_bits(mode, tmp_path):
    model = new_model(residual_mode=mode).float()
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    idx, targets = batch_with_gaps()
    model(idx, targets)[1].backward()
    optimizer.step()
    run = {"settings": {}, "step": 1, "seconds": 0.5, "best_loss": math.inf, "data": {}, "scaler": {}}
    save_checkpoint(tmp_path / "ckpt.safetensors", model, optimizer, run)
    checkpoint = load_checkpoint(tmp_path / "ckpt.safetensors")
    assert checkpoint.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(checkpoint.model.state_dict()[name], tensor), name
    for name, p in model.named_parameters():
        for moment, tensor in optimizer.state[p].items():
            assert torch.equal(checkpoint.optimizer[name][moment], tensor), (name, moment)
    assert torch.equal(checkpoint.model.eval()(idx)[0], model(idx)[0])


@each_mode
def test_compiles_once_for_all_layers(mode, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    idx, targets = batch_with_gaps()
    graphs = []
    for n_layer in (3, 5):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = new_model(residual_mode=mode, n_layer=n_layer)
        _, loss = model(idx, targets, return_logits=False)
        eager = gradients(model, loss)
        model.compile_layers()
        for error_on_recompile in (False, True):
            with torch._dynamo.config.patch(error_on_recompile=error_on_recompile):
                _, again = model(idx, targets, return_logits=False)
                compiled = gradients(model, again)
                model.score(idx, targets)
        close(again, loss)
        for name in eager:
            close(compiled[name], eager[name])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


@each_mode
@pytest.mark.parametrize("recompute", [True, False])
def test_autocast(mode, recompute):
    model = new_model(residual_mode=mode, recompute=recompute).float()
    idx, reads = tokens(3, 8), []
    _, expected = model(idx, idx)
    with torch.autocast("cpu", torch.bfloat16):
        _, loss = model(idx, idx)
        _, chunked = model(idx, idx, return_logits=False)
        reads.append(model.hidden(idx, watch=lambda m, site, x: reads.append(x)))
    close(loss.float(), expected, 0.05)
    close(chunked, expected, 0.05)
    assert {x.dtype for x in reads} == {torch.float32}
    chunked.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@each_mode
@pytest.mark.parametrize("at_start", [True, False])
@torch.no_grad()
def test_autocast_keeps_coefficients_and_mixed_sums_in_float32(mode, at_start):
    """
    Sub-layers whose output is a bias that bfloat16 has exactly: what differs then is the mixing. A weight that is one
    number for all tokens times a bfloat16 output is rounded to bfloat16, as the output itself is, and their sum is not:
    in two layers at their start, where the weights are 1 and ½, there is nothing to round.
    """
    model = new_model(residual_mode=mode, bias=True, n_layer=2 if at_start else 3).float()
    for block in model.h:
        for linear in (block.attn.o, block.mlp.down):
            linear.weight.zero_()
            linear.bias.copy_(linear.bias.bfloat16())
    if at_start:
        for name, start in initial_residual(model.config).items():
            model.get_parameter(name).copy_(start)
    idx = tokens(3, 8)
    expected = model.hidden(idx)
    exact = mode in KNOWN if at_start else mode in RIVALS + DYNAMIC
    with torch.autocast("cpu", torch.bfloat16):
        close(model.hidden(idx), expected, 1e-5 if exact else 5e-3)


def test_one_seed_gives_every_mode_the_same_backbone():
    expected = new_model(perturbed=False).state_dict()
    for mode in MODES:
        state = new_model(perturbed=False, residual_mode=mode).state_dict()
        assert [name for name in state if not is_residual(name)] == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), (mode, name)


@each_mode
def test_residual_tensors_are_named_start_as_said_and_do_not_decay(mode):
    model = new_model(perturbed=False, n_layer=4, residual_mode=mode)
    residual = model.residual_tensors()
    assert residual.keys() == {name for name, _ in model.named_parameters() if is_residual(name)}
    torch.manual_seed(3)
    start = initial_residual(model.config)
    assert {name: t.shape for name, t in start.items()} == {name: t.shape for name, t in residual.items()}

    optimizer = model.configure_optimizers(0.5, 0.1, (0.9, 0.95), residual_lr_scale=3.0)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, p in residual.items():
        assert model.get_parameter(name) is p
        assert groups[id(p)]["weight_decay"] == 0 and groups[id(p)]["lr_scale"] == 3.0, name

    weights = model.residual_weights()
    assert len(weights) == 4
    for m, raw in enumerate(weights):
        assert raw is None or (raw is residual[f"h.{m}.residual_weight"] and raw.shape == (m + 1,))
    if mode in KNOWN:
        assert [raw is not None for raw in weights] == [mode in LEARNED + DYNAMIC and m > 0 for m in range(4)]


def one_hot(size, at):
    return [float(i == at) for i in range(size)]


def expected_start(mode, L=4, d=16, n=4):
    """{name: what it starts as, or (shape, standard deviation) where that is drawn}"""
    start = {}
    for m in range(L):
        own = {}
        if mode in LEARNED + DYNAMIC and m > 0:
            own["weight"] = [1.0] * (m + 1)
        if mode in DYNAMIC and m > 0:
            own |= {"in": ((d, 4 * (m + 1)), d**-0.5), "out": ((4 * (m + 1), m + 1), 0.0)}
        if mode == "x0":
            own["weight"] = [1.0, 0.0]
        if mode == "denseformer":
            own["weight"] = one_hot(m + 2, m + 1)
        if mode == "resformer" and m > 0:
            own["weight"] = [0.5, 0.5]
        if mode == "attnres":
            own["weight"] = [[0.0] * d] * 2
        if mode == "mudd":
            C, h = (1 if m == L - 1 else 4), 4 * (m + 2)
            own = {"weight": [one_hot(m + 2, m + 1)] * C, "in": ((d, h), d**-0.5), "out": ((h, C * (m + 2)), 0.0)}
        if mode in ("hc", "hc_static"):  # a stream's row: read, mix, write
            own["weight"] = [[[float(i == (2 * m + s) % n), *one_hot(n, i), 1.0] for i in range(n)] for s in (0, 1)]
        if mode == "hc":
            own |= {"dynamic": ((2, d, n + 2), 0.0), "scale": [[0.01] * 2] * 2}
        if mode == "mhc":
            width = n * n + 2 * n
            own = {"weight": ((2, width), 0.0), "dynamic": ((2, n * d, width), 0.02), "scale": [[0.01] * 3] * 2}
        start |= {f"h.{m}.residual_{name}": value for name, value in own.items()}
    if mode == "attnres":
        start["residual_weight"] = [0.0] * d
    return start


@pytest.mark.parametrize("mode", KNOWN)
def test_start_of_the_known_modes(mode):
    residual, expected = (
        new_model(perturbed=False, n_layer=4, residual_mode=mode).residual_tensors(),
        expected_start(mode),
    )
    assert residual.keys() == expected.keys()
    for name, value in expected.items():
        tensor = residual[name].detach()
        if isinstance(value, list):
            close(tensor, torch.tensor(value).double(), 1e-7)
            continue
        shape, std = value
        assert tensor.shape == shape, name
        if std == 0:
            assert not tensor.any(), name
        else:  # the deviation of N draws is off by std/√(2N)
            assert tensor.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * tensor.numel())), name
            assert abs(tensor.mean().item()) < 5 * std / math.sqrt(tensor.numel()), name


@pytest.mark.parametrize("norm_position", ["pre", "sandwich"])
@torch.no_grad()
def test_what_starts_as_the_baseline(norm_position):
    idx = tokens(3, 8)
    for mode in RIVALS:
        model = new_model(perturbed=False, residual_mode=mode, n_kv_head=2, norm_position=norm_position, norm_eps=1e-9)
        for name, p in model.named_parameters():  # larger matrices: what a sub-layer adds is to be seen
            if p.dim() == 2 and not is_residual(name):
                p.mul_(10)
        logits, expected = model(idx, idx)[0], baseline_of(model)(idx, idx)[0]
        off = ((logits - expected).norm() / expected.norm()).item()
        if mode in AS_BASELINE:
            assert off < 1e-9, mode
        elif mode == "mhc":
            assert 1e-9 < off < 0.1
        else:
            assert off > 1e-3, mode


@each_mode
@pytest.mark.parametrize("recompute", [True, False])
@torch.no_grad()
def test_layer_0_is_plain_and_one_layer_of_a_method_the_baseline(mode, recompute):
    if mode not in METHODS:
        return
    model = new_model(residual_mode=mode, recompute=recompute)
    idx, reads = tokens(2, 8), []
    for m in (model, baseline_of(model)):
        m.hidden(idx, watch=lambda layer, site, x: reads.append(x))
    assert all(torch.equal(a, b) for a, b in zip(reads[:3], reads[6:9], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(reads[3:6], reads[9:], strict=True)) == (mode == "baseline")
    model = new_model(n_layer=1, residual_mode=mode, recompute=recompute)
    assert not model.residual_tensors()
    assert torch.equal(model(idx)[0], baseline_of(model)(idx)[0])


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("site", [3, 4])
@torch.no_grad()
def test_learned_weights_start_as_the_mean_or_near_the_baseline(site, recompute):
    idx = tokens(2, 8)
    mean = new_model(perturbed=False, residual_mode=f"method{site}_1", recompute=recompute)
    for kind in (2, 3):
        options = {"perturbed": False, "residual_mode": f"method{site}_{kind}", "recompute": recompute}
        close(new_model(**options)(idx)[0], mean(idx)[0], 1e-14)
        model = new_model(**options, residual_start="own", n_layer=5)
        for m, raw in enumerate(model.residual_weights()):
            if m > 0:
                w = raw.softmax(dim=0)
                close(raw, torch.tensor([0.0] * m + [math.log(19 * m)]).double(), 1e-6)
                assert w[m].item() == pytest.approx(0.95, abs=1e-6)


@pytest.mark.parametrize("mode", [mode for mode in METHODS if mode != "baseline"])
@torch.no_grad()
def test_reruns(mode):
    """All of them is re-running, none is storing, and those between are like neither."""
    idx = tokens(2, 8)
    outputs = []
    for options in ({"reruns": 0}, {"recompute": False}, {"reruns": 1}, {"reruns": 2}, {"reruns": 99}, {}):
        model = new_model(residual_mode=mode, **options)
        outputs.append(model(idx)[0])
        wanted = options.get("reruns", 99 if model.config.recompute else 0)
        assert min(model.config.n_reruns, 2) == min(wanted, 2)
    stored, off, one, two, more, on = outputs
    assert torch.equal(stored, off) and torch.equal(two, more) and torch.equal(two, on)
    assert not torch.equal(stored, one) and not torch.equal(one, two)


@each_mode
def test_no_attention_matrix_is_kept(mode):
    if mode == "realformer":  # may have one
        return
    length = 37  # no other dimension is 37
    model = new_model(residual_mode=mode, block_size=length, n_kv_head=2)
    shapes = []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens(1, length), tokens(1, length))[1].backward()
    assert shapes and max(shape.count(length) for shape in shapes) == 1


# Hugging Face weights


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8, rms_norm_eps=1e-5, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@each_mode
@torch.no_grad()
def test_starts_from_hugging_face_weights(mode, llama):
    def load(seed, **overrides):
        torch.manual_seed(seed)
        return GPT.from_pretrained(llama, **overrides).double().eval()

    def off(model):
        return ((model(idx, idx)[0] - expected).norm() / expected.norm()).item()

    idx = tokens(3, 8)
    expected = load(0)(idx, idx)[0]
    model, same, other = (load(seed, residual_mode=mode).residual_tensors() for seed in (1, 1, 2))
    torch.manual_seed(1)
    start = initial_residual(load(1, residual_mode=mode).config)
    assert model.keys() == start.keys()
    for name, tensor in model.items():
        assert torch.equal(tensor, same[name]), name
        if torch.equal(tensor, other[name]):  # not drawn
            assert torch.equal(tensor, start[name].double()), name
        else:
            assert tensor.std().item() == pytest.approx(start[name].std().item(), rel=0.5)

    model = load(1, residual_mode=mode)
    if mode in ("baseline", *AS_BASELINE):
        assert off(model) < 1e-9
    elif mode in KNOWN:
        assert 1e-6 < off(model) < (0.2 if mode == "mhc" else 5)
    if mode in LEARNED + DYNAMIC:  # near the pretrained function
        assert off(load(1, residual_mode=mode, residual_start="own")) < off(model) / 3


# FLOPs


def matrix_flops(model, idx):
    """Matrix multiplications as torch counts them; of the T² pairs of tokens in attention only T(T+1)/2 are causal."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx)
    counts = dict(counter.get_flop_counts()["Global"])
    attention = counts.pop(torch.ops.aten.bmm)
    return sum(counts.values()) + attention * (idx.size(1) + 1) / (2 * idx.size(1))


def mixing_flops(c, m):
    """Per token, what layer m's residual costs beside sub-layers and re-runs: 2 per coefficient and channel of every
    sum, 2 per number of a matrix that makes coefficients; and behind the last layer."""
    mode, d, n, last = c.residual_mode, c.n_embd, 4, m == c.n_layer - 1
    if mode in METHODS:
        makes = 2 * (d * 4 * (m + 1) + 4 * (m + 1) * (m + 1)) if mode in DYNAMIC else 0
        return makes + 2 * (m + 1) * d if m > 0 and mode != "baseline" else 0
    if mode == "x0":
        return 2 * 2 * d
    if mode == "denseformer":
        return 2 * (m + 2) * d
    if mode == "resformer":
        return 2 * 2 * d * c.n_kv_head // c.n_head if m > 0 else 0
    if mode == "attnres":  # each source once for its coefficient, once in the sum
        return 2 * 2 * d * (2 * m + 1 + 2 * m + 2 + (2 * m + 3 if last else 0))
    if mode == "mudd":
        C, h = (1 if last else 4), 4 * (m + 2)
        return 2 * (d * h + h * C * (m + 2)) + 2 * C * (m + 2) * d
    if mode in ("hc", "hc_static", "mhc"):
        makes = {"hc": 2 * n * d * (n + 2), "hc_static": 0, "mhc": 2 * n * d * (n * n + 2 * n)}[mode]
        return 2 * (makes + 2 * d * n * (n + 2)) + (2 * n * d if last else 0)
    raise ValueError(mode)


@each_model(backbones=("llama", "gpt2"))
def test_flops_per_token(options):
    model, idx = new_model(**options), tokens(2, 7)
    c, flops = model.config, model.flops_per_token(7)
    executed = matrix_flops(model, idx) / idx.numel()
    assert flops >= executed * (1 - 1e-9)
    if c.residual_mode not in KNOWN:
        return
    if c.residual_mode == "realformer":  # it mixes inside attention alone
        assert flops == pytest.approx(executed, rel=1e-9)
        return
    reruns = sum(min(m, c.n_reruns) for m in range(c.n_layer)) if c.residual_mode in METHODS else 0
    plain = matrix_flops(new_model(**{**options, "residual_mode": "baseline"}), idx) / idx.numel()
    head, d, kv = 2 * c.n_embd * c.vocab_size, c.n_embd, c.n_embd * c.n_kv_head // c.n_head
    on_mlp = c.residual_mode in ("method1", "method3_1", "method3_2", "method3_3")
    attention = 2 * 2 * d * (7 + 1) / 2
    rerun = (plain - head) / c.n_layer - 2 * d * (d + kv)  # a layer without its q and k
    if not on_mlp:
        rerun = 2 * d * (d + kv) + attention
    expected = plain + reruns * rerun + sum(mixing_flops(c, m) for m in range(c.n_layer))
    assert flops == pytest.approx(expected, rel=1e-9)


# Combinations that make no sense: one line that names the values

REFUSED = [
    *[({"residual_mode": m, "norm_position": p}, f"{m} {p}") for m in RIVALS for p in ("post", "deepnorm")],
    *[({"residual_mode": m, "norm": "batchnorm"}, "batchnorm re-run") for m in METHODS if m != "baseline"],
    *[({"residual_mode": m, "loops": 2}, f"loops {m}") for m in KNOWN if m != "baseline"],
    *[
        ({"residual_mode": m, "residual_start": "own"}, f"residual_start {m}")
        for m in KNOWN
        if m not in LEARNED + DYNAMIC
    ],
    ({"residual_mode": "mudd", "norm": "batchnorm"}, "mudd batchnorm"),
    ({"loops": 2, "norm": "batchnorm"}, "loops batchnorm"),
    ({"loops": 0}, "loops 1 0"),
    ({"residual_mode": "method3_2", "reruns": 1, "recompute": False}, "reruns recompute"),
    ({"residual_mode": "method3_2", "reruns": 1, "norm": "batchnorm"}, "batchnorm re-run"),
    ({"residual_mode": "method3_2", "reruns": -1}, "reruns -1"),
    ({"residual_mode": "method3_2", "residual_start": "odd"}, "residual_start 'odd' even own"),
]


@pytest.mark.parametrize("options, words", REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_wrong_combinations_are_refused_with_a_sentence(options, words):
    with pytest.raises(ValueError) as refusal:
        GPTConfig(**{**SMALL, **options})
    assert "\n" not in str(refusal.value)
    for word in words.split():
        assert word in str(refusal.value), (word, refusal.value)


def test_unusual_but_good_combinations():
    for mode in KNOWN:
        GPTConfig(**SMALL, residual_mode=mode, recompute=False)
        GPTConfig(**SMALL, residual_mode=mode, norm_position="sandwich")
        if mode != "mudd":
            GPTConfig(**SMALL, norm="batchnorm", residual_mode=mode, recompute=False)
            GPTConfig(**SMALL, norm="batchnorm", residual_mode=mode, reruns=0)
        if mode in METHODS:
            for position in ("post", "deepnorm"):
                GPTConfig(**SMALL, residual_mode=mode, norm_position=position)
