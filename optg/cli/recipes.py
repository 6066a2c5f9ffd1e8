"""The command `optg recipes`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from optg.training.recipe import dump, load, names


@dataclass
class RecipesOptions:
    # recipe to print, with every setting
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None


def main(args: list[str]) -> None:
    """List the recipes that come with the package, or print one."""
    options = tyro.cli(RecipesOptions, args=args, prog="optg recipes", description=main.__doc__)
    if options.name:
        print(dump(load(options.name)), end="")
        return
    for name in names():
        r = load(name).recipe
        print(f"{name:32} {r.model} on {r.data}, {r.epochs} epochs, batch {r.batch_size}, lr {r.lr}, decay {r.weight_decay}")
