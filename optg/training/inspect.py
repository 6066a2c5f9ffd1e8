"""The layers of a model, a run or a checkpoint, as a table."""

from pathlib import Path

import torch
from rich.table import Table

from optg import models
from optg.core.accounting import count
from optg.training.run import inputs_of, reopen


def table(what: str, classes: int, shape: tuple[int, ...] | None) -> Table:
    path = Path(what)
    if path.is_dir():
        classes, shape = inputs_of(path)
        _, model = reopen(path, classes)
    elif "/" in what and ":" not in what:
        raise ValueError(f"there is no folder {what}; expected that of a run, RUN/checkpoints/step-N, or a model's name")
    else:
        model, shape = models.build(what, classes), shape or models.small_images(what)
    with models.explain_shape_errors(what, shape, "give another --shape"):
        account = count(model, torch.zeros(1, *shape, dtype=next(model.parameters()).dtype))
    made = Table(title=what, title_justify="left")
    for column in ("layer", "shape", "weights", "kept", "density", "positions", "FLOPs"):
        made.add_column(column, justify="left" if column == "layer" else "right", overflow="fold")

    def row(name: str, dims: str, size: int, kept: int, positions: str, flops: int, style: str = "") -> None:
        made.add_row(name, dims, f"{size:,}", f"{kept:,}", f"{kept / size:.2%}", positions, f"{flops:,}", style=style)

    for layer in account.layers:
        size = torch.Size(layer.shape).numel()
        row(layer.name, "×".join(map(str, layer.shape)), size, layer.nonzero, f"{layer.positions:,}", layer.flops)
    made.add_section()
    row("all parameters", "", account.parameters, account.nonzero, "", account.flops, style="bold")
    return made
