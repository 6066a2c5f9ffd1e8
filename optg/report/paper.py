"""The paper's own figures, to stand beside ours: read from paper.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

SAME = 0.05  # two sparsities are the same if the shares of weights that they keep differ by less than this


@dataclass(frozen=True)
class Point:
    method: str
    sparsity: float  # 0 to 1, as is accuracy
    accuracy: float
    flops: float | None = None


@dataclass(frozen=True)
class PaperTable:
    name: str  # as the paper counts its tables
    model: str
    data: str
    epochs: int
    points: tuple[Point, ...]
    notes: tuple[str, ...]  # where the paper contradicts itself

    def at(self, method: str, sparsity: float) -> Point | None:
        """The paper's point of a method at a sparsity: the nearest that is the same but for rounding."""
        kept = max(1 - sparsity, 1e-9)
        near = [(abs(1 - p.sparsity - kept) / kept, p) for p in self.points if p.method == method]
        distance, point = min(near, default=(1.0, None), key=lambda pair: pair[0])
        return point if distance < SAME else None


@cache
def tables() -> tuple[PaperTable, ...]:
    read = tomllib.loads((files("optg.report") / "paper.toml").read_text())["tables"]
    return tuple(
        PaperTable(
            t["name"], t["model"], t["data"], t["epochs"], tuple(point(*p) for p in t["points"]), tuple(t.get("notes", ()))
        )
        for t in read
    )


def point(method: str, sparsity: float, accuracy: float, mega_flops: float | None = None) -> Point:
    return Point(method, sparsity / 100, accuracy / 100, None if mega_flops is None else mega_flops * 1e6)


def table_of(model: str, data: str) -> PaperTable | None:
    """The paper's table for a model on a dataset. A variant of a model (`vgg19-maxpool`) is compared with the model's own."""
    return next((t for t in tables() if (t.model, t.data) == (model.removesuffix("-maxpool"), data)), None)
