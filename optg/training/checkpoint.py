"""Checkpoints: tensors in safetensors, plain values in JSON, each with a checksum. Nothing in them can run code.

A checkpoint is a folder `step-000000123` that appears whole or not at all: its files are written and synced under another
name, and the folder is renamed at the end. Masks are stored as bits.
"""

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from optg.files import sync

TENSORS, VALUES = "tensors.safetensors", "values.json"
PARTIAL = ".partial-"


class Damaged(Exception):
    """A checkpoint whose bytes are not those that were written."""


def save(folder: Path, step: int, tensors: dict[str, Tensor], values: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint, then remove those of later steps, which were damaged, and all but the last `keep`."""
    folder.mkdir(exist_ok=True)
    for left in folder.glob(f"{PARTIAL}*"):  # of a run that died while writing
        shutil.rmtree(left)
    partial, final = folder / f"{PARTIAL}{step}", folder / f"step-{step:09d}"
    try:
        partial.mkdir()
        packed = {name: pack(t) if t.dtype == torch.bool else t.detach().cpu().contiguous() for name, t in tensors.items()}
        shapes = {name: list(t.shape) for name, t in tensors.items() if t.dtype == torch.bool}
        write_tensors(partial / TENSORS, packed)
        body = {"step": step, "values": values, "masks": shapes, "sha256": digest(partial / TENSORS)}
        text = json.dumps(body, sort_keys=True)
        (partial / VALUES).write_text(json.dumps({"checksum": hashlib.sha256(text.encode()).hexdigest(), "body": text}))
        sync(partial / VALUES)
        sync(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        sync(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    steps = list_steps(folder)
    here = steps.index(final) + 1
    for other in [*steps[: max(0, here - keep)], *steps[here:]]:
        shutil.rmtree(other)
    return final


def load_newest(folder: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that is whole; damaged ones are named in a warning and passed over."""
    steps = list_steps(folder)
    for path in reversed(steps):
        try:
            return path, *load(path)
        except Damaged as error:
            instead = "taking the one before" if path != steps[0] else "there is none before: training begins anew"
            warnings.warn(f"checkpoint {path.name} is damaged ({error}); {instead}", stacklevel=2)
    return None


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and values of a checkpoint, or Damaged."""
    try:
        outer = json.loads((path / VALUES).read_text())
        text = outer["body"]
        if hashlib.sha256(text.encode()).hexdigest() != outer["checksum"]:
            raise Damaged(f"{VALUES} has another checksum")
        body = json.loads(text)
        if digest(path / TENSORS) != body["sha256"]:
            raise Damaged(f"{TENSORS} has another checksum")
        tensors = load_file(path / TENSORS)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from None
    return {n: unpack(t, body["masks"][n]) if n in body["masks"] else t for n, t in tensors.items()}, body["values"]


def list_steps(folder: Path) -> list[Path]:
    """All checkpoints of a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def is_checkpoint(path: Path) -> bool:
    """Does it look like one, perhaps damaged?"""
    return path.is_dir() and path.resolve().name.startswith("step-")


def pack(mask: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask.detach().cpu().numpy().reshape(-1)))


def unpack(bits: Tensor, shape: list[int]) -> Tensor:
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=int(np.prod(shape))).astype(bool)).reshape(shape)


def write_tensors(path: Path, tensors: dict[str, Tensor], facts: dict[str, str] | None = None) -> None:
    """One safetensors file, on the disk when this returns, for whoever may read new files."""
    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(separate(tensors), path, facts)
        path.chmod(mode)
    except SafetensorError as error:  # a full disk, for one
        raise OSError(f"{path} could not be written: {error}") from None
    sync(path)


def separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses two names for one memory: give each its own."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.untyped_storage().data_ptr() in seen:
            tensors[name] = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
    return tensors


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
