"""Stop cleanly on SIGINT and SIGTERM: finish the step, save, and exit with 130 or 143. A second Ctrl-C stops immediately."""

import signal
import sys
import time
from types import FrameType
from typing import NoReturn, Self

from optg.training.parallel import Parallel

REPEAT_SECONDS = 2.0  # under torchrun, a SIGINT this soon after the first is the same Ctrl-C, forwarded


class StopSignal:
    """As a context manager: remember a stop signal instead of dying from it."""

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel
        self.signal: int | None = None
        self.received_at = 0.0
        self.previous_handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.previous_handlers[number] = signal.signal(number, self.receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def receive(self, number: int, frame: FrameType | None) -> None:
        forwarded = self.parallel.mode != "none" and time.monotonic() - self.received_at < REPEAT_SECONDS
        if self.signal == number == signal.SIGINT and not forwarded:
            raise KeyboardInterrupt
        self.signal, self.received_at = self.signal or number, time.monotonic()

    @property
    def requested(self) -> bool:
        """Whether a stop signal has arrived."""
        return self.signal is not None

    def exit(self, message: str) -> NoReturn:
        """Print a message and exit with the signal's status."""
        if self.parallel.is_first:
            print(message, file=sys.stderr)
        sys.exit(128 + (self.signal or signal.SIGTERM))
