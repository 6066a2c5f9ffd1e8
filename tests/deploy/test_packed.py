"""Packed files: small, exact, and nothing but data. OPTG_FUZZ may ask for more mutations, OPTG_FUZZ_SEED for others."""

import copy
import hashlib
import json
import math
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import optg
from optg.deploy import packed
from optg.deploy.graph import Graph, capture
from optg.deploy.operations import GraphError, Ref
from optg.deploy.packed import MAGIC, PREFIX, VERSION, About, Packed, PackedError, pack, same_bits, unpack
from optg.deploy.plain import DTYPES
from tests.deploy.nets import SHAPES, Odd, captured, sparse

ABOUT = About(
    "small",
    3,
    (1, 6, 6),
    (0.5,),
    (0.25,),
    0.875,
    ("a", "b", "ç"),
    {"parameters": 9},
    {"accuracy": 0.5, "method": "optg", "seed": None},
)


def holding(**tensors: Tensor) -> Graph:
    """A graph that does nothing, with these tensors."""
    return Graph(["x"], [(None, 3)], [torch.float32], [], Ref("x"), tensors, dict.fromkeys(tensors, "parameter"))


def back(tensor: Tensor, values: packed.Values = "float32") -> Tensor:
    return unpack(pack(holding(t=tensor), ABOUT, values)).graph.tensors["t"]


# ---- what was written is what is read


@pytest.mark.parametrize("name", [n for n in SHAPES if n != "resnet20"])
def test_whole_networks_come_back_exactly(name: str, tmp_path: Path) -> None:
    model, path = sparse(name), tmp_path / "model.optg"
    size = packed.save(path, captured(name), About(name, 10, SHAPES[name]))
    loaded = optg.load(path)
    state, found = model.state_dict(), loaded.state_dict()
    assert list(state) == list(found) and all(same_bits(state[key], found[key]) for key in state)
    assert size == path.stat().st_size and os.listdir(tmp_path) == ["model.optg"]
    images = torch.randn(4, *SHAPES[name])
    with torch.no_grad():
        expected, outputs = model(images), loaded(images)
    assert torch.equal(outputs.argmax(1), expected.argmax(1))
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


def test_a_network_of_odd_parts_comes_back() -> None:
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


def test_vgg19_at_98_percent_is_small_and_loads_in_a_second(tmp_path: Path) -> None:
    graph, path = captured("vgg19"), tmp_path / "vgg19.optg"
    dense = sum(t.numel() * t.element_size() for t in graph.tensors.values())
    for values, share in (("float32", 0.026), ("bfloat16", 0.016)):
        assert packed.save(path, graph, About("vgg19", 10, (3, 32, 32)), values) < share * dense  # asked for: 0.04
    timed = "import time, optg.deploy.packed as p; t = time.process_time(); p.load({!r}); print(time.process_time() - t)"
    fresh = subprocess.run([sys.executable, "-c", timed.format(str(path))], capture_output=True, text=True, check=True)
    assert float(fresh.stdout) < 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
def test_every_dtype_comes_back_bit_for_bit(dtype: str, density: float) -> None:
    random = torch.Generator().manual_seed(0)
    kind = DTYPES[dtype]
    raw = torch.randint(256, (5, 7, 11, kind.itemsize), generator=random, dtype=torch.uint8)
    if kind == torch.bool:
        raw = raw % 2
    raw *= (torch.rand(5, 7, 11, 1, generator=random) < density).to(torch.uint8)
    tensor = raw.view(kind).squeeze(-1)  # any bits at all: NaNs with payloads, infinities, subnormals
    found = back(tensor)
    assert found.shape == (5, 7, 11) and found.dtype == kind and same_bits(found, tensor)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3), (1, 1, 1, 1, 1)])
def test_every_shape_comes_back(shape: tuple[int, ...]) -> None:
    for tensor in (torch.zeros(shape), torch.ones(shape), torch.randn(shape)):
        assert same_bits(back(tensor), tensor)


def test_signs_of_zero_and_other_values_are_kept() -> None:
    tensor = torch.zeros(1000)
    tensor[[3, 500, 999]] = torch.tensor([-0.0, math.nan, -math.inf])
    found = back(tensor)
    assert same_bits(found, tensor) and found[3].signbit() and found[500].isnan()


