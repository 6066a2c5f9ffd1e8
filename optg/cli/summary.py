"""The command `optg summary`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from optg import trust
from optg.training.arguments import ModelOptions, TrustFlag, parse_with_model_options
from optg.training.recipe import refuse_model_options

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn


@dataclass
class SummaryOptions:
    # run folder, one of its checkpoints (RUN/checkpoints/step-N), or a model's name
    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT|MODEL")]
    classes: int = 10  # number of classes of a model given by name
    # channels, height and width of its images; by default 3 32 32, or 1 8 8 for digits
    shape: tuple[int, int, int] | None = None
    model_options: ModelOptions = field(default_factory=dict)
    trust: TrustFlag = False


def main(args: list[str]) -> None:
    """Show the layers of a run, checkpoint or model: shape, density and FLOPs."""
    options = parse_with_model_options(SummaryOptions, args, "optg summary", main.__doc__)
    if options.trust:
        trust.allow_everything()

    from optg.terminal import wide_console

    model, shape = open_model(options)
    wide_console().print(layer_table(options.what, model, shape))


def open_model(options: SummaryOptions) -> "tuple[nn.Module, tuple[int, ...]]":
    """Return the model and the shape of its images."""
    from optg import models
    from optg.training.saved import SavedRun

    name = options.what
    if Path(name).is_dir() or ("/" in name and ":" not in name):
        refuse_model_options(name, options.model_options)
        run = SavedRun.open(name)
        return run.model(), run.shape
    trust.allow(name)
    return models.build(name, options.classes, options.model_options), options.shape or models.small_images(name)


def layer_table(name: str, model: "nn.Module", shape: tuple[int, ...]) -> "Table":
    import torch
    from rich.table import Table

    from optg import models
    from optg.core.accounting import count

    with models.explain_shape_errors(name, shape, models.advise_on_size(name, model, shape, "give another --shape")):
        account = count(model, torch.zeros(1, *shape, dtype=next(model.parameters()).dtype))
    table = Table(title=name, title_justify="left")
    for column in ("layer", "shape", "weights", "kept", "density", "positions", "FLOPs"):
        table.add_column(column, justify="left" if column == "layer" else "right", overflow="fold")

    def add(name: str, dims: str, size: int, kept: int, positions: str, flops: int, style: str = "") -> None:
        density = f"{kept / size:.2%}" if size else "–"
        table.add_row(name, dims, f"{size:,}", f"{kept:,}", density, positions, f"{flops:,}", style=style)

    for layer in account.layers:
        size = torch.Size(layer.shape).numel()
        add(layer.name, "×".join(map(str, layer.shape)), size, layer.nonzero, f"{layer.positions:,}", layer.flops)
    table.add_section()
    add("all parameters", "", account.parameters, account.nonzero, "", account.flops, style="bold")
    return table
