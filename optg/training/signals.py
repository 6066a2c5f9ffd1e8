"""SIGINT and SIGTERM let the step end, save, and leave with 130 or 143; a second SIGINT stops at once."""

import signal
import sys
import time
from types import FrameType
from typing import Self

from optg.training.parallel import Parallel

AGAIN = 2.0  # seconds: a SIGINT within them, under torchrun, is the first one passed on


class Stop:
    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel
        self.signal: int | None = None
        self.at = 0.0
        self.before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def note(self, number: int, frame: FrameType | None) -> None:
        passed_on = self.parallel.mode != "none" and time.monotonic() - self.at < AGAIN
        if self.signal == number == signal.SIGINT and not passed_on:
            raise KeyboardInterrupt
        self.signal, self.at = self.signal or number, time.monotonic()

    @property
    def asked(self) -> bool:
        return self.signal is not None

    def leave(self, message: str) -> None:
        if self.parallel.first:
            print(message, file=sys.stderr)
        sys.exit(128 + (self.signal or signal.SIGTERM))