def test_strided_shared_and_channels_last_tensors_come_back() -> None:
    base = torch.randn(8, 3, 4, 4)
    for tensor in (
        base.to(memory_format=torch.channels_last),
        base[::2, :, 1:],
        base[:1].expand(8, 3, 4, 4),
        base.transpose(0, 1),
    ):
        assert torch.equal(back(tensor), tensor)


def test_bfloat16_values_are_those_of_torch_and_only_of_weights() -> None:
    weight = torch.randn(64, 64) * (torch.rand(64, 64) < 0.1)
    weight[0, 0], weight[0, 1], weight[1, 1] = 1e-45, -0.0, 3e38
    assert same_bits(back(weight, "bfloat16"), weight.bfloat16().float())
    assert same_bits(back(torch.randn(64), "bfloat16"), (bias := torch.randn(64))) is False and same_bits(
        back(bias, "bfloat16"), bias
    )
    half = torch.randn(4, 4).half()
    assert same_bits(back(half, "bfloat16"), half)
    graph = holding(t=weight)
    graph.kinds["t"] = "buffer"
    assert same_bits(unpack(pack(graph, ABOUT, "bfloat16")).graph.tensors["t"], weight)


@pytest.mark.parametrize("density", [1e-4, 0.02, 0.1, 0.5, 0.95])
def test_masks_take_little_more_than_their_entropy(density: float) -> None:
    size = 400_000
    kept = np.random.RandomState(0).rand(size) < density
    gaps = np.diff(np.flatnonzero(kept), prepend=-1) - 1
    quotients, remainders = packed.write_rice(gaps, packed.best_rice(gaps))
    entropy = -size * (density * math.log2(density) + (1 - density) * math.log2(1 - density))
    bits = 8 * (len(quotients) + len(remainders))
    assert bits < 1.06 * entropy + 100 or bits <= size + 8  # of dense masks: the plain bitmap


@pytest.mark.parametrize("gaps", [[], [0], [5], [0, 0, 0, 0, 0, 0, 0, 0, 0], [1000, 0, 1], [2**20, 2**31, 7]])
@pytest.mark.parametrize("k", [0, 1, 3, 13, 31])
def test_rice_codes_come_back(gaps: list[int], k: int) -> None:
    if sum(gap >> k for gap in gaps) > 2**21:
        pytest.skip("a code of gigabytes")
    quotients, remainders = packed.write_rice(np.array(gaps, np.int64), k)
    found = packed.read_rice("t", len(gaps), k, memoryview(quotients), memoryview(remainders))
    assert found.tolist() == [sum(gaps[: i + 1]) + i for i in range(len(gaps))]


def test_the_code_of_a_mask_by_eye() -> None:
    quotients, remainders = packed.write_rice(np.array([5, 0, 2, 9]), 2)  # 5 = 1·4 + 1, 0, 2, 9 = 2·4 + 1
    assert np.unpackbits(np.frombuffer(quotients, np.uint8)).tolist() == [0, 1, 1, 1, 0, 0, 1, 0]
    assert np.unpackbits(np.frombuffer(remainders, np.uint8)).tolist() == [0, 1, 0, 0, 1, 0, 0, 1]


def test_a_loaded_model_is_a_module(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    packed.save(tmp_path / "m.optg", capture(net, torch.zeros(1, 1, 6, 6)), ABOUT)
    loaded, images = optg.load(str(tmp_path / "m.optg")), torch.randn(2, 1, 6, 6)
    assert not loaded.training and isinstance(loaded, Packed)
    loaded(images).sum().backward()
    assert loaded.get_parameter("0.weight").grad is not None
    loaded.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    net.load_state_dict(loaded.state_dict())
    assert torch.equal(loaded(images), net(images))  # it computes with its parameters as they are now
    assert torch.equal(copy.deepcopy(loaded).double()(images.double()), net.double()(images.double()))
    assert torch.equal(loaded.graph.tensors["3.bias"], net[3].bias.float())
    with pytest.raises(GraphError, match="expected any×1×6×6"):
        loaded(torch.randn(2, 1, 7, 7))


def test_writing_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.optg"
    packed.save(path, holding(t=torch.ones(3)), ABOUT)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("optg.files.sync", full)
    with pytest.raises(OSError, match="no space"):
        packed.save(path, holding(t=torch.zeros(3)), ABOUT)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["m.optg"]


def test_what_a_file_cannot_hold_is_refused_when_it_is_written() -> None:
    with pytest.raises(PackedError, match="plain tensors of numbers"):
        pack(holding(t=torch.eye(3).to_sparse()), ABOUT)


# ---- files that are not as they were written


def test_other_files_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"PK\x03\x04", MAGIC, MAGIC + b"\0" * 100, os.urandom(1000)):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(PackedError, match=f"{tmp_path}/x: "):
            optg.load(tmp_path / "x")
    with pytest.raises(PackedError, match="is a folder"):
        optg.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        optg.load(tmp_path / "nothing")
    later = PREFIX.pack(MAGIC, VERSION + 1, 2, hashlib.sha256(b"{}").digest()) + b"{}"
    with pytest.raises(PackedError, match=f"version {VERSION + 1}; this optg reads version {VERSION}"):
        unpack(later)


