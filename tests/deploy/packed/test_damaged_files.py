"""Damaged and forged files: every check of the header, and random mutations.

OPTG_FUZZ sets the number of mutations, OPTG_FUZZ_SEED draws others.
"""

import copy
import hashlib
import json
import os
import random
import resource
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from optg.deploy.graph import DTYPES, GraphError, capture
from optg.deploy.packed import PackedError, pack, unpack
from optg.deploy.packed.file import MAGIC, PREFIX, VERSION
from tests.deploy.packed.examples import ABOUT


@cache
def small_file() -> bytes:
    """Return a small file with all kinds of tensors and arguments."""
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


def join(header: Any, body: bytes, *, fix_checksum: bool = True) -> bytes:
    """Return a file of these parts with matching checksums."""
    if fix_checksum and isinstance(header, dict) and "sha256" in header:
        header["sha256"] = hashlib.sha256(body).hexdigest()
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return PREFIX.pack(MAGIC, VERSION, len(text), hashlib.sha256(text).digest()) + text + body


def test_every_field_of_the_header_is_checked() -> None:
    def assert_refused(modify: Callable[[Any], object], message: str) -> None:
        header, body = split(small_file())
        modify(header)
        with pytest.raises((PackedError, GraphError), match=message):
            unpack(join(header, body))

    first = lambda h: h["tensors"][0]  # noqa: E731
    assert_refused(lambda h: h.pop("about"), "must have exactly the fields")
    assert_refused(lambda h: first(h).update(shape=[2**40, 2**40]), "invalid shape")
    assert_refused(lambda h: first(h).update(shape=[2**30], mask=[0, 0, 0]), "would unpack to 4,294,967,")
    assert_refused(lambda h: first(h).update(shape=[-1]), "invalid shape")
    assert_refused(lambda h: first(h).update(dtype="object"), "unknown dtype")
    assert_refused(lambda h: first(h).update(stored="int64"), "cannot be stored as int64")
    assert_refused(lambda h: first(h).update(mask=[10**12, 0, 0]), "impossible mask")
    assert_refused(lambda h: first(h).update(mask=[1, 63, 1]), "impossible mask")
    assert_refused(lambda h: first(h).update(mask=None), "but .* follow the header")
    assert_refused(lambda h: h["tensors"].append(first(h)), "a name twice")
    assert_refused(lambda h: h["about"].update(std=[0.0]), '"std" must be above 0')
    assert_refused(lambda h: h["about"].update(mean=[0.0, 1.0]), '"mean" must be null or one number for each of 1 channels')
    assert_refused(lambda h: h["about"].update(labels=["a", "b\x1b[31m", "c"]), '"labels" must be null or one name')
    assert_refused(lambda h: h["about"]["origin"].update(x=[1]), '"origin" must map names to plain values')
    assert_refused(lambda h: h["graph"]["inputs"][0].__setitem__(2, [None, 2**40]), "takes .* bytes for the input")
    assert_refused(lambda h: h["graph"]["inputs"][0].__setitem__(2, [None, 1, 9, 9]), r"node .* \(aten.linear.default\) failed")
    bomb = ["bomb", "aten.full.default", [[2**20, 2**20], 1.0], {}]
    assert_refused(lambda h: h["graph"]["nodes"].append(bomb), "bomb .* needs .* bytes at the same time")
    for text in (b"[" * 10**5, b'{"a": NaN}', b'{"a":1,"a":2}', b"\xff", b"1" * 5000, b"[]"):
        with pytest.raises(PackedError, match="the header"):
            unpack(join(text, b""))


def test_false_sizes_allocate_no_memory() -> None:
    header, body = split(small_file())
    header["tensors"][0].update(shape=[2**26 - 2**12], mask=[0, 0, 0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((PackedError, GraphError)):
        unpack(join(header, body[:1]))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


MUTATIONS = int(os.environ.get("OPTG_FUZZ", "10000"))
SEED = int(os.environ.get("OPTG_FUZZ_SEED", "0"))


def damaged_file(rng: random.Random) -> bytes:
    """Return the small file with bytes changed, deleted, inserted or repeated."""
    content = bytearray(small_file())
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        kind, at = rng.randrange(6), rng.randrange(len(content) or 1)
        to = rng.randrange(at, len(content) + 1)
        if kind == 0 and content:
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and content:
            content[at] = rng.randrange(256)
        elif kind == 2:
            del content[at:]
        elif kind == 3:
            del content[at:to]
        elif kind == 4:
            content[at:at] = content[to : to + rng.randrange(64)]
        else:
            content += rng.randbytes(rng.randrange(1, 64))
    return bytes(content)


UNEXPECTED_VALUES = (
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


def json_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner_path for key, item in inner for inner_path in json_paths(item, (*path, key)))]


def forged_file(rng: random.Random) -> bytes:
    """Return the small file with JSON values or blob bytes changed, and with matching checksums, mostly."""
    header, body = split(small_file())
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.1:
            body = bytearray(body)
            body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
            body = bytes(body)
            continue
        paths = json_paths(header)[1:]
        part = rng.choice(("graph", "graph", "tensors", "about", None))
        paths = [path for path in paths if part is None or path[0] == part] or paths
        *path, key = rng.choice(paths)
        holder = header
        for step in path:
            holder = holder[step]
        kind = rng.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        elif kind == 2 and isinstance(holder[key], int):
            holder[key] = holder[key] + rng.choice((-1, 1, 2**16, -(2**16)))
        elif kind == 3:  # a value from elsewhere in the header
            source = header
            for step in rng.choice(json_paths(header)):
                source = source[step]
            holder[key] = copy.deepcopy(source)
        else:
            holder[key] = copy.deepcopy(rng.choice(UNEXPECTED_VALUES))
    return join(header, body, fix_checksum=rng.random() < 0.98)


def test_damaged_file_gives_an_error_or_the_right_output() -> None:
    rng, right = random.Random(SEED), unpack(small_file())
    images = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    expected = right(images)
    for _ in range(MUTATIONS // 2):
        content = damaged_file(rng)
        try:
            loaded = unpack(content)
        except (PackedError, GraphError) as error:
            assert str(error) and "\n" not in str(error)
            continue
        assert content == small_file() and torch.equal(loaded(images), expected)


def test_forged_file_gives_an_error_or_a_model() -> None:
    """With matching checksums, only the checks of each field remain. A forged file may describe another valid model."""
    rng, outcomes = random.Random(SEED + 1), {"refused": 0, "cannot run": 0, "runs": 0}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(MUTATIONS - MUTATIONS // 2):
        content = forged_file(rng)
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
    assert min(outcomes["refused"], outcomes["runs"]) > MUTATIONS // 50, outcomes  # both outcomes occurred
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1_000_000, outcomes  # kB
