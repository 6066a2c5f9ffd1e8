"""The small run that the campaign disturbs, and how its results are compared with those of an undisturbed run."""

import json
import shutil
from pathlib import Path
from typing import Any

from optg.training import checkpoint
from tests.campaign.server import Outcome, optg, start

EPOCHS = 3
TIMES = ("seconds", "images_per_second")  # differ from run to run
VARYING = (*TIMES, "command", "versions", "hardware", "revision")
# One step per epoch, and a checkpoint after each step and after each epoch.
TRAIN = (
    *("train", "--model", "tests.training.user_code:model", "--data", "tests.training.user_code:data", "--device", "cpu"),
    *("--model.width", "6", "--batch-size", "160", "--sparsity", "0.9", "--minutes", "1e-9"),
)


def training(folder: Path, method: str, epochs: int = EPOCHS) -> tuple[str, ...]:
    """Return the arguments of a run."""
    goal = ("--sparsity", "0") if method == "dense" else ()
    return (*TRAIN, "--method", method, *goal, "--epochs", str(epochs), "--output", str(folder))


def undisturbed(folder: Path, method: str, epochs: int = EPOCHS) -> Path:
    """Train without a disturbance."""
    done = optg(*training(folder, method, epochs))
    assert done.status == 0, done.text
    return folder


def interrupted(folder: Path, method: str, epochs: int = EPOCHS, until: int = EPOCHS - 1) -> Path:
    """Train until there is a checkpoint of a step, then kill the run."""
    child = start(*training(folder, method, epochs), env={"OPTG_STOP_AT": str(until)}, before=stop_after_saving)
    done = child.wait()
    assert done.status == -9, done.text
    return folder


def stop_after_saving() -> None:
    """In a child: die after the second checkpoint of a step, the one at the end of its epoch."""
    import os

    from optg.training.saving import Checkpointer

    save, calls, wanted = Checkpointer.save, [], int(os.environ["OPTG_STOP_AT"])

    def save_and_die(self: Checkpointer) -> None:
        save(self)
        calls.append(self.setup.sparsifier.clock.step)
        if calls.count(wanted) == 2:
            os.kill(os.getpid(), 9)

    Checkpointer.save = save_and_die  # type: ignore[method-assign]


def newest_whole(folder: Path) -> int:
    """Return the step of the newest whole checkpoint, 0 if there is none."""
    for path in reversed(checkpoint.list_checkpoints(folder / "checkpoints")):
        try:
            checkpoint.load(path)
        except Exception:
            continue
        return int(path.name[5:])
    return 0


def differences(folder: Path, expected: Path) -> list[str]:
    """Return how the results of a finished run differ from those of an undisturbed one."""
    found = []
    if read(folder / "model.safetensors") != read(expected / "model.safetensors"):
        found.append("model.safetensors differs")
    rows, wanted = metrics(folder), metrics(expected)
    if [row.get("epoch") for row in rows] != [row.get("epoch") for row in wanted]:
        found.append(f"metrics.jsonl has epochs {[row.get('epoch') for row in rows]}")
    elif differing := {f"{key} of epoch {b['epoch']}" for a, b in zip(rows, wanted) for key in b if a.get(key) != b[key]}:
        found.append(f"metrics.jsonl differs: {', '.join(sorted(differing))}")
    ours, theirs = (without(json.loads(read(f / "summary.json") or b"{}"), VARYING) for f in (folder, expected))
    if ours != theirs:
        found.append(f"summary.json differs in {[key for key in theirs if ours.get(key) != theirs[key]]}")
    return found


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run, without times and checksums."""
    lines = read(folder / "metrics.jsonl").decode(errors="replace").splitlines()
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError:
        return [{"epoch": "unreadable"}]
    return [without(row.get("row", row), (*TIMES, "checksum", "sha256", "chain")) for row in rows]


def without(mapping: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


def read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def copy(source: Path, target: Path) -> Path:
    """Replace `target` with a copy of `source`; if there is no `source`, only remove `target`."""
    if target.exists():
        shutil.rmtree(target)
    if source.exists():
        shutil.copytree(source, target)
    return target


def finish(folder: Path, method: str, expected: Path, epochs: int = EPOCHS) -> list[str]:
    """Give the same command again. Return what is wrong with the result."""
    done: Outcome = optg(*training(folder, method, epochs))
    if done.status != 0:
        return [f"the same command fails afterwards: {done.status} {done.text[-300:]}"]
    return differences(folder, expected)
