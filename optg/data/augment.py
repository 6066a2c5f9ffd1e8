"""Augmentation and normalisation of batches, as pure functions of tensors.

Their shapes are fixed and they never wait for the device, so they can be compiled or captured in a CUDA graph.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def crop_and_flip(images: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor, pad: int) -> Tensor:
    """Return images[index], each padded with `pad` black pixels, cropped to its size at (top, left), and mirrored if `flip`.

    Args:
        images: uint8 [N, C, H, W], the whole dataset.
        index: int64 [b].
        top, left: int64 [b], 0 to 2·pad.
        flip: bool [b].
    """
    _, channels, height, width = images.shape
    across = torch.arange(width, device=images.device)
    columns = left[:, None] + torch.where(flip[:, None], width - 1 - across, across)
    rows = top[:, None] + torch.arange(height, device=images.device)
    pixels = (rows[:, :, None] * (width + 2 * pad) + columns[:, None, :]).flatten(1)  # [b, H·W], offsets in the padded image
    padded = F.pad(images[index], (pad,) * 4).flatten(2)
    return padded.gather(2, pixels[:, None].expand(-1, channels, -1)).unflatten(2, (height, width))


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return (images - mean) / std in float32. Mean and std are [C, 1, 1], in units of the pixels."""
    return images.to(torch.float32, copy=True).sub_(mean).div_(std)


def crop_flip_normalise(
    images: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor, pad: int, mean: Tensor, std: Tensor
) -> Tensor:
    """Crop and flip, then normalise. `optg.data.fused` does the same in one kernel."""
    return normalise(crop_and_flip(images, index, top, left, flip, pad), mean, std)


def choose_augmentation(device: torch.device) -> Callable[..., Tensor]:
    """Return the fused kernel on a GPU with Triton, and torch operations elsewhere. Both give the same bits."""
    if device.type == "cuda":
        try:
            from optg.data import fused
        except ImportError:  # Triton is not installed
            return crop_flip_normalise
        return fused.crop_flip_normalise
    return crop_flip_normalise
