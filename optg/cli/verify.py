"""The command `optg verify`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

DESCRIPTION = """Check every file of run folders against its checksum.

Prints what is whole, damaged, missing or unverifiable, and what can be recovered. Changes nothing. Exits with 1 if anything is
damaged or missing, else with 0."""


@dataclass
class VerifyOptions:
    # run folders
    runs: Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")]


def main(args: list[str]) -> None:
    """Check every file of run folders against its checksum."""
    options = tyro.cli(VerifyOptions, args=args, prog="optg verify", description=DESCRIPTION)

    from optg.deploy import packed
    from optg.training.verify import verify

    def check_packed(path: Path) -> str:
        try:
            packed.load(path)
        except packed.TooLarge as error:
            return str(error)
        return ""

    if not options.runs:
        raise ValueError("no run was given; expected at least one run folder: optg verify RUN ...")
    verdicts = [verify(path, check_packed) for path in options.runs]
    for verdict in verdicts:
        print("\n".join(verdict.lines()))
    sys.exit(0 if all(verdict.is_fine for verdict in verdicts) else 1)
