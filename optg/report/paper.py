"""The results printed in the OptG paper, read from paper.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

SAME = 0.05  # two sparsities count as the same if their densities differ by less than this share


@dataclass(frozen=True)
class PaperPoint:
    method: str
    sparsity: float  # 0 to 1, like accuracy
    accuracy: float
    flops: float | None = None


@dataclass(frozen=True)
class PaperTable:
    name: str  # its number in the paper
    model: str
    data: str
    epochs: int
    points: tuple[PaperPoint, ...]
    notes: tuple[str, ...]  # where the paper contradicts itself

    def at(self, method: str, sparsity: float) -> PaperPoint | None:
        """Return the paper's result for a method at the nearest sparsity that counts as the same."""
        density = max(1 - sparsity, 1e-9)
        near = [(abs(1 - p.sparsity - density) / density, p) for p in self.points if p.method == method]
        distance, point = min(near, default=(1.0, None), key=lambda pair: pair[0])
        return point if distance < SAME else None


@cache
def tables() -> tuple[PaperTable, ...]:
    """Return all tables of the paper."""
    content = tomllib.loads((files("optg.report") / "paper.toml").read_text())["tables"]
    return tuple(
        PaperTable(
            t["name"],
            t["model"],
            t["data"],
            t["epochs"],
            tuple(parse_point(*p) for p in t["points"]),
            tuple(t.get("notes", ())),
        )
        for t in content
    )


def parse_point(method: str, sparsity: float, accuracy: float, mega_flops: float | None = None) -> PaperPoint:
    return PaperPoint(method, sparsity / 100, accuracy / 100, None if mega_flops is None else mega_flops * 1e6)


def find_table(model: str, data: str) -> PaperTable | None:
    """Return the paper's table for a model on a dataset. A model's variant (`vgg19-maxpool`) uses the table of the model."""
    return next((t for t in tables() if (t.model, t.data) == (model.removesuffix("-maxpool"), data)), None)
