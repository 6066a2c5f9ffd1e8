"""Files with matching checksums that ask torch for a crash, for memory or for time: each is refused in one line, at once."""

import dataclasses
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import optg
from optg.deploy.graph import Graph, Node, Ref, from_json, to_json
from optg.deploy.graph.limits import Limits
from optg.deploy.packed import PackedError, pack, unpack
from tests.deploy.packed.examples import ABOUT
from tests.deploy.packed.test_damaged_files import join, small_file, split

X = Ref("x")


def forged(nodes: list[Node], outputs: object, *shape: int | None, dtype: torch.dtype = torch.float32) -> bytes:
    """Return a file with this graph, whatever its operations."""
    plain = Graph(["x"], [tuple(shape) or (None, 3)], [dtype], [], X, {}, {})
    header, body = split(pack(plain, ABOUT))
    header["graph"] = json_of(dataclasses.replace(plain, nodes=nodes, outputs=outputs))
    return join(header, body)


def json_of(graph: Graph) -> dict[str, object]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optg.deploy.graph.serialize.is_permitted", lambda op: True)
        return to_json(graph)


@contextmanager
def quickly_and_without_memory() -> Iterator[None]:
    """Fail if the block takes more than 2 seconds of CPU time or 200 MB of memory."""
    memory, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200_000  # kB


def assert_refused(content: bytes, message: str) -> None:
    with quickly_and_without_memory(), pytest.raises(ValueError) as caught:
        unpack(content)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(autouse=True, scope="module")
def meta_device_is_imported() -> None:
    """Let torch import the modules of its meta device before time and memory are measured."""
    torch.empty(2, 3, device="meta").softmax(1)


def test_integer_division_is_refused() -> None:
    """−2³¹ / −1 in int32 ended the process with SIGFPE."""
    least = Node("least", "aten.full.default", ([3], -(2**31)), {"dtype": torch.int32})
    minus_one = Node("minus", "aten.full.default", ([3], -1), {"dtype": torch.int32})
    for mode, message in (
        ("trunc", "self is a 1-dimensional tensor of torch.int32"),
        ("floor", "self is a 1-dimensional tensor of torch.int32"),
    ):
        divide = Node("n", "aten.div.Tensor_mode", (Ref("least"), Ref("minus")), {"rounding_mode": mode})
        assert_refused(forged([least, minus_one, divide], Ref("n")), message)
    for op in ("floor_divide.default", "remainder.Tensor", "fmod.Tensor"):
        divide = Node("n", f"aten.{op}", (Ref("least"), Ref("minus")))
        assert_refused(forged([least, minus_one, divide], Ref("n")), "is not permitted in a packed file")


def test_grid_sampler_is_refused() -> None:
    """With five dimensions and interpolation 3 it returned memory that nobody wrote."""
    grid = Node("grid", "aten.zeros.default", ([1, 4, 4, 4, 3],))
    sample = Node("n", "aten.grid_sampler.default", (X, Ref("grid"), 3, 0, False))
    assert_refused(forged([grid, sample], Ref("n"), 1, 2, 4, 4, 4), "'aten.grid_sampler.default' is not permitted")


def test_many_large_values_at_once_are_refused() -> None:
    """A file of 4.7 KB held 12 GB: no single value was large."""
    nodes = [Node(f"n{i}", "aten.full.default", ([2**27], 1.0)) for i in range(12)]
    content = forged(nodes, [Ref(node.name) for node in nodes])
    assert len(content) < 4700
    assert_refused(content, "multiply-adds; the limit is 4,000,000,000")
    with quickly_and_without_memory(), pytest.raises(ValueError) as caught:  # a larger file may ask for more work
        from_json(split(content)[0]["graph"], {})
    assert "up to node n3 (aten.full.default), needs 2,147,483,660 bytes at the same time" in str(caught.value)


def test_much_work_in_a_small_file_is_refused() -> None:
    """A file of 826 bytes took 36 seconds and 5.1 GB."""
    large = Node("a", "aten.full.default", ([8192, 8192], 0.5))
    nodes = [large, *(Node(f"n{i}", "aten.matmul.default", (Ref("a"), Ref("a"))) for i in range(3))]
    content = forged(nodes, [Ref(f"n{i}") for i in range(3)])
    assert len(content) < 1200
    assert_refused(content, "multiply-adds; the limit is 4,000,000,000")
    products = [large, *(Node(f"n{i}", "aten.mul.Tensor", (Ref("a" if i == 0 else f"n{i - 1}"), 0.5)) for i in range(9))]
    assert_refused(forged(products, Ref("n8")), "multiply-adds; the limit is 4,000,000,000")


