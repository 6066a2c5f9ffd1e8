"""SIGINT and SIGTERM let the step end, save, and leave with 130 or 143; a second SIGINT stops at once."""

import signal
import sys
from types import FrameType
from typing import Self

from optg.training.parallel import Parallel


class Stop:
    def __init__(self) -> None:
        self.signal: int | None = None
        self.before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.signal == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    def asked(self, parallel: Parallel) -> bool:
        """Has a signal come? Processes that train together agree on it."""
        return parallel.any(self.signal is not None)

    def leave(self, message: str) -> None:
        print(message, file=sys.stderr)
        sys.exit(128 + (self.signal or signal.SIGTERM))
