"""Checkpoints: tensors in safetensors, plain values in JSON, both with checksums. Loading one never runs code.

A checkpoint is a folder `step-000000123` that appears whole or not at all: its files are written and synced under a temporary
name, then the folder is renamed. Masks are stored as bits.
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


class DamagedCheckpoint(Exception):
    """The files of a checkpoint are missing, unreadable or not what was written."""


def save(folder: Path, step: int, tensors: dict[str, Tensor], values: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint, then delete all but the last `keep`.

    Checkpoints of later steps are deleted too: they exist only if they were damaged and training resumed before them.
    """
    folder.mkdir(exist_ok=True)
    for leftover in folder.glob(f"{PARTIAL}*"):  # from a process that died while writing
        shutil.rmtree(leftover)
    partial, final = folder / f"{PARTIAL}{step}", folder / f"step-{step:09d}"
    try:
        partial.mkdir()
        packed = {name: pack_bits(t) if t.dtype == torch.bool else t.detach().cpu().contiguous() for name, t in tensors.items()}
        shapes = {name: list(t.shape) for name, t in tensors.items() if t.dtype == torch.bool}
        write_tensors(partial / TENSORS, packed)
        body = {"step": step, "values": values, "masks": shapes, "sha256": sha256(partial / TENSORS)}
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
    saved = list_checkpoints(folder)
    end = saved.index(final) + 1
    for other in [*saved[: max(0, end - keep)], *saved[end:]]:
        shutil.rmtree(other)
    return final


def load_newest(folder: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]] | None:
    """Return the newest intact checkpoint as (path, tensors, values). Warn about damaged ones and skip them."""
    saved = list_checkpoints(folder)
    for path in reversed(saved):
        try:
            return path, *load(path)
        except DamagedCheckpoint as error:
            instead = "using the previous one" if path != saved[0] else "there is no older one, so training starts over"
            warnings.warn(f"checkpoint {path.name} is damaged ({error}); {instead}", stacklevel=2)
    return None


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and values of a checkpoint, or raise DamagedCheckpoint."""
    try:
        outer = json.loads((path / VALUES).read_text())
        text = outer["body"]
        if hashlib.sha256(text.encode()).hexdigest() != outer["checksum"]:
            raise DamagedCheckpoint(f"the checksum of {VALUES} is wrong")
        body = json.loads(text)
        if sha256(path / TENSORS) != body["sha256"]:
            raise DamagedCheckpoint(f"the checksum of {TENSORS} is wrong")
        tensors = load_file(path / TENSORS)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{type(error).__name__}: {error}") from None
    masks = body["masks"]
    return {name: unpack_bits(t, masks[name]) if name in masks else t for name, t in tensors.items()}, body["values"]


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints in a folder, oldest first, damaged ones included."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a boolean mask into bytes of eight."""
    return torch.from_numpy(np.packbits(mask.detach().cpu().numpy().reshape(-1)))


def unpack_bits(packed: Tensor, shape: list[int]) -> Tensor:
    """Undo `pack_bits`."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=int(np.prod(shape))).astype(bool)).reshape(shape)


def write_tensors(path: Path, tensors: dict[str, Tensor], facts: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the usual file permissions, and sync it to disk."""
    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(without_shared_memory(tensors), path, facts)
        path.chmod(mode)  # safetensors makes files that only their owner may read
    except SafetensorError as error:  # for example a full disk
        raise OSError(f"{path} could not be written: {error}") from None
    sync(path)


def without_shared_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory with an earlier one, in place in the dict: safetensors refuses them."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.untyped_storage().data_ptr() in seen:
            tensors[name] = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
    return tensors


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
