"""The command `optg methods`."""

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass
class MethodsOptions:
    markdown: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # print the table as in docs/methods.md


def main(args: list[str]) -> None:
    """List the methods: paper, when they prune, what removed weights revive to, and their options."""
    options = tyro.cli(MethodsOptions, args=args, prog="optg methods", description=main.__doc__)

    from optg.methods import describe, markdown

    if options.markdown:
        print(markdown(), end="")
        return

    from rich.table import Table

    from optg.terminal import wide_console

    rows = describe()
    table = Table(show_lines=True)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    wide_console().print(table)
