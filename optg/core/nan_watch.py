"""Refuse masks that were ranked from NaN, without making the host wait for a GPU at every cut."""

from typing import NamedTuple

import torch
from torch import Tensor

from optg.core.ranking import refuse_nan


class Report(NamedTuple):
    """Which layers of a cut had NaN in their scores. The answer is valid once `arrived` is done."""

    found: Tensor
    arrived: torch.cuda.Event
    names: list[str]


class NanWatch:
    """Collects reports of cuts and raises for those that found NaN."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def add(self, nan: Tensor, names: list[str]) -> None:
        """Raise now if the scores are on the CPU; on a GPU, keep the report for the next `check`."""
        if not nan.is_cuda:
            refuse_nan(nan, names)
            return
        found, arrived = torch.empty_like(nan, device="cpu", pin_memory=True), torch.cuda.Event()
        found.copy_(nan, non_blocking=True)
        arrived.record(torch.cuda.current_stream(nan.device))
        self.reports.append(Report(found, arrived, names))

    def check(self) -> None:
        """Raise if a cut found NaN. Waits until the GPU has made those cuts, but not for later work."""
        if torch.cuda.is_current_stream_capturing():  # nothing may wait while a graph is captured
            return
        for found, arrived, names in self.reports:
            arrived.synchronize()
            refuse_nan(found, names)
        self.reports.clear()
