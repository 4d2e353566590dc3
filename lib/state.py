"""A model around tensors that are there already."""

import torch
import torch.nn as nn

from lib.errors import refuse


def from_state(cls, config, state):
    """Nothing is allocated: the tensors become the model's own, once their names and shapes fit."""
    few = 8 * config.n_layer > len(state)  # a layer has at least so many, and making one takes time
    refuse(few, f"n_layer={config.n_layer}, but there are only {len(state)} tensors")
    with torch.device("meta"):
        model = cls(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in sorted(shapes.keys() | given.keys()):
        wanted, found = (shape.get(name, "absent") for shape in (shapes, given))
        refuse(wanted != found, f"tensor {name} should be {wanted}, is {found}")
    model.load_state_dict(state, assign=True)
    if config.tie_weights:
        model.lm_head.weight = model.wte.weight
    return model


def crop_block_size(model, block_size):
    was = model.config.block_size
    refuse(block_size > was, f"block_size={was} can be cropped, not raised to {block_size}")
    model.config.block_size = block_size
    if model.wpe is not None:
        model.wpe.weight = nn.Parameter(model.wpe.weight[:block_size].clone())
        model.wpe.num_embeddings = block_size
