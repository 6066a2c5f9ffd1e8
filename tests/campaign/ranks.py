"""Part: one of two processes under DDP or FSDP2 is killed; the run resumes and ends with the bytes of an undisturbed run.

    python -m tests.campaign.ranks --count 200 --seed 0 --seconds 3600

As torchrun does, the campaign stops the other process with SIGTERM, then SIGKILL, and starts both again.
"""

import random
import signal
import socket
import time
from pathlib import Path

from tests.campaign import server, small_run
from tests.campaign.part import Part, run

MODES, METHODS = ("ddp", "fsdp"), ("optg", "rigl", "gmp")
EPOCHS, WORLD, PATIENCE, KILLS = 8, 2, 5.0, 2


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def start_ranks(folder: Path, mode: str, method: str) -> list[server.Child]:
    port = free_port()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    return [
        server.start(
            *small_run.training(folder, method, EPOCHS), "--parallel", mode, env=common | {"RANK": str(r), "LOCAL_RANK": str(r)}
        )
        for r in range(WORLD)
    ]


def wait_for_all(ranks: list[server.Child]) -> list[server.Outcome]:
    return [rank.wait() for rank in ranks]


def kill_one(folder: Path, mode: str, method: str, seconds: float, rng: random.Random) -> list[int]:
    """Kill one rank at a random moment, then stop the others. Return the statuses."""
    ranks = start_ranks(folder, mode, method)
    time.sleep(rng.uniform(0.2, 1.1) * seconds)
    victim = rng.choice(ranks)
    victim.kill()
    others = [rank for rank in ranks if rank is not victim]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in others:
            rank.kill(number)
        end = time.monotonic() + PATIENCE
        while any(rank.poll() is None for rank in others) and time.monotonic() < end:
            time.sleep(0.01)
    return [outcome.status for outcome in wait_for_all(ranks)]


def finish(folder: Path, mode: str, method: str, expected: Path) -> list[str]:
    done = wait_for_all(start_ranks(folder, mode, method))
    if any(outcome.status for outcome in done):
        return [f"the same command fails afterwards: {[(o.status, o.text[-300:]) for o in done]}"]
    return small_run.differences(folder, expected)


def carry_out(part: Part) -> None:
    pairs, known, kills = [(mode, method) for mode in MODES for method in METHODS], {}, 0
    folder, mode, method = part.folder / "run", "", ""
    for number in part.cases():
        if kills == 0:
            mode, method = pairs[(number // KILLS) % len(pairs)]
        if (mode, method) not in known:
            began, whole = time.monotonic(), part.folder / f"undisturbed-{mode}-{method}"
            done = wait_for_all(start_ranks(whole, mode, method))
            assert not any(outcome.status for outcome in done), done
            known[mode, method] = whole, time.monotonic() - began
        expected, seconds = known[mode, method]
        statuses = kill_one(folder, mode, method, seconds, random.Random(number))
        kills += 1
        killed = any(statuses)
        part.counts["kills" if killed else "finished before the kill"] += 1
        part.counts[f"kills under {mode}"] += killed
        if kills >= KILLS or statuses == [0] * WORLD:
            problems = finish(folder, mode, method, expected)
            part.failures += [f"seed {number}, {mode}, {method}, after {kills} kills: {problem}" for problem in problems]
            part.counts["runs compared"] += 1
            small_run.copy(Path("nothing"), folder)
            kills = 0


if __name__ == "__main__":
    run(carry_out, __doc__)
