"""The density of each layer at the end of a run: from its last recorded cut, or else counted in its weights."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from optg.report.markup import is_number
from optg.report.runs import RunRecord, parse_json
from optg.training.checkpoint import TENSORS, list_checkpoints
from optg.training.manifest import MODEL
from optg.training.recipe import RecipeError


def layer_densities(run: RunRecord) -> dict[str, float]:
    """Return the share of nonzero weights of each layer, or an empty dict if nothing was recorded."""
    file, prefix = weights_file(run)
    tensors = read_header(file, prefix) if file else {}
    cut = run.rows[-1].get("layers") if run.rows else None
    if isinstance(cut, dict) and cut:
        sizes = {name: math.prod(entry["shape"]) for name, entry in tensors.items()} if file else sizes_of_model(run)
        # In the order of the model.
        return {name: 1 - counts[0] / sizes[name] for name, counts in cut.items() if name in sizes and is_counts(counts)}
    return {name: nonzero_share(file, entry) for name, entry in sorted(tensors.items(), key=by_number)} if file else {}


def is_counts(counts: Any) -> bool:
    return isinstance(counts, list) and bool(counts) and is_number(counts[0])


def by_number(item: tuple[str, Any]) -> list[tuple[int, str]]:
    """Sort key that puts layer 2 before layer 10, as a file of weights does not keep the order of the model."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", item[0])]


def weights_file(run: RunRecord) -> tuple[Path | None, str]:
    """Return the weights of a finished run, or else its newest checkpoint, and the prefix of names in that file."""
    if run.files is None:
        return None, ""
    if run.files.has(MODEL):
        return run.files.path / MODEL, ""
    checkpoints = list_checkpoints(run.files.path / "checkpoints")
    return (checkpoints[-1] / TENSORS, "model.") if checkpoints else (None, "")


def sizes_of_model(run: RunRecord) -> dict[str, int]:
    """Return the size of each layer of a built-in model, for runs without weights. Building it on meta takes no memory."""
    import torch

    from optg.models import MODELS, build

    name, classes = run.settings["model"], run.summary.get("classes")
    if name not in MODELS or not isinstance(classes, int):
        return {}
    with torch.device("meta"):
        return {name: p.numel() for name, p in build(name, classes, run.settings.get("model_options")).named_parameters()}


def read_header(file: Path, prefix: str) -> dict[str, dict[str, Any]]:
    """Return shape, type and offset of each weight in a safetensors file."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header: Any = parse_json(opened.read(length), str(file)) if length < file.stat().st_size else None
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
    raise RecipeError(f"{file} is damaged: it has no safetensors header")


BITS = {"F64": np.uint64, "F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}


def nonzero_share(file: Path, entry: dict[str, Any]) -> float:
    """Return the share of a tensor that is neither 0.0 nor −0.0: any bit but the sign is set."""
    kind, size = BITS[entry["dtype"]], math.prod(entry["shape"])
    bits = np.fromfile(file, dtype=kind, count=size, offset=entry["start"])
    if len(bits) < size:
        raise RecipeError(f"{file} is damaged: it ends before its last weight")
    return int(np.count_nonzero(bits << kind(1))) / size
