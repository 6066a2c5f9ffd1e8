"""The density of each layer at a run's end: from its last cut, or counted from its weights where no cut was recorded."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from optg.report.markup import is_number
from optg.report.runs import Run
from optg.training.recipe import RecipeError


def densities(run: Run) -> dict[str, float]:
    """The share of weights that each layer has left. Empty where nothing of it was recorded."""
    file, prefix = weights_file(run)
    tensors = read_header(file, prefix) if file else {}
    cut = run.rows[-1].get("layers") if run.rows else None
    if isinstance(cut, dict) and cut:
        sizes = {name: math.prod(entry["shape"]) for name, entry in tensors.items()} if file else sizes_by_name(run)
        kept = {name: 1 - counts[0] / sizes[name] for name, counts in cut.items() if name in sizes and is_counts(counts)}
        return kept  # in the order of the model
    return {name: nonzero(file, entry) for name, entry in sorted(tensors.items(), key=by_number)} if file else {}


def is_counts(counts: Any) -> bool:
    return isinstance(counts, list) and bool(counts) and is_number(counts[0])


def by_number(item: tuple[str, Any]) -> list[tuple[int, str]]:
    """So that layer 2 comes before layer 10. A file of weights has forgotten the order of the model."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", item[0])]


def weights_file(run: Run) -> tuple[Path | None, str]:
    """The model of a run that ended; else that of its newest checkpoint, where names have a prefix."""
    if run.folder is None:
        return None, ""
    if (run.folder / "model.safetensors").is_file():
        return run.folder / "model.safetensors", ""
    kept = sorted(run.folder.glob("checkpoints/step-*/tensors.safetensors"))
    return (kept[-1], "model.") if kept else (None, "")


def sizes_by_name(run: Run) -> dict[str, int]:
    """Layers of a model of ours, where a run's weights were not kept: the model is built without memory for its weights."""
    import torch

    from optg.models import MODELS, build

    name, classes = run.settings["model"], run.summary.get("classes")
    if name not in MODELS or not isinstance(classes, int):
        return {}
    with torch.device("meta"):
        return {name: p.numel() for name, p in build(name, classes).named_parameters()}


def read_header(file: Path, prefix: str) -> dict[str, dict[str, Any]]:
    """Shape, type and place of each weight in a safetensors file."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header: Any = json.loads(opened.read(length)) if length < file.stat().st_size else None
            return {
                name.removeprefix(prefix): {**entry, "start": 8 + length + entry["data_offsets"][0]}
                for name, entry in header.items()
                if name.startswith(prefix)
                and entry.get("dtype") in BITS
                and len(entry["shape"]) >= 2
                and math.prod(entry["shape"])
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
    raise RecipeError(f"{file} is damaged: it does not begin as a safetensors file does")


BITS = {"F64": np.uint64, "F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}


def nonzero(file: Path, entry: dict[str, Any]) -> float:
    """The share of a tensor that is neither 0.0 nor −0.0: whose bits, but for the sign, are not all 0."""
    kind, size = BITS[entry["dtype"]], math.prod(entry["shape"])
    bits = np.fromfile(file, dtype=kind, count=size, offset=entry["start"])
    if len(bits) < size:
        raise RecipeError(f"{file} is damaged: it ends before its last weight")
    return int(np.count_nonzero(bits << kind(1))) / size
