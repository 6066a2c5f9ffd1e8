"""Choose tiles and cuts by timing, and remember the choices on disk."""

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from ctypes import Structure
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from optg.deploy.engine import structs
from optg.deploy.engine.build import Library, cache

if TYPE_CHECKING:
    from optg.deploy.engine.plan import Segment

Choice = TypeVar("Choice")
Tiling = TypeVar("Tiling", bound=tuple[int, ...])
ROUNDS, RUNS = 2, 3  # rounds over all candidates, and runs of each in a round: a slow moment of the machine hits few of them
FETCHED = 20.0  # bytes per nanosecond from memory


def fastest(choices: Sequence[Choice], time: Callable[[Choice], float]) -> Choice:
    """Return the choice with the shortest time. The choices take turns."""
    rounds = [[time(choice) for choice in choices] for _ in range(ROUNDS)]
    return choices[int(np.argmin(np.min(rounds, axis=0)))]


class Tunable(Protocol[Tiling]):
    """A layer that can run in several ways."""

    @property
    def signature(self) -> str: ...  # layers with the same one run fastest in the same way

    @property
    def step(self) -> Structure: ...

    @property
    def tap_bytes(self) -> int: ...  # of the tiling that was written last

    def recall(self, known: list[int] | None) -> Tiling | None: ...

    def shortlist(self) -> list[Tiling]: ...

    def variants(self, tiling: Tiling) -> list[Tiling]: ...

    def fill(self, tiling: Tiling) -> None: ...


class Tuner:
    """Chooses and remembers, in one file for each build of the engine."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.path = cache() / f"tiles-{library.key.removeprefix('engine-')}.json"
        self.known: dict[str, list[int]] = {}
        self.changed = False
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(self.path.read_text())
            self.known = known if isinstance(known, dict) else {}

    def choose(self, layer: Tunable[Tiling], arena: int) -> Tiling:
        """Choose the tiling of a layer and write it into the layer's C struct."""
        tiling = layer.recall(self.known.get(layer.signature))
        if tiling is None:
            shortlist = layer.shortlist()
            tiling = shortlist[0]
            if len(shortlist) > 1:
                tiling = fastest(shortlist, lambda t: self.time(layer, t, arena))
                if len(variants := layer.variants(tiling)) > 1:
                    tiling = fastest(variants, lambda t: self.time(layer, t, arena))
                self.remember(layer.signature, [int(value) for value in tiling])
        layer.fill(tiling)
        return tiling

    def time(self, layer: Tunable[Tiling], tiling: Tiling, arena: int) -> float:
        """Return the nanoseconds with warm caches, plus the time to fetch the taps: in a network they come from memory."""
        layer.fill(tiling)
        inputs = structs.pointers([])
        warm = self.library.c.engine_time(structs.address(layer.step), arena, structs.address(inputs), 0, RUNS)
        return warm + layer.tap_bytes / FETCHED

    def known_cut(self, segment: "Segment", images: int) -> int | None:
        known = self.known.get(cut_signature(segment, images))
        return known[0] if known else None

    def remember_cut(self, segment: "Segment", images: int, cut: int) -> None:
        self.remember(cut_signature(segment, images), [cut])

    def remember(self, signature: str, values: list[int]) -> None:
        self.known[signature] = values
        self.changed = True

    def save(self) -> None:
        if not self.changed:
            return
        with contextlib.suppress(OSError):  # remembering is optional
            handle, temporary = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(handle, "w") as file:
                json.dump(self.known, file)
            os.replace(temporary, self.path)
        self.changed = False


def cut_signature(segment: "Segment", images: int) -> str:
    layers = [(type(op).__name__, segment.shapes[op.output], round(4 * math.log2(1 + op.nonzero))) for op in segment.ops]
    return f"cut {images} {hashlib.sha256(repr(layers).encode()).hexdigest()[:16]}"
