"""Recorder: plain models get the graph that torch.export makes, and it leaves all others to torch.export."""

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import optg
from optg.core.preserve import evaluating
from optg.deploy.graph import Graph, Node, Ref, run_graph
from optg.deploy.graph import record as record_module
from optg.deploy.graph.capture import batched_examples, capture, export_any_batch
from optg.deploy.graph.record import record
from optg.deploy.graph.translate import Trace, trace_of, translate
from tests.deploy.graph.comparison import assert_same_outputs
from tests.deploy.nets import SHAPES, Odd, sparse
from tests.integrations.test_timm_models import IN_CI, MODELS, create

X, IMAGES = torch.randn(2, 4), torch.randn(2, 3, 8, 8)


def recorded(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> Trace | None:
    with evaluating(model):
        return record(model, *batched_examples(args, kwargs))


def exported(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> Graph:
    with evaluating(model):
        program = export_any_batch(model, args, kwargs)
    assert program is not None
    return translate(model, trace_of(program))


def numbered(graph: Graph) -> Graph:
    """Name the nodes by their places: torch.export also counts the operations on sizes that it drops in the end."""
    names = {node.name: f"node {i}" for i, node in enumerate(graph.nodes)}

    def renamed(value: Any) -> Any:
        return pytree.tree_map_only(Ref, lambda ref: Ref(names.get(ref.name, ref.name)), value)

    nodes = [Node(names[n.name], n.op, renamed(n.args), renamed(n.kwargs)) for n in graph.nodes]
    return dataclasses.replace(graph, nodes=nodes, outputs=renamed(graph.outputs))


def assert_same_graph(model: nn.Module, *args: Tensor, same_names: bool = True, **kwargs: Tensor) -> None:
    trace = recorded(model, *args, **kwargs)
    assert trace is not None
    found, expected = translate(model, trace), exported(model, *args, **kwargs)
    if not same_names:
        found, expected = numbered(found), numbered(expected)
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in expected.tensors.items())
    found.tensors = expected.tensors  # tensors have no single truth value
    assert found == expected and repr(found.nodes) == repr(expected.nodes)  # 1 == 1.0 == True, but not in repr


class Model(nn.Module):
    """A model with two layers of its own and this forward."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("sizes", torch.tensor([2, 2]))
        self.register_buffer("factor", torch.tensor(2.0), persistent=False)
        self.list: list[Any] = []
        self.last: Any = None
        self.function = forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "vit_ti-cifar"])
def test_networks_of_ours(name: str) -> None:
    assert_same_graph(sparse(name), torch.zeros(1, *SHAPES[name]))


def test_a_quantized_network() -> None:
    model, images = sparse("resnet20"), torch.randn(2, *SHAPES["resnet20"])
    assert_same_graph(optg.quantize(model, [images]), images)


IN_CI_TOO = [name for name in IN_CI if not name.startswith("vit")]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in IN_CI_TOO else [pytest.mark.long]) for n in MODELS])
def test_networks_of_timm(name: str) -> None:
    model, images = create(name, MODELS[name]).eval(), torch.randn(1, 3, MODELS[name], MODELS[name])
    if name in IN_CI_TOO or recorded(model, images) is not None:
        assert_same_graph(model, images, same_names=False)


NORMED = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.ReLU6(inplace=True))
PLAIN = {
    "channels last": (nn.Conv2d(3, 4, 1), IMAGES.to(memory_format=torch.channels_last)),
    "in place": (NORMED, IMAGES),
    "double": (nn.Linear(4, 4).double(), X.double()),
    "bfloat16": (nn.Linear(4, 4).bfloat16(), X.bfloat16()),
    "parts": (Model(lambda m, x: {"a": x.chunk(2, 1)[1].contiguous(), "b": [x.max(1)[0].to(torch.float32), None, 3, True]}), X),
    "indexing": (Model(lambda m, x: x.double().type_as(x)[:, None, ..., 1:3, None].squeeze()), torch.randn(2, 3, 4)),
    "returns parameters": (Model(lambda m, x: (x, m.linear.weight, m.factor * 2)), X),
    "tied": (Model(lambda m, x: F.linear(m.linear(x), m.linear.weight) * m.factor), X),
    "dead code": (Model(lambda m, x: (m.second(x), torch.relu(m.linear(x)))[1]), X),
    "new tensors": (Model(lambda m, x: x + torch.arange(4, device=x.device) + torch.ones(4, dtype=x.dtype)), X),
    "catches nothing": (Model(lambda m, x: m.linear(x) if x.shape[0] > 0 and x.ndim == 2 else x), X),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_models(name: str) -> None:
    assert_same_graph(*PLAIN[name])


def test_several_inputs_by_position_and_by_name() -> None:
    class Two(nn.Module):
        def forward(self, X: Tensor, scale: Tensor, y: Tensor | None = None) -> Tensor:
            return (X if y is None else X + y) * scale

    for args, kwargs in (((X, torch.ones(1)), {}), ((X, X, X), {}), ((), {"X": X, "scale": X}), ((X,), {"scale": X, "y": X})):
        assert_same_graph(Two(), *args, **kwargs)


def stores(model: Model, x: Tensor) -> Tensor:
    model.last = model.linear(x)
    return model.last


def appends(model: Model, x: Tensor) -> Tensor:
    model.list.append(len(model.list))
    return model.linear(x)


def counts(model: Model, x: Tensor) -> Tensor:
    model.factor += 1
    return x * model.factor


def writes_through_a_view(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    z = y[:, 1:]
    y.relu_()
    return y, z


def catches(model: Model, x: Tensor) -> Tensor:
    try:
        return x if x.sum() > 0 else -x
    except Exception:
        return x * 3


def catches_sizes(model: Model, x: Tensor) -> Tensor:
    try:
        return x.reshape(x.shape[0] * 2, 2)
    except Exception:
        return x * 3


NOT_PLAIN = {
    "branches on values": lambda m, x: x if x.sum() > 0 else -x,
    "branches on the batch size": lambda m, x: x * 2 if x.shape[0] > 7 else x,
    "computes with the batch size": lambda m, x: x.reshape(x.shape[0], 2, 2),
    "returns the batch size": lambda m, x: (x, x.shape[0]),
    "needs this batch size": lambda m, x: x.reshape(2, 2, 2),
    "scales by the batch size": lambda m, x: x * (1 / x.shape[0]),
    "catches errors": catches,
    "catches errors of sizes": catches_sizes,
    "reads a buffer as a list": lambda m, x: x.reshape(-1, *m.sizes.tolist()),
    "reads a buffer as an array": lambda m, x: x.reshape(-1, *map(int, m.sizes.numpy())),
    "reads a number": lambda m, x: x * m.factor.item(),
    "writes through a view": writes_through_a_view,
    "writes into its input": lambda m, x: x.mul_(2),
    "writes into a buffer": counts,
    "assigns an attribute": stores,
    "changes a list": appends,
    "draws random numbers": lambda m, x: x + torch.randn(4),
    "drops out in evaluation too": lambda m, x: F.dropout(x, 0.5, training=True),
    "makes a constant": lambda m, x: x + torch.tensor([1.0, 2, 3, 4]),
    "uses a tensor from elsewhere": lambda m, x: x + X[0],
    "has no operation that files may use": lambda m, x: x.sort(1)[0],
    "fails": lambda m, x: x.reshape(3, 3),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_models_left_to_export(name: str) -> None:
    assert recorded(Model(NOT_PLAIN[name]), X) is None


def test_kinds_of_models_left_to_export() -> None:
    class Rest(nn.Module):
        def forward(self, *values: Tensor) -> Tensor:
            return values[0] + values[1]

    class Named(nn.Module):  # torch.export would have to rename the operations
        def forward(self, relu: Tensor, add: Tensor) -> Tensor:
            return F.relu(relu) + add

    assert recorded(Rest(), X, X) is None and recorded(Named(), X, X) is None
    assert recorded(torch.jit.trace(nn.Linear(4, 4), X), X) is None
    assert recorded(Odd().eval(), torch.randn(1, 3, 6, 6)) is None
    assert recorded(nn.utils.spectral_norm(nn.Linear(4, 4)), X) is None


def test_nothing_is_left_behind() -> None:
    for forward in (stores, appends, NOT_PLAIN["fails"], lambda m, x: m.linear(x)):
        model = Model(forward).eval()
        before = {**vars(model), "list": list(model.list)}
        weight, flags = model.linear.weight, torch.backends.mkldnn.enabled
        recorded(model, X)
        model.list = before["list"] = []
        assert vars(model) == before and model.linear.weight is weight and type(weight) is nn.Parameter
        assert torch.backends.mkldnn.enabled is flags is True and torch.backends.cudnn.enabled
        assert not torch.compiler.is_exporting() and not torch.is_inference_mode_enabled()


def test_regions_that_torch_export_makes_submodules() -> None:
    def regions(model: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = model.linear(x)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
            return model.second(y).float()

    model = Model(regions).eval()
    with torch.no_grad():
        assert_same_outputs(run_graph(capture(model, X), X), model(X))


def test_another_torch() -> None:
    """If torch moves what the recorder needs, torch.export captures the model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    expected = [node.op for node in capture(model, X).nodes]
    with patch.dict("sys.modules", {"torch._subclasses.fake_tensor": None}):
        assert recorded(model, X) is None
    with patch.object(record_module, "record_plain", side_effect=AttributeError):
        assert [node.op for node in capture(model, X).nodes] == expected
