"""Know which runs have finished, here or in another command, and record them."""

from pathlib import Path
from typing import Any

from optg.experiments import records
from optg.experiments.planned_run import PlannedRun, run_key
from optg.experiments.records import Summaries


class RunHistory:
    """Finished runs from run folders and record files."""

    def __init__(self, output: Path, record_file: Path | None) -> None:
        self.record_file = record_file
        self.recorded = records.records_beside(record_file)
        self.summaries: Summaries = records.finished_runs(output, self.recorded)

    def has(self, run: PlannedRun) -> bool:
        return run.key in self.summaries

    def add(self, run: PlannedRun, summary: dict[str, Any]) -> None:
        """Remember a run that has finished. An earlier summary of the same run stays."""
        self.summaries.setdefault(run.key, summary)

    def record(self, summary: dict[str, Any]) -> None:
        """Append a summary to the record file, unless that file or one beside it has the run already."""
        if self.record_file and run_key(summary) not in records.records_beside(self.record_file):
            records.append_record(self.record_file, summary)

    def unrecorded(self, runs: list[PlannedRun]) -> list[dict[str, Any]]:
        """Return the summaries of finished runs that were not in a record file at the start."""
        return [self.summaries[run.key] for run in runs if self.has(run) and run.key not in self.recorded]

    def recorded_meanwhile(self, run: PlannedRun) -> bool:
        """Return whether another command has recorded the run since the start, and if so remember it."""
        try:
            recorded = records.records_beside(self.record_file)
        except (ValueError, OSError):  # `record` will report it
            return False
        if self.has(run) or run.key not in recorded:
            return False
        self.summaries[run.key] = recorded[run.key]
        return True
