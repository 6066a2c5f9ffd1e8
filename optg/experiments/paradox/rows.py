"""Keep measured rows in paradox.jsonl, so that a repeated command only measures what is missing."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from optg.experiments.paradox.measure import Row
from optg.files import atomic_write
from optg.report.runs import parse_json


class RowFile:
    """Rows of this command and of earlier ones, each with the options that it was measured with."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path, self.options = path, options
        self.lines = read_lines(path)

    def rows(self, loss: float) -> list[Row]:
        """Return the rows measured with the same options on a model with the same loss."""
        same = [{**line} for line in self.lines if line["options"] == self.options and line["loss"] == loss]
        return [Row(**{key: value for key, value in line.items() if key != "options"}) for line in same]

    def append(self, row: Row) -> None:
        self.lines.append({**dataclasses.asdict(row), "options": self.options})
        with atomic_write(self.path) as partial:
            partial.write_text("".join(json.dumps(line) + "\n" for line in self.lines))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a file, or raise if one is not a row."""
    keys = {field.name for field in dataclasses.fields(Row)} | {"options"}
    lines = []
    for number, text in enumerate(path.read_text(errors="replace").splitlines() if path.exists() else [], 1):
        try:
            lines.append(parse_json(text, str(path)))
            is_row = lines[-1].keys() == keys
        except (ValueError, AttributeError):
            is_row = False
        if not is_row:
            raise ValueError(
                f"{path}, line {number}, is not a row of optg paradox; move the file away, or give another --output"
            )
    return lines
