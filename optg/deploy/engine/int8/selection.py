"""Copy bytes from fixed places of a plane, or the largest of several, by permutations of vectors."""

from collections.abc import Callable
from ctypes import Structure, c_int64, c_uint8, c_void_p

import numpy as np

from optg.deploy.engine.int8.base import Call, Int8Op
from optg.deploy.engine.int8.planes import LINE, Planes


class SelectionStruct(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("pieces", "counts", "initial")),
        *((name, c_int64) for name in ("vectors", "lead")),
        ("fill", c_uint8),
    ]


PIECE = np.dtype([("from", np.int64), ("where", np.int64), ("index", np.uint8, LINE)])


def where_from(source: Planes, output: Planes, stride: tuple[int, int], first: tuple[int, int]) -> np.ndarray:
    """Return where each byte of an output plane comes from: every n-th row and column. −1: from nowhere.

    Args:
        first: the row and the column of the input for the first output. They may lie outside of the image.
    """
    axes = [start + np.arange(size) * step for start, size, step in zip(first, output.shape[1:], stride)]
    inside = [(axis >= 0) & (axis < size) for axis, size in zip(axes, source.shape[1:])]
    images = np.arange(output.images)[:, None, None] * source.rows
    places = np.where(inside[0][:, None] & inside[1], (images + axes[0][:, None]) * source.columns + axes[1], -1)
    plane = np.full((output.images, output.rows, output.columns), -1, np.int64)
    plane[:, : output.shape[1], : output.shape[2]] = places
    return np.pad(plane.ravel(), (0, output.plane - plane.size), constant_values=-1)


def select_call(source: Planes, output: Planes, places: Callable[[], list[list[np.ndarray]]], op: Int8Op | None = None) -> Call:
    """Make output planes from input planes.

    Args:
        places: returns the places of the bytes to choose from: choices × output planes of one input plane. Each output byte
            is the largest of its choices; one without choices is padding. Called when all layouts are final.
    """

    def make() -> tuple[Structure, list[np.ndarray]]:
        wanted = np.stack([np.concatenate(planes) for planes in places()])
        initial = np.where((wanted < 0).all(axis=0), output.zero_point, 0).astype(np.uint8)
        pieces, counts = make_pieces(wanted.reshape(len(wanted), -1, LINE))
        arrays = [pieces, counts, initial]
        own = SelectionStruct(*(array.ctypes.data for array in arrays), len(counts))
        own.lead, own.fill = output.lead if output.fills else 0, output.zero_point
        return own, arrays

    return Call("int8_select", output, [source], source.shape[0], make, op)


def make_pieces(wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces of which each vector is made, and their number: `wanted` is choices × vectors × bytes."""
    pieces: list[tuple[int, int, np.ndarray]] = []
    counts: list[int] = []
    for vector in wanted.transpose(1, 0, 2):
        before = len(pieces)
        for choice in vector:
            left_over = choice >= 0
            while left_over.any():
                start = int(choice[left_over].min())
                here = left_over & (choice < start + LINE)
                where = int(np.packbits(here, bitorder="little").view(np.int64)[0])
                pieces.append((start, where, np.where(here, choice - start, 0)))
                left_over &= ~here
        counts.append(len(pieces) - before)
    return np.array(pieces, PIECE), np.array(counts, np.int32)
