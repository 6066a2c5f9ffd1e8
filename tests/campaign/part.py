"""What all parts of the campaign share: the command line, the time limit, and the line of JSON at the end."""

import argparse
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.campaign import server


class Part:
    """Counts what a part does, and stops it at its limits."""

    def __init__(self, count: int, seed: int, seconds: float, every: int) -> None:
        self.count, self.seed, self.every = count, seed, every
        self.next = seed  # the first case that was not tried
        self.began, self.end = time.monotonic(), time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.total: int | None = None  # cases in all, where they can be enumerated
        self.folder = Path(tempfile.mkdtemp(prefix="optg-campaign-"))

    def cases(self) -> Iterator[int]:
        """Yield the numbers of the cases to try: from the seed on, until the count, the time or the enumeration ends."""
        for number in range(self.seed, self.seed + self.count * self.every, self.every):
            if time.monotonic() > self.end or (self.total is not None and number >= self.total):
                return
            yield number
            self.counts["cases"] += 1
            self.next = number + 1

    def fail(self, what: str) -> None:
        self.failures.append(what)

    def line(self) -> str:
        """Return the result as JSON."""
        result = {
            "seed": self.seed,
            "next": self.next,
            "total": self.total,
            "seconds": round(time.monotonic() - self.began, 1),
            "counts": dict(self.counts),
            "failures": self.failures,
        }
        return json.dumps(result)


def run(carry_out: Callable[[Part], None], doc: str | None, preload: bool = False) -> None:
    """Carry out a part as the command line asks, and print the result as one line of JSON."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--count", type=int, default=10**9, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no case after this time")
    parser.add_argument("--every", type=int, default=1, help="try only every Nth case")
    args = parser.parse_args()
    if preload:
        server.preload()
    server.prepare()
    part = Part(args.count, args.seed, args.seconds, args.every)
    try:
        carry_out(part)
    finally:
        shutil.rmtree(part.folder, ignore_errors=True)
        print(part.line(), flush=True)
