"""The layers of a model or a run, as a table."""

import json
from pathlib import Path

import torch
from rich.table import Table

from optg import models
from optg.accounting import count
from optg.training.recipe import RecipeError
from optg.training.run import reopen


def table(what: str, classes: int, shape: tuple[int, int, int]) -> Table:
    path = Path(what)
    if path.is_dir():
        summary = path / "summary.json"
        if not summary.is_file():
            raise RecipeError(f"{path} has no summary.json: it is not the folder of a run, or the run has not ended")
        known = json.loads(summary.read_text())
        classes, shape = known["classes"], tuple(known["shape"])
        _, model = reopen(path, classes)
    else:
        model = models.build(what, classes)
    account = count(model, torch.zeros(1, *shape, dtype=next(model.parameters()).dtype))
    made = Table(title=what, title_justify="left")
    made.add_column("layer", overflow="fold")
    for column in ("shape", "weights", "kept", "density", "positions", "FLOPs"):
        made.add_column(column, justify="right")

    def row(name: str, dims: str, size: int, kept: int, positions: str, flops: int, style: str = "") -> None:
        made.add_row(name, dims, f"{size:,}", f"{kept:,}", f"{kept / size:.2%}", positions, f"{flops:,}", style=style)

    for layer in account.layers:
        size = torch.Size(layer.shape).numel()
        row(layer.name, "×".join(map(str, layer.shape)), size, layer.nonzero, f"{layer.positions:,}", layer.flops)
    made.add_section()
    row("all parameters", "", account.parameters, account.nonzero, "", account.flops, style="bold")
    return made
