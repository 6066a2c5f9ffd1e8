"""Pixels to what a model sees, a batch at a time: pure functions of tensors, with fixed shapes and nothing to wait for.

They can be compiled, or captured in a CUDA graph, as they are.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def crop_and_flip(images: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor, pad: int) -> Tensor:
    """images[index] with a black frame of `pad` pixels, each cut back to its size at its own (top, left) and maybe mirrored.

    images: uint8 [N, C, H, W], the whole set. index, top, left: int64 [b], the latter from 0 to 2·pad. flip: bool [b].
    """
    _, channels, height, width = images.shape
    across = torch.arange(width, device=images.device)
    columns = left[:, None] + torch.where(flip[:, None], width - 1 - across, across)
    rows = top[:, None] + torch.arange(height, device=images.device)
    pixels = (rows[:, :, None] * (width + 2 * pad) + columns[:, None, :]).flatten(1)  # [b, H·W], places in the padded image
    padded = F.pad(images[index], (pad,) * 4).flatten(2)
    return padded.gather(2, pixels[:, None].expand(-1, channels, -1)).unflatten(2, (height, width))


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(images - mean) / std in float32; mean and std [C, 1, 1] in units of the pixels."""
    return images.to(torch.float32, copy=True).sub_(mean).div_(std)
