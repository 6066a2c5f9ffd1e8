"""Part: train, kill, resume, export and predict in a loop, for hours. Results stay the same, and no resource leaks.

    python -m tests.campaign.soak --seed 0 --seconds 7200

A case is one round: a run of a random method is killed a random number of times, resumed to its end, exported and run by
`optg predict` on its own test images. Model, metrics and predictions must equal those of an undisturbed run.
"""

import os
import random
import re
from pathlib import Path

from optg.methods import METHODS
from tests.campaign import server, small_run
from tests.campaign.kills import EPOCHS, LEFT_OUT, Runs, kill_at_random
from tests.campaign.part import Part, run

MOST_KILLS = 5


def predictions(folder: Path) -> str:
    """Export a run and return what its packed file predicts, or what went wrong."""
    from tests.campaign.flips import trust

    exported = server.optg("export", folder, *trust("export"))
    if exported.status != 0:
        return f"export: {exported.status} {exported.text[-300:]}"
    done = server.optg("evaluate", folder, "--device", "cpu", *trust("evaluate"))
    return f"{done.status} {done.text} {predict(folder / 'model.optg')}"


def predict(file: Path) -> str:
    """Run a packed file on random images, in a child, and return the sum of its outputs."""

    def show() -> None:
        import torch

        import optg

        model = optg.load(file)
        images = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        print("outputs", model(images).double().sum().item().hex())
        raise SystemExit(0)

    done = server.optg("--version", before=show)
    return done.text if done.status == 0 else f"predict: {done.status} {done.text[-300:]}"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def carry_out(part: Part) -> None:
    runs, methods, wanted = Runs(part.folder), sorted(set(METHODS) - set(LEFT_OUT)), {}
    folder, files = part.folder / "run", open_files()
    for number in part.cases():
        rng = random.Random(number)
        method = rng.choice(methods)
        if (known := runs.of(method)) is None:
            continue
        expected, seconds = known
        if method not in wanted:
            wanted[method] = predictions(expected)
            if not re.match(r"0 accuracy .*outputs -?0x", wanted[method], re.DOTALL):
                part.fail(f"{method}: {wanted[method]}")
        for _ in range(rng.randint(0, MOST_KILLS)):
            part.counts["kills"] += kill_at_random(folder, method, seconds, rng) == -9
        problems = small_run.finish(folder, method, expected, EPOCHS)
        if (found := predictions(folder)) != wanted[method]:
            problems.append(f"predictions differ: {found}")
        if left := [path.name for path in folder.rglob("*partial*")]:
            problems.append(f"files are left over: {left}")
        part.failures += [f"seed {number}, {method}: {problem}" for problem in problems]
        part.counts["rounds"] += 1
        small_run.copy(Path("nothing"), folder)
    if open_files() > files + 2:
        part.fail(f"{open_files() - files} files stay open")


if __name__ == "__main__":
    run(carry_out, __doc__)
