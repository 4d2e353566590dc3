"""What there is to say of a model on the way and in the end: its evaluation, its layers, its residual, a sample."""

import datetime
import math
from dataclasses import replace

import torch

MOST_NUMBERS = 64  # of a residual tensor that is reported whole


def eval_text(results):
    lines = ["***** eval metrics *****"]
    for name, value in results.items():
        if name == "eval_runtime":
            value = str(datetime.timedelta(seconds=round(value, 2)))[:10]
        lines.append(f"  {name:23} = {f'{value:.4f}' if isinstance(value, float) else value:>10}")
    return "\n".join(lines)


def show_sample(model, tokenizer, n_tokens, stop):
    """Print a text as it is made; a signal ends it."""
    device = model.wte.weight.device
    prompt = torch.tensor([[tokenizer.eot_id]], device=device)  # a document begins after the end of another
    generator = torch.Generator(device).manual_seed(1)
    decoder = tokenizer.stream_decoder()
    print("\n***** sample *****")
    model.eval()
    options = {"temperature": 0.8, "top_k": 50, "generator": generator, "real_vocab": tokenizer.vocab_size}
    with torch.compiler.set_stance("force_eager"):  # a text is too short to compile one-token steps for it
        for next_id in model.stream(prompt, n_tokens, **options):
            print(decoder.feed(next_id.item()), end="", flush=True)
            if stop.received:
                break
    print(decoder.finish())


@torch.no_grad()
def layer_norms(model, idx):
    """Each layer's gradient norm, and the mean norm of the stream that its attention reads; idx (B, T)."""
    streams = []

    def watch(m, site, x):
        if site == "attention":
            streams.append(x.norm(dim=-1).mean().item())

    model.eval()  # no dropout, and a batchnorm's statistics stay as they are
    with torch.compiler.set_stance("force_eager"):  # one batch is too little to compile for
        model.hidden(idx, watch=watch)
    model.train()
    gradients = [[p.grad for p in block.parameters() if p.grad is not None] for block in model.h]
    norms = {"grad_norm": [torch.nn.utils.get_total_norm(of).item() for of in gradients], "stream_norm": streams}
    return {name: [finite_or_none(value) for value in values] for name, values in norms.items()}


def finite_or_none(value):
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None


def row_name(config):
    """The residual as tables call it: method3_2, -stored or -K for its re-runs, -own for its start; looped."""
    if config.loops > 1:
        return "looped"
    all_reruns = replace(config, norm="rmsnorm", recompute=True, reruns=None).n_reruns
    name = config.residual_mode
    if config.n_reruns < all_reruns:
        name += f"-{config.n_reruns}" if config.n_reruns else "-stored"
    return name + "-own" * (config.residual_start == "own")


def residual_report(model):
    """
    What the residual has learned. Weights under a softmax: for each layer its raw and normalised ones, None where it
    has none. Other tensors by name: all of their numbers, or of a large one its norm.
    """
    others = {
        name: tensor.tolist() if tensor.numel() <= MOST_NUMBERS else {"norm": tensor.norm().item()}
        for name, tensor in model.residual_tensors().items()
    }
    raws = [None if raw is None else raw.detach() for raw in model.residual_weights()]
    if all(raw is None for raw in raws):
        return others
    report = []
    for m, raw in enumerate(raws):
        weights = None if raw is None else {"raw": raw.tolist(), "normalized": raw.softmax(dim=0).tolist()}
        report.append({"layer": m, "weights": weights})
        mine = {name: value for name, value in others.items() if name.startswith(f"h.{m}.")}
        mine.pop(f"h.{m}.residual_weight", None)
        if mine:
            report[-1]["tensors"] = mine
    return report


def residual_text(report):
    """The same for people."""
    lines = []
    if isinstance(report, dict):
        return "".join(f"{name} {number_text(value)}\n" for name, value in report.items())
    for entry in report:
        if entry["weights"] is None:
            lines.append(f"layer {entry['layer']}: no weights")
            continue
        lines.append(f"layer {entry['layer']}: {len(entry['weights']['raw'])} weights")
        lines += [f"  {kind:10} {number_text(values)}" for kind, values in entry["weights"].items()]
        lines += [f"  {name} {number_text(value)}" for name, value in entry.get("tensors", {}).items()]
    return "\n".join(lines) + "\n"


def number_text(value):
    if isinstance(value, dict):
        return f"norm {value['norm']:.4f}"
    return f"[{', '.join(map(number_text, value))}]" if isinstance(value, list) else f"{value:.4f}"
