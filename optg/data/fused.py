"""`optg.data.augment.crop_flip_normalise` as one Triton kernel."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

STEP = 1024  # values that one program writes


def crop_flip_normalise(
    images: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor, pad: int, mean: Tensor, std: Tensor
) -> Tensor:
    """Do the same as the function of this name in `augment`, bit for bit. The result is in channels_last format."""
    _, channels, height, width = images.shape
    out = torch.empty(len(index), channels, height, width, device=images.device, memory_format=torch.channels_last)
    grid = len(index), triton.cdiv(channels * height * width, STEP)
    with torch.cuda.device(images.device) if images.is_cuda else nullcontext():  # Triton launches on the current GPU
        kernel[grid](images, index, top, left, flip, mean, std, out, pad, channels, height, width, STEP)
    return out


@triton.jit
def kernel(images, index, top, left, flip, mean, std, out, pad, channels, height, width, STEP: tl.constexpr):
    image = tl.program_id(0).to(tl.int64)  # a batch may hold more than 2³¹ values
    place = tl.program_id(1) * STEP + tl.arange(0, STEP)  # offset in the output image, which is channels_last
    size = channels * height * width
    channel, column, row = place % channels, place // channels % width, place // channels // width
    mirrored = tl.load(flip + image) != 0
    x = tl.where(mirrored, width - 1 - column, column) + tl.load(left + image) - pad
    y = row + tl.load(top + image) - pad
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height) & (place < size)
    source = images + tl.load(index + image) * size + channel * height * width + y * width + x
    pixel = tl.load(source, mask=inside, other=0).to(tl.float32)
    here = place < size
    shifted = pixel - tl.load(mean + channel, mask=here, other=0.0)
    result = tl.math.div_rn(shifted, tl.load(std + channel, mask=here, other=1.0))
    tl.store(out + image * size + place, result, mask=here)
