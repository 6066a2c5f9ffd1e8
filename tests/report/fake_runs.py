"""Run folders as `optg train` writes them, made without training: smooth curves that differ by method and seed."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from optg.files import fingerprint
from optg.report.figures import RunGroup, make_run_group
from optg.report.runs import group_runs, read_runs
from optg.training.manifest import Manifest
from optg.training.metrics import METRICS, as_text, chain, read_rows
from optg.training.recipe import Plan, Recipe, dump

LAYERS = {"features.0.weight": (8, 3, 3, 3), "features.10.weight": (16, 8, 3, 3), "classifier.weight": (10, 16)}
SIZE = sum(math.prod(shape) for shape in LAYERS.values())


def make_recipe(**settings: Any) -> Recipe:
    return Recipe(**{"model": "vgg19", "data": "cifar10", "epochs": 12, "sparsity": 0.95, **settings})


def make_summary(method: str = "optg", accuracy: float = 0.93, command: str = "", **settings: Any) -> dict[str, Any]:
    recipe = make_recipe(**settings)
    kept = 1 - recipe.sparsity
    return {
        "recipe": "fake", "settings": asdict(recipe), "classes": 10, "shape": [3, 32, 32], "method": method,
        "options": {"alpha": None} if method == "optg" else {}, "accuracy": accuracy, "sparsity": recipe.sparsity,
        "parameters": 20035018, "nonzero": round(20035018 * kept), "flops": round(398136320 * kept), "dense_flops": 398136320,
        "seconds": 151.8, "hardware": "NVIDIA H200", "versions": {"optg": "0.1.0", "torch": "2.11.0", "python": "3.12.3"},
        "revision": "0e60166a1250a122a061a1520bb1d72c79d56bc9", "command": command or f"optg train --method {method}",
    }  # fmt: skip


def make_row(epoch: int, recipe: Recipe, method: str, accuracy: float) -> dict[str, Any]:
    done = epoch / recipe.epochs
    zeros = {name: round(recipe.sparsity * done * math.prod(shape)) for name, shape in LAYERS.items()}
    rate = recipe.lr * (1 + math.cos(math.pi * done)) / 2
    return {
        "step": 10 * epoch, "epoch": epoch, "loss": 2.3 * math.exp(-4 * done), "test_loss": 2.3 * math.exp(-3 * done),
        "accuracy": accuracy * (1 - 0.8 * math.exp(-6 * done)), "sparsity": recipe.sparsity * done, "lr": rate, "seconds": 1.5,
        "images_per_second": 5e4, "removed": 100 * epoch, "revived": 10 * (epoch % 3),
        **({"score_lr": rate * done} if method == "optg" else {}),
        "layers": {name: [count, 7, 3] for name, count in zeros.items()},
    }  # fmt: skip


def write_run(
    path: Path, method: str = "optg", accuracy: float = 0.93, *, finished: bool = True, old: bool = False, **settings: Any
) -> Path:
    """Write the folder of a run.

    Args:
        finished: False for a run that was stopped after half of its epochs.
        old: leave out what earlier versions did not record, checksums included.
    """
    recipe = make_recipe(**settings)
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(dump(Plan(recipe, method)))
    rows = [
        make_row(epoch, recipe, method, accuracy) for epoch in range(1, (recipe.epochs if finished else recipe.epochs // 2) + 1)
    ]
    for values in rows if old else []:
        for key in ("score_lr", "layers", "removed", "revived"):
            values.pop(key, None)
    (path / "metrics.jsonl").write_bytes(as_text(rows if old else chain(rows)))
    if finished:
        known = make_summary(method, accuracy, f"optg train --method {method} --output {path.name}", **settings)
        (path / "summary.json").write_text(json.dumps(known, indent=2))
        random = np.random.default_rng(0)
        tensors = {name: random.random(shape, dtype=np.float32) + 0.5 for name, shape in LAYERS.items()}
        for tensor in tensors.values():
            tensor.flat[: round(recipe.sparsity * tensor.size)] = 0.0
            tensor.flat[: round(recipe.sparsity * tensor.size) : 2] = -0.0
        save_file({**tensors, "classifier.bias": np.zeros(10, np.float32)}, path / "model.safetensors")
    if not old:
        list_files(path)
    return path


def list_files(path: Path) -> None:
    """Write the manifest of a run folder as it is now."""
    names = [name for name in ("recipe.toml", "summary.json", "model.safetensors") if (path / name).exists()]
    head = read_rows(path / METRICS).head if "summary.json" in names else None
    Manifest({name: fingerprint(path / name) for name in names}, head).write(path)


def make_old(path: Path) -> Path:
    """Remove the manifest and the checksums of a run folder, as if an older version had written it."""
    (path / "manifest.json").unlink()
    rows = [json.loads(line) for line in (path / METRICS).read_text().splitlines()]
    (path / METRICS).write_bytes(as_text([{k: v for k, v in row.items() if k != "checksum"} for row in rows]))
    return path


def write_forty_runs(path: Path) -> Path:
    """Write runs of ten methods at four sparsities, with long and hostile names."""
    for i, method in enumerate(("dense", "optg", "gmp", "rigl", "granet", "set", "str", "snip", "grasp", "feather")):
        for j, sparsity in enumerate((0.9, 0.95, 0.98, 0.99)):
            name = f"{method}-{j}" if i % 2 else f"<script>alert({i})</script>-{method}-{j}-{'long' * 12}"
            write_run(path / name.replace("/", "∕"), method, 0.94 - 0.004 * i * (j + 1) * (j > 0) - 0.01 * j,
                sparsity=0.0 if method == "dense" else sparsity, seed=j, old=j == 3)  # fmt: skip
    return path


def read_group(path: Path) -> RunGroup:
    """Return the one group of runs in a folder."""
    ((task, runs),) = group_runs(read_runs([path])).items()
    return make_run_group(*task, runs)
