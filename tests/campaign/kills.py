"""Part: runs of all methods are killed at random moments and resumed, until they end with the bytes of an undisturbed run.

python -m tests.campaign.kills --count 1000 --seed 0 --seconds 3600
"""

import random
import time
from pathlib import Path

from optg.methods import METHODS
from tests.campaign import server, small_run
from tests.campaign.part import Part, run

EPOCHS, KILLS = 8, 4  # of each run
# `keep` prunes nothing that is not 0 already. The others need more steps than this run has.
LEFT_OUT = ("keep",)


class Runs:
    """Undisturbed runs by method, and how long they take. They are trained when they are first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, tuple[Path, float] | None] = {}

    def of(self, method: str) -> tuple[Path, float] | None:
        """Return the folder and the seconds of an undisturbed run, None if the method refuses a run as short as this."""
        if method not in self.known:
            began, folder = time.monotonic(), self.folder / f"undisturbed-{method}"
            done = server.optg(*small_run.training(folder, method, EPOCHS))
            refused = done.status == 2 and done.is_clear
            assert done.status == 0 or refused, f"{method}: {done.text}"
            self.known[method] = None if refused else (folder, time.monotonic() - began)
        return self.known[method]


def kill_at_random(folder: Path, method: str, seconds: float, rng: random.Random) -> int:
    """Start or resume a run and kill it after a random part of the time it takes. Return the status."""
    child = server.start(*small_run.training(folder, method, EPOCHS))
    time.sleep(rng.uniform(0.0, 1.2) * seconds)
    child.kill()
    return child.wait().status


def carry_out(part: Part) -> None:
    runs, methods = Runs(part.folder), sorted(set(METHODS) - set(LEFT_OUT))
    folder, method, kills = part.folder / "run", "", 0
    for number in part.cases():
        rng = random.Random(number)
        if kills == 0:
            method = methods[(number // KILLS) % len(methods)]
        if (known := runs.of(method)) is None:
            part.counts["methods that need a longer run"] += 1
            continue
        expected, seconds = known
        status = kill_at_random(folder, method, seconds, rng)
        kills += 1
        part.counts["kills" if status == -9 else "finished before the kill"] += 1
        if status not in (-9, 0):
            part.fail(f"seed {number}, {method}: status {status}")
        if kills >= KILLS or status == 0:
            problems = small_run.finish(folder, method, expected, EPOCHS)
            part.failures += [f"seed {number}, {method}, after {kills} kills: {problem}" for problem in problems]
            part.counts["runs compared"] += 1
            small_run.copy(Path("nothing"), folder)
            kills = 0


if __name__ == "__main__":
    run(carry_out, __doc__)
