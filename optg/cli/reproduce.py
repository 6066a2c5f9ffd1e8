"""The command `optg reproduce`."""

import sys

import tyro

from optg.experiments.command import Reproduce, reproduce

DESCRIPTION = """Run experiments from the paper and print our results beside the paper's.

Example: optg reproduce cifar --jobs 6

Without a name it lists all experiments. Finished runs are not run again: to continue, give the same command again."""


def main(args: list[str]) -> None:
    """Run experiments from the paper and print our results beside the paper's."""
    options = tyro.cli(Reproduce, args=args, prog="optg reproduce", description=DESCRIPTION)
    sys.exit(reproduce(options))
