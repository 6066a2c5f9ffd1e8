"""The command `optg report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from optg.naming import visible


@dataclass
class ReportOptions:
    # run folders, folders that contain run folders, or .jsonl files of summaries
    runs: Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")]
    output: Path = Path("report")  # folder to write index.html and figures/ to
    title: str = "Sparse training runs"  # title of the page


def main(args: list[str]) -> None:
    """Write an HTML page about runs: tables, curves, schedules, layers and commands."""
    options = tyro.cli(ReportOptions, args=args, prog="optg report", description=main.__doc__)

    from optg.report import write

    print(visible(write(options.runs, options.output, options.title)))