@cache
def whole() -> bytes:
    """A small file with all kinds of tensors and arguments."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU6(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    with torch.no_grad():
        net[0].weight *= torch.rand(4, 1, 3, 3) < 0.3
        net[5].weight *= torch.rand(3, 36) < 0.1
    return pack(capture(net, torch.zeros(1, 1, 6, 6)), ABOUT)


def split(content: bytes) -> tuple[Any, bytes]:
    length = PREFIX.unpack_from(content)[2]
    return json.loads(content[PREFIX.size : PREFIX.size + length]), content[PREFIX.size + length :]


def joined(header: Any, body: bytes, *, checked: bool = True) -> bytes:
    """A file of these parts, with the checksums that they should have."""
    if checked and isinstance(header, dict) and "sha256" in header:
        header["sha256"] = hashlib.sha256(body).hexdigest()
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return PREFIX.pack(MAGIC, VERSION, len(text), hashlib.sha256(text).digest()) + text + body


def test_claims_of_the_header_are_checked() -> None:
    def refused(change: Callable[[Any], object], message: str) -> None:
        header, body = split(whole())
        change(header)
        with pytest.raises((PackedError, GraphError), match=message):
            unpack(joined(header, body))

    first = lambda h: h["tensors"][0]  # noqa: E731
    refused(lambda h: h.pop("about"), "lacks a part")
    refused(lambda h: first(h).update(shape=[2**40, 2**40]), "a shape that is none")
    refused(lambda h: first(h).update(shape=[2**30], mask=[0, 0, 0]), "would unfold to 4,294,967,")
    refused(lambda h: first(h).update(shape=[-1]), "a shape that is none")
    refused(lambda h: first(h).update(dtype="object"), "unknown dtype")
    refused(lambda h: first(h).update(stored="int64"), "is stored as int64")
    refused(lambda h: first(h).update(mask=[10**12, 0, 0]), "claims what cannot be")
    refused(lambda h: first(h).update(mask=[1, 63, 1]), "claims what cannot be")
    refused(lambda h: first(h).update(mask=None), "but .* follow the header")
    refused(lambda h: h["tensors"].append(first(h)), "a name twice")
    refused(lambda h: h["about"].update(std=[0.0]), "std is not above 0")
    refused(lambda h: h["about"].update(mean=[0.0, 1.0]), "mean is not a number for each of 1 channels")
    refused(lambda h: h["about"].update(labels=["a", "b\x1b[31m", "c"]), "labels are not a name")
    refused(lambda h: h["about"]["origin"].update(x=[1]), "origin is not")
    refused(lambda h: h["graph"]["inputs"][0].__setitem__(2, [None, 2**40]), "would be of .* bytes for one image")
    refused(lambda h: h["graph"]["inputs"][0].__setitem__(2, [None, 1, 9, 9]), r"node .* \(aten.linear.default\) failed")
    bomb = ["bomb", "aten.full.default", [[2**20, 2**20], 1.0], {}]
    refused(lambda h: h["graph"]["nodes"].append(bomb), "'bomb' would make .* bytes")
    for text in (b"[" * 10**5, b'{"a": NaN}', b'{"a":1,"a":2}', b"\xff", b"1" * 5000, b"[]"):
        with pytest.raises(PackedError, match="the header"):
            unpack(joined(text, b""))


def test_claims_take_no_memory() -> None:
    header, body = split(whole())
    header["tensors"][0].update(shape=[2**26 - 2**12], mask=[0, 0, 0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((PackedError, GraphError)):
        unpack(joined(header, body[:1]))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


MUTATIONS = int(os.environ.get("OPTG_FUZZ", "10000"))
SEED = int(os.environ.get("OPTG_FUZZ_SEED", "0"))


def damaged(chance: random.Random) -> bytes:
    """Bytes changed, cut off, doubled or moved."""
    content = bytearray(whole())
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        kind, at = chance.randrange(6), chance.randrange(len(content) or 1)
        to = chance.randrange(at, len(content) + 1)
        if kind == 0 and content:
            content[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and content:
            content[at] = chance.randrange(256)
        elif kind == 2:
            del content[at:]
        elif kind == 3:
            del content[at:to]
        elif kind == 4:
            content[at:at] = content[to : to + chance.randrange(64)]
        else:
            content += chance.randbytes(chance.randrange(1, 64))
    return bytes(content)


STRANGE = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 63, 255, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, -(2**63), 2**64, 10**400),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, -1e30, "", "x", "input", "0.weight", "linear", "float32", "bool", "\ud800", "a" * 2000),
    *([], {}, [0], [1, 1], [-1], [2**40], [[]], {"ref": "input"}, {"ref": "linear"}, {"ref": 3}, {"tuple": []}, {"dict": {}}),
    *(
        {"dtype": "int8"},
        {"dtype": "bool"},
        {"format": "channels_last"},
        {"float": "nan"},
        {"device": "cpu"},
        {"device": "cuda"},
    ),
    *(
        "aten.relu.default",
        "aten.add.Tensor",
        "aten.cat.default",
        "aten.full.default",
        "aten.index.Tensor",
        "aten.view.default",
    ),
    *("aten.conv2d.default", "aten.max_pool2d.default", "aten.embedding.default", "aten.pixel_shuffle.default", "operator.mul"),
    *("operator.getitem", "aten.from_file.default", "aten.relu_.default", "os.system", "parameter", "constant"),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is something in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def edited(chance: random.Random) -> bytes:
    """The header changed as JSON, or the blobs as bytes, with checksums that agree."""
    header, body = split(whole())
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if chance.random() < 0.1:
            body = bytearray(body)
            body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
            body = bytes(body)
            continue
        spots = places(header)[1:]
        part = chance.choice(("graph", "graph", "tensors", "about", None))
        spots = [spot for spot in spots if part is None or spot[0] == part] or spots
        *path, key = chance.choice(spots)
        holder = header
        for step in path:
            holder = holder[step]
        kind = chance.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.insert(chance.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        elif kind == 2 and isinstance(holder[key], int):
            holder[key] = holder[key] + chance.choice((-1, 1, 2**16, -(2**16)))
        elif kind == 3:  # something from elsewhere in the header
            source = header
            for step in chance.choice(places(header)):
                source = source[step]
            holder[key] = copy.deepcopy(source)
        else:
            holder[key] = copy.deepcopy(chance.choice(STRANGE))
    return joined(header, body, checked=chance.random() < 0.98)


def test_damaged_files_give_an_error_or_the_right_answer() -> None:
    chance, right = random.Random(SEED), unpack(whole())
    images = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    expected = right(images)
    for _ in range(MUTATIONS // 2):
        content = damaged(chance)
        try:
            loaded = unpack(content)
        except (PackedError, GraphError) as error:
            assert str(error) and "\n" not in str(error)
            continue
        assert content == whole() and torch.equal(loaded(images), expected)


def test_forged_files_give_an_error_or_a_model() -> None:
    """Forged: with checksums that agree, so that all that is left is to check every claim. A file may describe another model
    than the one it was; then that one loads, computes, or says why not."""
    chance, outcomes = random.Random(SEED + 1), {"refused": 0, "cannot run": 0, "runs": 0}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(MUTATIONS - MUTATIONS // 2):
        content = edited(chance)
        try:
            loaded = unpack(content)
        except (PackedError, GraphError) as error:
            assert str(error)
            outcomes["refused"] += 1
            continue
        header, _ = split(content)
        for row in header["tensors"]:
            tensor = loaded.graph.tensors[row["name"]]
            assert list(tensor.shape) == row["shape"] and tensor.dtype == DTYPES[row["dtype"]]
        shapes = [[2 if n is None else n for n in shape] for shape in loaded.graph.shapes]
        inputs = [torch.ones(shape, dtype=dtype) for shape, dtype in zip(shapes, loaded.graph.dtypes)]
        try:
            with torch.no_grad():
                loaded(*inputs)
            outcomes["runs"] += 1
        except GraphError as error:
            assert str(error)
            outcomes["cannot run"] += 1
    assert min(outcomes["refused"], outcomes["runs"]) > MUTATIONS // 50, outcomes  # both ways were tried
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1_000_000, outcomes  # kB
