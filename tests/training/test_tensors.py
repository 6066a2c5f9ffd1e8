import json
import random

import pytest
import safetensors.torch
import torch

from optg.files import Fingerprint, atomic_file
from optg.training.errors import DamagedFile
from optg.training.tensors import DTYPES, read_tensors, write_tensors


def examples() -> dict[str, torch.Tensor]:
    """Return tensors of every type, of several shapes, some of them not contiguous or sharing memory."""
    g = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.{short}": torch.randint(0, 2, (3, size), generator=g).to(dtype)
        for size, (short, dtype) in enumerate(DTYPES.items(), 1)
        for name in ("z", "ä")
    }
    image = torch.randn(2, 3, 4, 4, generator=g)
    shared = torch.randn(6, generator=g)
    odd = {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "last": image.to(memory_format=torch.channels_last)}
    return tensors | odd | {"a": shared[:4], "b": shared[2:]}


def write(path, tensors, facts=None) -> Fingerprint:
    with atomic_file(path) as file:
        write_tensors(file, tensors, facts)
    return file.fingerprint


@pytest.mark.parametrize("facts", [None, {"optg": '{"ü": 1}'}])
def test_files_have_the_bytes_that_the_safetensors_package_writes(tmp_path, facts):
    written = write(tmp_path / "a", examples(), facts)
    plain = {name: t.contiguous().clone() for name, t in examples().items()}
    assert (tmp_path / "a").read_bytes() == safetensors.torch.save(plain, facts)
    tensors, found = read_tensors(tmp_path / "a")
    assert found == written == Fingerprint.of((tmp_path / "a").read_bytes())
    for name, tensor in safetensors.torch.load_file(tmp_path / "a").items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
        assert torch.equal(tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_any_damage_is_a_damaged_file_or_another_fingerprint(tmp_path):
    path, rng = tmp_path / "a", random.Random(0)
    written = write(path, {"weight": torch.randn(5, 7), "mask": torch.ones(3, dtype=torch.uint8)})
    content = path.read_bytes()
    for _ in range(2000):
        broken = bytearray(content)
        for _ in range(rng.choice((1, 1, 3))):
            broken[rng.randrange(len(broken) if rng.random() < 0.5 else 150)] = rng.randrange(256)
        path.write_bytes(broken[: rng.randrange(len(broken))] if rng.random() < 0.1 else broken)
        try:
            assert read_tensors(path)[1] != written or bytes(broken) == content
        except DamagedFile as error:
            assert str(path) in str(error)


def entry(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HUGE = 10**18
HEADERS = [
    [], "x", {"a": 3}, {"a": {"dtype": "F32", "shape": [2]}}, {"a": entry([2], [0, 8], "F99")}, {"a": entry([3], [0, 8])},
    {"a": entry([-2], [0, -8])}, {"a": entry([HUGE], [0, 4 * HUGE])}, {"a": entry([0, HUGE, HUGE], [0, 0])},
    {"a": entry([1], [0, 4])},  # 4 bytes after it belong to no tensor
    {"a": entry([1], [4, 8])},  # 4 bytes before it belong to no tensor
    {"a": entry([2], [0, 8]), "b": entry([1], [4, 8])}, {"a": entry([2.0], [0, 8])}, {"a": entry([True, 2], [0, 8])},
]  # fmt: skip


@pytest.mark.parametrize("header", [*map(json.dumps, HEADERS), "{", "[" * 100_000, "\udcff"])
def test_an_impossible_header_is_refused(tmp_path, header):
    text = header.encode(errors="surrogateescape")
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(DamagedFile, match="its header is not valid"):
        read_tensors(tmp_path / "a")


@pytest.mark.parametrize("content", [b"", b"\x05", bytes(8), (2**63).to_bytes(8, "little") + bytes(50)])
def test_a_short_file_is_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DamagedFile):
        read_tensors(tmp_path / "a")
