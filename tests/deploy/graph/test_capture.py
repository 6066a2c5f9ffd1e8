"""Capture: the graph computes what the model computes, and the model is left unchanged."""

import copy
import logging

import pytest
import torch
from torch import nn

from optg.deploy.graph import GraphError, Ref, capture, run_graph
from tests.deploy.graph.comparison import assert_same_outputs, through_json
from tests.deploy.nets import SHAPES, Odd, captured, sparse


@pytest.mark.parametrize("name", SHAPES)
def test_graph_computes_the_same_as_its_model(name: str) -> None:
    model, graph = sparse(name), through_json(captured(name))
    assert graph.dynamic and graph.shapes == [(None, *SHAPES[name])]
    for batch in (1, 3):
        images = torch.randn(batch, *SHAPES[name])
        with torch.no_grad():
            # In eager evaluation, ViT's attention uses another kernel than the captured one.
            tolerance = {"rtol": 1e-4, "atol": 1e-5} if name.startswith("vit") else {"rtol": 0.0, "atol": 0.0}
            assert_same_outputs(run_graph(graph, images), model(images), **tolerance)


@pytest.mark.parametrize("batch", [1, 2])
def test_unusual_layers_are_captured(batch: int) -> None:
    model = Odd().eval()
    graph = through_json(capture(model, torch.randn(batch, 3, 6, 6)))
    for images in (torch.randn(1, 3, 6, 6), torch.randn(5, 3, 6, 6)):
        with torch.no_grad():
            assert_same_outputs(run_graph(graph, images), model(images))


def test_capture_leaves_the_model_unchanged() -> None:
    model = Odd()
    model.dropout.eval()  # one submodule in another mode than the rest
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    images = torch.randn(2, 3, 6, 6)
    random, hooks = torch.get_rng_state(), [len(m._forward_hooks) for m in model.modules()]
    graph = capture(model, images)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert modes == [m.training for m in model.modules()] and hooks == [len(m._forward_hooks) for m in model.modules()]
    assert torch.equal(random, torch.get_rng_state()) and torch.is_grad_enabled()
    with torch.no_grad():  # the graph is captured in evaluation mode
        assert_same_outputs(run_graph(graph, images), model.eval()(images))


def test_tensors_have_their_state_dict_names() -> None:
    model = Odd()
    graph = capture(model, torch.randn(2, 3, 6, 6))
    state = model.state_dict()
    assert {*(n for n, kind in graph.kinds.items() if kind != "constant"), *graph.aliases} == set(state)
    assert graph.aliases == {"second.weight": "first.weight"}
    assert graph.kinds["first.weight"] == "parameter" and graph.kinds["count"] == graph.kinds["stem.1.running_var"] == "buffer"
    assert {graph.kinds[name] for name in ("scale", "shift")} == {"constant"}
    assert all(torch.equal(graph.tensors[graph.aliases.get(name, name)], value) for name, value in state.items())


def test_inplace_activations_become_out_of_place_and_nothing_is_fused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Dropout(), nn.ReLU6(inplace=True))
    graph = capture(model, torch.randn(1, 1, 5, 5))
    assert [node.op for node in graph.nodes] == [
        *("aten.conv2d.default", "aten.batch_norm.default", "aten.relu.default"),
        "aten.hardtanh.default",
    ]
    assert graph.nodes[1].args[0] == Ref(graph.nodes[0].name) and graph.outputs == Ref(graph.nodes[-1].name)


def test_view_of_a_value_that_is_modified_in_place() -> None:
    class Trap(nn.Module):
        def forward(self, x):
            y = x * 2
            z = y[:, 1:]
            y.relu_()
            return y, z  # z is a view of y, and was changed with it

    graph = capture(Trap(), torch.randn(2, 4))
    x = torch.tensor([[-1.0, 2.0, -3.0, 4.0]])
    assert_same_outputs(run_graph(graph, x), Trap()(x))


def test_model_with_a_fixed_batch_size() -> None:
    class Fixed(nn.Module):
        def forward(self, x):
            return x.reshape(3, 4).sum(1)

    graph = through_json(capture(Fixed(), torch.randn(3, 4)))
    assert not graph.dynamic and graph.shapes == [(3, 4)]
    with pytest.raises(GraphError, match="is 4×4; expected 3×4"):
        run_graph(graph, torch.randn(4, 4))


def test_several_inputs_whose_names_collide_with_parameters() -> None:
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.x, self.add, self.relu = (nn.Parameter(torch.full((3,), value)) for value in (1.0, 2.0, 3.0))

        def forward(self, x, y=None):
            return torch.relu(x + self.x) + y * self.add * self.relu

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    for example, inputs in (((x, y), (x, y)), ({"x": x, "y": y}, (x, y))):
        graph = through_json(capture(Two(), example))
        assert_same_outputs(run_graph(graph, *inputs), Two()(x, y).detach())
        assert len({*graph.inputs, *graph.tensors, *(n.name for n in graph.nodes)}) == 2 + 3 + len(graph.nodes)
    with pytest.raises(GraphError, match="got 1 inputs; expected 2"):
        run_graph(graph, x)


def test_error_says_why_a_model_cannot_be_captured() -> None:
    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            return x * self.seen

    with pytest.raises(GraphError, match=r"torch\.export cannot capture this model"):
        capture(Branch(), torch.randn(2, 3))
    counter = Counter()
    with pytest.raises(GraphError, match="modifies 'seen' in its forward pass"):
        capture(counter, torch.randn(2, 3))
    assert counter.seen == 0
    with pytest.raises(GraphError, match="expected tensors only"):
        capture(Counter(), (torch.randn(2, 3), 4))


def test_an_example_that_the_model_does_not_accept_is_reported_once(caplog) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(GraphError, match="cannot capture this model with this example: RuntimeError"):
        capture(model, torch.randn(1, 1, 32, 32))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
