"""The commands. Each imports what it needs when it is called, so that `--help` need not wait for torch."""

from typing import Annotated

import tyro


def methods(markdown: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False) -> None:
    """List the methods: paper, when they prune, what removed weights come back to, and their options.

    Args:
        markdown: print the table as docs/methods.md has it.
    """
    from optg.methods import describe
    from optg.methods import markdown as as_markdown

    if markdown:
        print(as_markdown(), end="")
        return
    from rich.console import Console
    from rich.table import Table

    rows = describe()
    table = Table(show_lines=True)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


def main() -> None:
    tyro.extras.subcommand_cli_from_dict({"methods": methods}, prog="optg", description="Sparse networks, while they train.")
