"""How a value lies in memory: vectors of lanes, each lane a block of an image.

An image is cut into `rows` × `columns` blocks of equal size (the last ones may stick out), a batch into `images`. Lane
(image · rows + y) · columns + x of every vector belongs to block (y, x) of that image. So one plane is a picture of
height × width vectors, where vector (i, j) holds pixel (i, j) of each block. A halo surrounds it: beyond a block's edge a
convolution reads the neighbouring block's pixels, or padding.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np


class Grid(NamedTuple):
    """What the lanes are: images, and the rows and columns of blocks in each of them."""

    images: int
    rows: int
    columns: int


class Halo(NamedTuple):
    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0

    def union(self, other: "Halo") -> "Halo":
        return Halo(*map(max, self, other))


NO_HALO = Halo()


@lru_cache(maxsize=4096)
def best_grid(height: int, width: int, images: int, lanes: int) -> Grid:
    """Return the grid with the fewest vectors for images of this size; ties go to blocks with the shortest edges."""
    per_image = lanes // images
    choices = [(r, c) for r in range(1, per_image + 1) for c in range(1, per_image // r + 1) if r <= height and c <= width]

    def cost(choice: tuple[int, int]) -> tuple[int, int, int]:
        h, w = math.ceil(height / choice[0]), math.ceil(width / choice[1])
        return h * w, h + w, choice[0] * choice[1]

    return Grid(images, *min(choices, key=cost))


@dataclass(frozen=True)
class Layout:
    channels: int
    height: int  # of the image
    width: int
    grid: Grid
    rows: int  # of a block
    columns: int
    lanes: int
    halo: Halo = NO_HALO
    fill: float | None = None  # the value of padding; None: nothing reads it

    @property
    def vector(self) -> int:
        """Bytes of a vector."""
        return 4 * self.lanes

    @property
    def row(self) -> int:
        """Bytes from one row of vectors to the next."""
        return (self.halo.left + self.columns + self.halo.right) * self.vector

    @property
    def channel(self) -> int:
        """Bytes from one plane to the next: an odd number of vectors, so that planes do not compete for the same cache sets."""
        vectors = (self.halo.top + self.rows + self.halo.bottom) * (self.row // self.vector)
        return (vectors | 1) * self.vector

    @property
    def start(self) -> int:
        """Bytes to the first vector after the halo. One vector is spare: the loads that fill a halo may begin that early."""
        return self.halo.top * self.row + self.halo.left * self.vector + self.vector

    @property
    def size(self) -> int:
        return self.channels * self.channel + 2 * self.vector

    @property
    def visible(self) -> tuple[int, int]:
        """Rows and columns of vectors that hold a pixel of some image."""
        return min(self.rows, self.height), min(self.columns, self.width)

    @property
    def flat(self) -> bool:
        """Whether the rows follow each other without a gap."""
        return self.halo.left == self.halo.right == 0 and self.visible[1] == self.columns

    def with_halo(self, halo: Halo, fill: float | None) -> "Layout":
        return replace(self, halo=halo, fill=fill)

    @cached_property
    def pixels(self) -> np.ndarray:
        """Which pixel each lane of each vector holds: image · height · width + pixel, or -1. Shape: rows × columns × lanes."""
        lane = np.arange(self.lanes)
        blocks = self.grid.rows * self.grid.columns
        image, by, bx = lane // blocks, lane % blocks // self.grid.columns, lane % self.grid.columns
        y = np.arange(self.rows)[:, None, None] + by * self.rows
        x = np.arange(self.columns)[None, :, None] + bx * self.columns
        here = (image < self.grid.images) & (y < self.height) & (x < self.width)
        return np.where(here, (image * self.height + y) * self.width + x, -1)

    def offsets(self) -> np.ndarray:
        """Return the bytes from `start` to every number of a plane, in the order of `pixels`."""
        i, j, lane = np.ogrid[: self.rows, : self.columns, : self.lanes]
        return i * self.row + j * self.vector + 4 * lane

    @cached_property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """How to fill the halo: (to, from, mask) for each vector, in bytes from `start`, and the masks.

        A halo vector is one of the block's own vectors with its lanes shifted by the number of blocks between them: in memory,
        a load that begins that many lanes later. The masks exclude lanes outside the image.
        """
        entries: list[tuple[int, int, int]] = []
        masks: dict[bytes, int] = {}
        if self.fill is not None:
            lane = np.arange(self.lanes)
            blocks = self.grid.rows * self.grid.columns
            exists = lane < self.grid.images * blocks
            top, left = lane % blocks // self.grid.columns * self.rows, lane % self.grid.columns * self.columns
            rows = range(-self.halo.top, self.rows + self.halo.bottom)
            columns = range(-self.halo.left, self.columns + self.halo.right)
            inside_y = {i: exists & (top + i >= 0) & (top + i < self.height) for i in rows}
            inside_x = {j: exists & (left + j >= 0) & (left + j < self.width) for j in columns}
            whole = {j for j in range(self.columns) if inside_x[j].all()}
            for i, in_rows in inside_y.items():
                kept = whole if 0 <= i < self.rows and in_rows.all() else set()
                for j in inside_x.keys() - kept:
                    (down, inner_i), (across, inner_j) = divmod(i, self.rows), divmod(j, self.columns)
                    here = in_rows & inside_x[j]
                    shift = down * self.grid.columns + across if here.any() else 0
                    mask = masks.setdefault((-here.astype(np.int32)).tobytes(), len(masks))
                    source = inner_i * self.row + inner_j * self.vector + 4 * shift
                    entries.append((i * self.row + j * self.vector, source, mask))
        table = np.array(entries, np.int32).reshape(-1, 3)
        return table, np.frombuffer(b"".join(masks) or bytes(self.vector), np.int32).reshape(-1, self.lanes).copy()
