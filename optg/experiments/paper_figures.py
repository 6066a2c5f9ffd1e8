"""Find the paper's accuracy for a cell of an experiment."""

from dataclasses import dataclass
from typing import Any

from optg.experiments.planned_run import recipe_plan
from optg.report.paper import tables

NEARBY_SPARSITY = 0.01  # a paper's figure at a sparsity this close is shown too, together with that sparsity


@dataclass(frozen=True)
class PaperFigure:
    accuracy: float  # in %
    sparsity: float | None = None  # in %, if it differs from the target sparsity
    flops: float | None = None


def find_paper_figure(
    declared: dict[str, Any], base: dict[str, Any], dataset: str, row: dict[str, Any], column: str, sparsity: float
) -> PaperFigure | None:
    """Return the figure declared in the row, or else the closest point of the paper's table that the experiment names."""
    own = row.get("paper", {}).get(dataset)
    if isinstance(own, dict):
        own = own.get(column)
    if own is not None:
        return PaperFigure(own)
    recipe, changed = recipe_plan(base["recipe"]).recipe, base.get("settings", {})
    wanted = (declared.get("paper"), changed.get("model", recipe.model), changed.get("data", recipe.data))
    table = next((t for t in tables() if (t.name, t.model, t.data) == wanted), None)
    points = [p for p in table.points if p.method == row["method"]] if table else []
    point = min(points, key=lambda p: abs(p.sparsity - sparsity / 100), default=None)
    if point is None or abs(point.sparsity - sparsity / 100) > NEARBY_SPARSITY:
        return None
    other = None if abs(point.sparsity - sparsity / 100) < 1e-9 else 100 * point.sparsity
    return PaperFigure(100 * point.accuracy, other, point.flops)


def paper_notes(declared: dict[str, Any], datasets: tuple[str, ...]) -> list[str]:
    """Return notes on where the paper's table contradicts itself."""
    return [note for t in tables() if t.name == declared.get("paper") and t.data in datasets for note in t.notes]
