"""The activations by their names. The gated ones multiply the activation of one projection with another projection."""

from functools import partial

import torch
import torch.nn.functional as F


def swish(x, beta):
    return x * torch.sigmoid(beta * x)  # F.silu for beta = 1


ACTIVATIONS = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swish": swish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": F.leaky_relu,  # slope 0.01
    "elu": F.elu,
    "glu": torch.sigmoid,
    "swiglu": swish,
    "geglu": F.gelu,
    "reglu": F.relu,
}
GATED = ("glu", "swiglu", "geglu", "reglu")


def activation(name, swish_beta):
    if ACTIVATIONS[name] is not swish:
        return ACTIVATIONS[name]
    return F.silu if swish_beta == 1 else partial(swish, beta=swish_beta)
