"""Packed files: whole networks round-trip exactly, and writing is atomic."""

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import optg
from optg.deploy.graph import capture
from optg.deploy.packed import About, PackedError, pack, unpack, write_packed
from optg.deploy.packed.file import MAGIC, PREFIX, VERSION
from optg.deploy.packed.tensors import same_bits
from tests.deploy.nets import SHAPES, Odd, captured, sparse
from tests.deploy.packed.examples import ABOUT, graph_with


@pytest.mark.parametrize("name", [n for n in SHAPES if n != "resnet20"])
def test_whole_networks_round_trip_exactly(name: str, tmp_path: Path) -> None:
    model, path = sparse(name), tmp_path / "model.optg"
    size = write_packed(path, captured(name), About(name, 10, SHAPES[name]))
    loaded = optg.load(path)
    state, found = model.state_dict(), loaded.state_dict()
    assert list(state) == list(found) and all(same_bits(state[key], found[key]) for key in state)
    assert size == path.stat().st_size and os.listdir(tmp_path) == ["model.optg"]
    images = torch.randn(4, *SHAPES[name])
    with torch.no_grad():
        expected, outputs = model(images), loaded(images)
    assert torch.equal(outputs.argmax(1), expected.argmax(1))
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


def test_network_with_unusual_layers_round_trips() -> None:
    model = Odd().eval()
    loaded = unpack(pack(capture(model, torch.randn(1, 3, 6, 6)), ABOUT))
    assert set(loaded.state_dict()) == set(model.state_dict())
    assert loaded.get_parameter("second.weight") is loaded.get_parameter("first.weight")
    images = torch.randn(3, 3, 6, 6)
    with torch.no_grad():
        found, expected = loaded(images), model(images)
    assert torch.equal(found["logits"], expected["logits"]) and torch.equal(found["more"][0], expected["more"][0])
    assert found["more"][1] == expected["more"][1] == 6
    assert loaded.about == ABOUT


def test_vgg19_at_98_percent_is_small_and_loads_within_a_second(tmp_path: Path) -> None:
    graph, path = captured("vgg19"), tmp_path / "vgg19.optg"
    dense = sum(t.numel() * t.element_size() for t in graph.tensors.values())
    for values, share in (("float32", 0.026), ("bfloat16", 0.016)):
        assert write_packed(path, graph, About("vgg19", 10, (3, 32, 32)), values) < share * dense  # required: 0.04
    timed = "import time, optg.deploy.packed as p; t = time.process_time(); p.load({!r}); print(time.process_time() - t)"
    fresh = subprocess.run([sys.executable, "-c", timed.format(str(path))], capture_output=True, text=True, check=True)
    assert float(fresh.stdout) < 1


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.optg"
    write_packed(path, graph_with(t=torch.ones(3)), ABOUT)
    before = path.read_bytes()

    def disk_full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("optg.files.sync", disk_full)
    with pytest.raises(OSError, match="no space"):
        write_packed(path, graph_with(t=torch.zeros(3)), ABOUT)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["m.optg"]


def test_sparse_tensor_is_refused_when_writing() -> None:
    with pytest.raises(PackedError, match="dense tensors of numbers"):
        pack(graph_with(t=torch.eye(3).to_sparse()), ABOUT)


def test_a_full_disk_is_reported_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as the system call does, without a path

    with monkeypatch.context() as patch, pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/m.optg'"):
        patch.setattr(Path, "write_bytes", write)
        write_packed(tmp_path / "m.optg", graph_with(t=torch.eye(3)), ABOUT)
    assert os.listdir(tmp_path) == []


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("fifo", "link"):  # one would block, the other never end
        with pytest.raises(OSError, match="Not a regular file"):
            optg.load(tmp_path / name)


def test_files_of_other_formats_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"PK\x03\x04", MAGIC, MAGIC + b"\0" * 100, os.urandom(1000)):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(PackedError, match=f"{tmp_path}/x: "):
            optg.load(tmp_path / "x")
    with pytest.raises(PackedError, match="is a folder"):
        optg.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        optg.load(tmp_path / "nothing")
    later = PREFIX.pack(MAGIC, VERSION + 1, 2, hashlib.sha256(b"{}").digest()) + b"{}"
    with pytest.raises(PackedError, match=f"has version {VERSION + 1}; this optg reads version {VERSION}"):
        unpack(later)
