"""Checkpoints: tensors in safetensors, plain values in JSON, both with checksums. Loading one never runs code.

A checkpoint is a folder `step-000000123` that appears whole or not at all: its files are written and synced under a temporary
name, then the folder is renamed. Masks are stored as bits. Only what fails its checksum, cannot be parsed or lacks a file is
damaged; any other error of reading is raised, and nothing is touched.
"""

import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optg.files import (
    Fingerprint,
    HashedFile,
    create,
    exists,
    fingerprint,
    free_name,
    is_real_folder,
    list_names,
    naming,
    read_bytes,
    set_aside,
    sync,
)
from optg.training.errors import DamagedFile
from optg.training.tensors import read_tensors, write_tensors

TENSORS, VALUES = "tensors.safetensors", "values.json"
NAME, PARTIAL = re.compile(r"step-(\d{9,})"), re.compile(r"\.partial-\d+(-\d+)?")


def save(folder: Path, step: int, tensors: dict[str, Tensor], values: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint, then delete earlier ones until `keep` are left. A whole checkpoint of this step stays as it is."""
    folder.mkdir(exist_ok=True)
    delete_leftovers(folder)
    final = folder / f"step-{step:09d}"
    if final in list_checkpoints(folder) and is_whole(final):
        return final
    partial = free_name(folder / f".partial-{step}")
    try:
        partial.mkdir()
        write(partial, step, tensors, values)
        if exists(final) and not (is_real_folder(final) and not list_names(final)):
            set_aside(final)  # damaged, or not ours
        os.rename(partial, final)
        sync(folder)
    except BaseException:
        with suppress(OSError):
            delete(partial)
        raise
    earlier = [path for path in list_checkpoints(folder) if step_of(path) <= step]
    for path in earlier[:-keep]:
        delete(path)
    return final


def write(path: Path, step: int, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Write the files of a checkpoint into an empty folder, and sync them."""
    shapes = {name: list(t.shape) for name, t in tensors.items() if t.dtype == torch.bool}
    with naming(path / TENSORS), create(path / TENSORS) as file:
        hashed = HashedFile(file)
        write_tensors(hashed, {name: pack_bits(t) if t.dtype == torch.bool else t for name, t in tensors.items()})
    body = {"step": step, "values": values, "masks": shapes, "sha256": hashed.fingerprint.sha256}
    text = json.dumps(body, sort_keys=True)
    with naming(path / VALUES), create(path / VALUES) as file:
        file.write(json.dumps({"checksum": checksum(text), "body": text}).encode())
    for name in (path / TENSORS, path / VALUES, path):
        sync(name)


def load_newest(folder: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]] | None:
    """Return the newest whole checkpoint as (path, tensors, values), None if there is no checkpoint.

    Warn about damaged ones and skip them; raise DamagedFile if all are damaged.
    """
    saved, reasons = list_checkpoints(folder), []
    for path in reversed(saved):
        try:
            found = path, *load(path)
        except DamagedFile as error:
            reasons.append(f"checkpoint {path.name} is damaged ({error})")
            continue
        for reason in reasons:
            warnings.warn(f"{reason}; using {path.name} instead", stacklevel=2)
        return found
    if reasons:
        raise DamagedFile(f"no checkpoint in {folder} is whole: {'; '.join(reasons)}")
    return None


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and values of a checkpoint, or raise DamagedFile."""
    body = read_values(path)
    with expecting(path / TENSORS):
        tensors, found = read_tensors(path / TENSORS)
    require_checksum(found, body)
    masks = body["masks"]
    try:
        unpacked = {name: unpack_bits(t, masks[name]) if name in masks else t for name, t in tensors.items()}
    except (ValueError, TypeError, RuntimeError) as error:
        raise DamagedFile(f"{VALUES} does not describe the masks in {TENSORS}: {error}") from None
    return unpacked, body["values"]


def read_values(path: Path) -> dict[str, Any]:
    """Return the body of values.json: step, values, shapes of the masks and the checksum of the tensors."""
    with expecting(path / VALUES):
        data = read_bytes(path / VALUES)
    try:
        outer = json.loads(data)
        if checksum(outer["body"]) != outer["checksum"]:
            raise DamagedFile(f"the checksum of {VALUES} is wrong")
        body = json.loads(outer["body"])
        if not all(isinstance(body[key], kind) for key, kind in (("masks", dict), ("values", dict), ("sha256", str))):
            raise DamagedFile(f"{VALUES} lacks masks, values or the checksum of {TENSORS}")
    except DamagedFile:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{VALUES} cannot be parsed: {type(error).__name__}: {error}") from None
    return body


def check(path: Path) -> dict[str, Any]:
    """Return the values of a checkpoint without loading its tensors, or raise DamagedFile."""
    body = read_values(path)
    with expecting(path / TENSORS):
        require_checksum(fingerprint(path / TENSORS), body)
    return body["values"]


def require_checksum(found: Fingerprint, body: dict[str, Any]) -> None:
    if found.sha256 != body["sha256"]:
        raise DamagedFile(f"the checksum of {TENSORS} is wrong")


@contextmanager
def expecting(path: Path) -> Iterator[None]:
    """Treat a missing file as damage."""
    try:
        yield
    except FileNotFoundError:
        raise DamagedFile(f"{path.name} is missing") from None


def is_whole(path: Path) -> bool:
    try:
        check(path)
    except DamagedFile:
        return False
    return True


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints in a folder, oldest first, damaged ones included. Folders without our files do not count."""
    named = [folder / name for name in list_names(folder) if NAME.fullmatch(name)]
    ours = [path for path in named if is_real_folder(path) and {TENSORS, VALUES}.intersection(list_names(path))]
    return sorted(ours, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def set_aside_after(path: Path) -> list[Path]:
    """Rename the checkpoints after this one to `NAME.damaged`. Return their new paths."""
    return [set_aside(other) for other in list_checkpoints(path.parent) if step_of(other) > step_of(path)]


def delete_leftovers(folder: Path) -> None:
    """Delete what processes left that died while they wrote or deleted a checkpoint."""
    for path in [folder / name for name in list_names(folder) if PARTIAL.fullmatch(name)]:
        with suppress(OSError):  # junk must not make every save fail
            delete(path)


def is_ours(path: Path) -> bool:
    """Return whether this is a folder, and not a link to one, that contains no file but those of a checkpoint."""
    return is_real_folder(path) and {TENSORS, VALUES}.issuperset(list_names(path))


def delete(path: Path) -> None:
    """Delete the folder of a checkpoint, unless it is a link or contains a file that is not ours.

    It gets another name first, so that a kill leaves no half of a checkpoint.
    """
    if not is_ours(path):
        return
    if NAME.fullmatch(path.name):
        doomed = free_name(path.with_name(f".partial-{step_of(path)}"))
        os.rename(path, doomed)
        path = doomed
    for name in list_names(path):
        (path / name).unlink()
    path.rmdir()


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a boolean mask into bytes of eight."""
    return torch.from_numpy(np.packbits(mask.detach().cpu().numpy().reshape(-1)))


def unpack_bits(packed: Tensor, shape: list[int]) -> Tensor:
    """Undo `pack_bits`."""
    if packed.numel() != -(-math.prod(shape) // 8):
        raise ValueError(f"a mask of shape {shape} has {packed.numel()} bytes")
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=math.prod(shape)).astype(bool)).reshape(shape)


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