def test_many_aliases_are_refused() -> None:
    """2.2 MB of aliases took 11.5 seconds to load."""
    header, body = split(small_file())
    header["graph"]["aliases"] = {f"m{i}.layer.weight": "0.weight" for i in range(50_000)}
    assert_refused(join(header, body), "the graph has 50,009 tensors and aliases; the limit is 10,000")
    header["graph"]["aliases"] = {".".join([f"m{i}", *"abcdefgh"]): "0.weight" for i in range(5000)}
    assert_refused(join(header, body), "contain 10,003 modules; the limit is 10,000")
    header["graph"]["aliases"] = {".".join("a" * 100): "0.weight"}
    assert_refused(join(header, body), "is not a valid tensor name")


def test_aliases_within_the_limit_load_in_linear_time() -> None:
    header, body = split(small_file())
    header["graph"]["aliases"] = {f"m{i}": "0.weight" for i in range(9_000)}
    with quickly_and_without_memory():
        model = unpack(join(header, body))
    assert model.m8999 is model.get_parameter("0.weight")


def test_many_nodes_are_refused() -> None:
    nodes = [Node(f"n{i}", "aten.relu.default", (X,)) for i in range(10_001)]
    assert_refused(forged(nodes, Ref("n0")), "the graph has 10,001 nodes; the limit is 10,000")


def test_large_declared_shape_is_refused() -> None:
    """`optg predict` allocates one image of the header's shape: [1, 100000, 100000] took 40 GB."""
    header, body = split(small_file())
    header["about"].update(shape=[1, 100_000, 100_000], mean=None, std=None)
    assert_refused(join(header, body), "an image of the header's shape takes 40,000,000,000 bytes; the limit is 268,435,456")


def test_large_empty_input_is_refused() -> None:
    """torch raised an error of its own: the strides overflowed."""
    relu = Node("n", "aten.relu.default", (X,))
    assert_refused(forged([relu], Ref("n"), None, 0, 2**62, 2**62), "bytes for the input x; the limit is 268,435,456")


def test_empty_pooling_is_refused() -> None:
    pool = Node("n", "aten.adaptive_avg_pool2d.default", (X, [0, 0]))
    assert_refused(
        forged([pool], Ref("n"), None, 1, 6, 6), "output_size is [0, 0]; expected 1 to 2 values, each an integer from 1"
    )


def test_sizes_computed_from_the_batch_are_checked_for_every_batch() -> None:
    """A small value for one image may grow with a power of the batch."""
    nodes = [Node("b", "aten.sym_size.int", (X, 0))]
    nodes.append(Node("c", "operator.mul", (Ref("b"), Ref("b"))))
    nodes.append(Node("n", "aten.zeros.default", ([Ref("c"), Ref("c")],)))
    model = unpack(forged(nodes, Ref("n")))
    assert model(torch.ones(2, 3)).numel() == 16
    with quickly_and_without_memory():
        for run in (model, lambda x: optg.compile(model, torch.ones(1, 3))(x)):
            with pytest.raises(ValueError, match=r"of 2000 images, up to node n .* needs 64,000,000,024,000 bytes"):
                run(torch.ones(2000, 3))


def test_limits_can_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, body = split(small_file())
    header["graph"]["aliases"] = {f"m{i}": "0.weight" for i in range(10_000)}
    (tmp_path / "many.optg").write_bytes(join(header, body))
    with pytest.raises(PackedError, match=r"raise the limits: optg.load\(…, limits=2\), or OPTG_LIMITS=2") as caught:
        optg.load(tmp_path / "many.optg")
    assert str(tmp_path / "many.optg") in str(caught.value)
    assert len(optg.load(tmp_path / "many.optg", limits=2).state_dict()) > 10_000
    monkeypatch.setenv("OPTG_LIMITS", "1.5")
    optg.load(tmp_path / "many.optg")
    for wrong in ("x", "0", "nan", "-1", "inf"):
        monkeypatch.setenv("OPTG_LIMITS", wrong)
        with pytest.raises(ValueError, match=r"the factor for the limits is .*; expected a number above 0"):
            optg.load(tmp_path / "many.optg")


def test_export_has_no_limits() -> None:
    """The author of a large model can write it; whoever loads it is asked to raise the limits."""
    large = Node("n", "aten.full.default", ([2**30], 0.0))
    graph = Graph(["x"], [(None, 3)], [torch.float32], [large], Ref("n"), {}, {})
    from_json(to_json(graph), {}, Limits(float("inf")))
    with pytest.raises(ValueError, match="the limit is"):
        from_json(to_json(graph), {})


def test_missing_memory_is_one_line() -> None:
    """torch reports it with the lines of its own source code."""
    program = """
import resource, torch
from optg.deploy.graph import Graph, Node, Ref
from optg.deploy.packed import About, PackedModel
graph = Graph(["x"], [(None, 3)], [torch.float32], [Node("n", "aten.full.default", ([2**40], 1.0))], Ref("n"), {}, {})
resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
try:
    PackedModel(graph, About("a", 1, (3,)))(torch.ones(1, 3))
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "node n (aten.full.default) failed: not enough memory for 4,398,046,511,104 bytes\n", done.stderr
