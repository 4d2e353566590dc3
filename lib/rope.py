"""Rotary positions: each pair of channels of q and k turns with the position, every pair at a frequency of its own."""

import math

import torch


def rope_tables(config, positions, dtype):
    """Cosines and sines (T, hd/2) of the angles at the positions (T,)."""
    hd = config.head_size
    frequencies = config.rope_theta ** -(torch.arange(0, hd, 2, device=positions.device, dtype=dtype) / hd)
    if config.rope_scaling is not None:  # Llama 3: the low frequencies are slowed down by the factor
        factor, low, high, length = config.rope_scaling
        turns = length * frequencies / (2 * math.pi)  # over the length that the model was first trained with
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: as it was, 0: slowed down
        frequencies = frequencies * (kept + (1 - kept) / factor)
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Channel j turns with channel j + hd/2. x (B, H, T, hd)"""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)
