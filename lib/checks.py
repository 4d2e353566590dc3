"""What a model's config may not be, each with the sentence that says so: checked here once, inside all is plain."""

from lib.activations import ACTIVATIONS, swish
from lib.errors import refuse


def check_values(c, norms, activations, modes):
    """Each setting for itself. norms, activations, modes: the names that there are."""
    refuse(c.norm == "instancenorm", "norm 'instancenorm' averages over time: a token would see the future")
    choices = {
        "norm": norms,
        "residual_mode": modes,
        "activation": activations,
        "norm_position": ("pre", "post", "sandwich", "deepnorm"),
        "position": ("rope", "learned"),
        "residual_start": ("even", "own"),
    }
    for name, known in choices.items():
        value = getattr(c, name)
        refuse(value not in known, f"{name} '{value}' is not known: choose one of {', '.join(known)}")
    for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "ffn_hidden", "loops"):
        value = getattr(c, name)
        refuse(value is not None and value < 1, f"{name} must be at least 1, not {value}")
    for name in ("norm_eps", "rope_theta"):
        refuse(getattr(c, name) <= 0, f"{name} must be more than 0, not {getattr(c, name)}")
    refuse(not 0 <= c.dropout < 1, f"dropout must be at least 0 and less than 1, not {c.dropout}")
    refuse(c.reruns is not None and c.reruns < 0, f"reruns must not be negative, not {c.reruns}")
    if c.rope_scaling is not None:
        wrong = len(c.rope_scaling) != 4 or min(c.rope_scaling) <= 0 or c.rope_scaling[1] >= c.rope_scaling[2]
        text = "four numbers above 0: factor, low and high frequency factor (low < high), original length"
        refuse(wrong, f"rope_scaling must be {text}; not {c.rope_scaling}")


def check_combinations(c):
    """Settings that do not go together. A None has become what it stands for."""
    mode, scheme = c.residual_mode, c.mode.scheme
    refuse(c.n_embd % c.n_head, f"n_embd={c.n_embd} must be a multiple of n_head={c.n_head}")
    refuse(c.n_head % c.n_kv_head, f"n_head={c.n_head} must be a multiple of n_kv_head={c.n_kv_head}")
    odd = c.position == "rope" and c.head_size % 2
    refuse(odd, f"rope turns pairs of channels: n_embd/n_head={c.head_size} must be even")
    unused = c.swish_beta != 1 and ACTIVATIONS[c.activation] is not swish
    refuse(unused, f"swish_beta={c.swish_beta} has no effect on activation '{c.activation}'")
    unused = c.rope_scaling is not None and c.position != "rope"
    refuse(unused, f"rope_scaling has no effect on position '{c.position}'")

    refuse(c.loops > 1 and mode != "baseline", f"loops={c.loops} is for the baseline, not for '{mode}'")
    refuse(c.reruns and not c.recompute, f"reruns={c.reruns} contradicts recompute=False: leave one of them out")
    refuse(
        c.norm_position not in ("pre", "sandwich") and not scheme.any_norm_position,
        f"residual_mode '{mode}' is defined for a norm before the sub-layer: set norm_position to pre or sandwich, "
        f"not {c.norm_position}",
    )
    refuse(
        c.residual_start != "even" and not scheme.softmax,
        f"residual_start '{c.residual_start}' is for weights under a softmax, which '{mode}' does not have",
    )
    refuse(
        c.norm == "batchnorm" and c.n_reruns,
        "a batchnorm cannot be re-run, since later layers' inputs would mix into its running statistics: "
        "set recompute=False or another norm",
    )
    several = c.loops > 1 or not scheme.batchnorm
    refuse(
        c.norm == "batchnorm" and several,
        f"a batchnorm cannot serve several inputs, as in '{mode}' with loops={c.loops}: set another norm",
    )
