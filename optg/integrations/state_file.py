"""A sparsifier's state in one safetensors file: tensors by "kind/name", plain values as JSON in its header."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from optg.core.prunable import parameters_by_name
from optg.files import atomic_write


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, gathered from all processes if it is split. Its memory is its own."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().clone().contiguous()


def write_state(path: Path, saved: dict[str, Any], write: bool = True) -> None:
    """Write a callback's state. All processes call this, because split tensors are gathered; one of them writes."""
    kinds = saved["sparsifier"]["tensors"]
    tensors = {f"{kind}/{name}": whole(tensor) for kind, layers in kinds.items() for name, tensor in layers.items()}
    values = {**saved, "sparsifier": {key: v for key, v in saved["sparsifier"].items() if key != "tensors"}, "kinds": [*kinds]}
    if write:
        with atomic_write(path) as partial:
            save_file(tensors, partial, {"optg": json.dumps(values)})
            partial.chmod(0o644)  # safetensors makes files that only their owner may read


def read_state(path: Path) -> dict[str, Any] | None:
    """Return what `write_state` wrote, or None if there is no such file."""
    if not path.exists():
        return None
    try:
        opened = safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): resume from another checkpoint") from error
    with opened as file:
        saved = json.loads(file.metadata()["optg"])
        tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in saved.pop("kinds")}
        for key in file.keys():  # noqa: SIM118  # not a dict
            kind, _, name = key.partition("/")
            tensors[kind][name] = file.get_tensor(key)
    saved["sparsifier"]["tensors"] = tensors
    return saved


@torch.no_grad()
def fingerprint(model: nn.Module, names: Iterable[str]) -> str:
    """Return a hash of these parameters' values."""
    parameters, digest = parameters_by_name(model), hashlib.sha256()
    for name in sorted(names):
        values = whole(parameters[name]) if name in parameters else torch.empty(0)
        digest.update(values.view(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b"")
    return digest.hexdigest()
