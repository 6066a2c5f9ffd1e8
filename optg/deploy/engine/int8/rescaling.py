"""The constants that turn the 32-bit sums of a convolution into its results, as docs/int8.md defines them."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from optg.deploy.engine.int8.convolution import Convolution

MAGIC = 1.5 * 2**23  # a float32 of this size has no fraction: adding MAGIC rounds to an integer
MAGIC_BITS = 0x4B400000  # the bits of MAGIC; MAGIC_BITS + n are the bits of MAGIC + n
MOST_NARROW = 2**22  # sums of narrow layers are smaller
MOST_WORD = 2**15  # so are their results, before they are clamped
LEAST_SCALE, MOST_SCALE = 2**-21, 2**-5  # of narrow layers
NEGLIGIBLE = 2**-5  # a share of a quantization step
CANDIDATES = 64  # float offsets to try on each side of the nearest one
MOST_START = 2**20  # largest number that is added to the start of a sum


class Rescaling(NamedTuple):
    start: np.ndarray  # of each channel's sum, int64
    scale: np.ndarray  # of the sums, float32
    offset: np.ndarray  # float32
    residual: np.float32  # scale of the value to add
    narrow: bool  # are all sums and results so small that shorter arithmetic is exact?


def exact_scales(op: "Convolution") -> tuple[np.ndarray, float, np.ndarray]:
    """Return the scales of the sums and of the residual, rounded to float32, and the offset; all as float64."""
    scale = (op.quantized[0].scale * op.weight_scale.astype(np.float64) / op.out.scale).astype(np.float32).astype(np.float64)
    residual = float(np.float32(op.quantized[1].scale / op.out.scale)) if len(op.inputs) > 1 else 0.0
    added = op.quantized[1].zero_point * residual if len(op.inputs) > 1 else 0.0
    return scale, residual, op.bias / op.out.scale + op.out.zero_point - added


def rescaling(op: "Convolution") -> Rescaling:
    """Return the constants: those of a narrow layer if it is one, because rescaling it takes fewer instructions."""
    scale, residual, real_offset = exact_scales(op)
    negative, positive = op.weight_sums
    start = -op.quantized[0].zero_point * (negative + positive)
    wide = Rescaling(start, scale.astype(np.float32), real_offset.astype(np.float32), np.float32(residual), narrow=False)
    if op.result is None:
        return wide
    tiny = (scale < LEAST_SCALE) & (255 * LEAST_SCALE * (positive - negative) <= NEGLIGIBLE)
    scale = np.where(tiny, LEAST_SCALE, scale)  # filters without weights, for example
    exact = real_offset - MAGIC * scale + (0 if len(op.inputs) > 1 else MAGIC)
    offset, more = split_offset(exact, scale)
    start = start + more
    largest = np.maximum(np.abs(start + 255 * negative), np.abs(start + 255 * positive))
    results = largest * scale + np.abs(real_offset) + 255 * (1 + residual)
    fits = (largest < MOST_NARROW) & (results < MOST_WORD) & (scale <= MOST_SCALE)
    if not fits.all():
        return wide
    start = start.astype(np.int64) + MAGIC_BITS
    return Rescaling(start, scale.astype(np.float32), offset, np.float32(residual), narrow=True)


def split_offset(exact: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a float32 and a whole number for each channel, such that float32 + scale · number is the exact offset.

    A float32 of this size has hardly a fraction. Of the floats around the exact offset, take the one whose difference from it
    is nearest to a multiple of the scale.
    """
    nearest = exact.astype(np.float32)
    steps = np.array(sorted(range(-CANDIDATES, CANDIDATES + 1), key=abs))[:, None]
    floats = (nearest + steps * np.spacing(nearest).astype(np.float64)).astype(np.float32)
    numbers = np.rint((exact - floats) / scale)
    errors = np.abs(exact - floats - numbers * scale)
    best = np.where((np.abs(numbers) <= MOST_START) | (steps == 0), errors, np.inf).argmin(axis=0)
    channels = np.arange(len(exact))
    return floats[best, channels], numbers[best, channels]
