"""Measure what int8 costs trained runs in accuracy, on all test images, in optg's engine.

    python benchmarks/int8_accuracy.py runs/reproduce/*            # appends a line per run to int8-accuracy.jsonl
    python benchmarks/int8_accuracy.py *.optg --folder DATA        # the same for packed files of runs of optg's own recipes
    python benchmarks/int8_accuracy.py --table                     # prints means over seeds

Each run is compiled in float32 and in int8. A run trained with `--quantize int8` uses the ranges of its training, any other is
calibrated on 512 training images, as `optg export --values int8` does. Runs that the file holds already are not repeated.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import optg
from optg.deploy.calibration import BATCH as CALIBRATED_AT_ONCE
from optg.deploy.calibration import calibration_images
from optg.deploy.export import export, load_data
from optg.training import recipe as recipes
from optg.training.recipe import Recipe
from optg.training.saved import SavedRun

BATCH = 32


def accuracy(model: nn.Module, settings: Recipe, shape: tuple[int, ...]) -> float:
    """Return the percentage of the test images that the compiled model classifies correctly."""
    data = load_data(settings, BATCH)
    fast = optg.compile(model, torch.zeros(BATCH, *shape))
    correct = sum(int((fast(images).argmax(1) == labels).sum()) for images, labels in data.test())
    return 100 * correct / data.sizes[1]


def measure(path: Path, folder: str | None) -> dict[str, Any]:
    """Return the accuracies of a run or packed file, and what they depend on."""
    elsewhere = {"folder": folder} if folder else {}
    if path.is_dir():
        saved = SavedRun.open(path)
        settings, method, shape = replace(saved.plan.recipe, **elsewhere), saved.plan.method, saved.shape
        sparsity = settings.sparsity
        model = saved.model().eval()
        with tempfile.TemporaryDirectory() as made:
            export(path, "packed", Path(made) / "model.optg", "int8")
            quantized = optg.load(Path(made) / "model.optg")
        ranges = quantized.about.origin.get("ranges", "calibrated")
    else:
        model = optg.load(path)
        origin, shape, ranges = model.about.origin, model.about.shape, "calibrated"
        method, sparsity = origin["method"], round(origin["sparsity"], 4)
        settings = recipes.load(f"{origin['model']}-{origin['data']}").recipe
        settings = replace(settings, seed=origin["seed"], **elsewhere)
        quantized = optg.quantize(model, calibration_images(settings).split(CALIBRATED_AT_ONCE))
    return {
        "run": path.name,
        "model": settings.model,
        "data": settings.data,
        "method": method,
        "sparsity": sparsity,
        "seed": settings.seed,
        "ranges": ranges,
        "float32": accuracy(model, settings, shape),
        "int8": accuracy(quantized, settings, shape),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the means over seeds, and the mean difference with its standard error."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["model"], row["data"], row["method"], row["sparsity"], row["ranges"]].append(row)
    lines = ["| model | data | method | sparsity | ranges | seeds | float32 | int8 | difference |", f"|{' --- |' * 9}"]
    for key, runs in sorted(groups.items()):
        differences = [run["int8"] - run["float32"] for run in runs]
        error = f" ± {statistics.stdev(differences) / len(runs) ** 0.5:.2f}" if len(runs) > 1 else ""
        means = [statistics.mean(run[name] for run in runs) for name in ("float32", "int8")]
        cells = [*map(str, key), str(len(runs)), *(f"{mean:.2f}" for mean in means)]
        lines.append(f"| {' | '.join(cells)} | {statistics.mean(differences):+.2f}{error} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of finished runs, or packed files in float32")
    parser.add_argument("--folder", help="folder of the dataset; by default the recipe's")
    parser.add_argument("--output", type=Path, default=Path("int8-accuracy.jsonl"), help="file of the results")
    parser.add_argument("--table", action="store_true", help="print the table of the file")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.output.read_text().splitlines()] if args.output.exists() else []
    known = {row["run"] for row in rows}
    for path in args.runs:
        if path.name in known or not (path.suffix == ".optg" or (path / "summary.json").exists()):
            continue
        row = measure(path, args.folder)
        rows.append(row)
        with args.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['run']}: float32 {row['float32']:.2f} %, int8 {row['int8']:.2f} % ({row['ranges']} ranges)", flush=True)
    if args.table:
        print(table(rows))


if __name__ == "__main__":
    main()
