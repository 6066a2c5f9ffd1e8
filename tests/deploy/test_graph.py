"""Models as graphs: they compute the same, the model is left alone, JSON brings them back, changed JSON is refused."""

import copy
import json
import math
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from optg.deploy.graph import Graph, capture, dry_run, run
from optg.deploy.operations import PURE, GraphError, Node, Ref, is_pure
from optg.deploy.plain import from_json, to_json
from tests.deploy.nets import SHAPES, Odd, captured, sparse
from tests.toy import convnet

GRAPH = cache(lambda: capture(convnet().eval(), torch.randn(1, 1, 8, 8)))


def again(graph: Graph) -> Graph:
    """Through JSON and back."""
    return from_json(json.loads(json.dumps(to_json(graph))), graph.tensors)


def assert_same(found: object, expected: object, **tolerance: float) -> None:
    (a, shape), (b, wanted) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    assert shape == wanted
    torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("name", SHAPES)
def test_a_graph_computes_what_its_model_does(name: str) -> None:
    model, graph = sparse(name), again(captured(name))
    assert graph.dynamic and graph.shapes == [(None, *SHAPES[name])]
    for batch in (1, 3):
        images = torch.randn(batch, *SHAPES[name])
        with torch.no_grad():
            # ViT's attention takes another way in eager evaluation than the one that is captured.
            tolerance = {"rtol": 1e-4, "atol": 1e-5} if name.startswith("vit") else {"rtol": 0.0, "atol": 0.0}
            assert_same(run(graph, images), model(images), **tolerance)


@pytest.mark.parametrize("batch", [1, 2])
def test_odd_parts_are_captured_too(batch: int) -> None:
    model = Odd().eval()
    graph = again(capture(model, torch.randn(batch, 3, 6, 6)))
    for images in (torch.randn(1, 3, 6, 6), torch.randn(5, 3, 6, 6)):
        with torch.no_grad():
            assert_same(run(graph, images), model(images))


def test_the_model_is_left_as_it_was() -> None:
    model = Odd()
    model.dropout.eval()  # one part in another mode than the rest
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    images = torch.randn(2, 3, 6, 6)
    random, hooks = torch.get_rng_state(), [len(m._forward_hooks) for m in model.modules()]
    graph = capture(model, images)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert modes == [m.training for m in model.modules()] and hooks == [len(m._forward_hooks) for m in model.modules()]
    assert torch.equal(random, torch.get_rng_state()) and torch.is_grad_enabled()
    with torch.no_grad():  # the graph is that of evaluation, whatever the mode was
        assert_same(run(graph, images), model.eval()(images))


def test_tensors_have_the_names_of_the_state_dict() -> None:
    model = Odd()
    graph = capture(model, torch.randn(2, 3, 6, 6))
    state = model.state_dict()
    assert {*(n for n, kind in graph.kinds.items() if kind != "constant"), *graph.aliases} == set(state)
    assert graph.aliases == {"second.weight": "first.weight"}
    assert graph.kinds["first.weight"] == "parameter" and graph.kinds["count"] == graph.kinds["stem.1.running_var"] == "buffer"
    assert {graph.kinds[name] for name in ("scale", "shift")} == {"constant"}
    assert all(torch.equal(graph.tensors[graph.aliases.get(name, name)], value) for name, value in state.items())


def test_convolution_norm_and_activation_stay_apart_also_where_written_in_place() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Dropout(), nn.ReLU6(inplace=True))
    graph = capture(model, torch.randn(1, 1, 5, 5))
    assert [node.op for node in graph.nodes] == [
        *("aten.conv2d.default", "aten.batch_norm.default", "aten.relu.default"),
        "aten.hardtanh.default",
    ]
    assert graph.nodes[1].args[0] == Ref(graph.nodes[0].name) and graph.outputs == Ref(graph.nodes[-1].name)


def test_a_value_that_is_read_after_it_was_written_in_place() -> None:
    class Trap(nn.Module):
        def forward(self, x):
            y = x * 2
            z = y[:, 1:]
            y.relu_()
            return y, z  # z is a view of y, and was changed with it

    graph = capture(Trap(), torch.randn(2, 4))
    x = torch.tensor([[-1.0, 2.0, -3.0, 4.0]])
    assert_same(run(graph, x), Trap()(x))


def test_a_batch_that_must_have_its_size() -> None:
    class Fixed(nn.Module):
        def forward(self, x):
            return x.reshape(3, 4).sum(1)

    graph = again(capture(Fixed(), torch.randn(3, 4)))
    assert not graph.dynamic and graph.shapes == [(3, 4)]
    with pytest.raises(GraphError, match="is 4×4; expected 3×4"):
        run(graph, torch.randn(4, 4))


def test_several_inputs_and_names_that_meet() -> None:
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.x, self.add, self.relu = (nn.Parameter(torch.full((3,), value)) for value in (1.0, 2.0, 3.0))

        def forward(self, x, y=None):
            return torch.relu(x + self.x) + y * self.add * self.relu

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    for example, inputs in (((x, y), (x, y)), ({"x": x, "y": y}, (x, y))):
        graph = again(capture(Two(), example))
        assert_same(run(graph, *inputs), Two()(x, y).detach())
        assert len({*graph.inputs, *graph.tensors, *(n.name for n in graph.nodes)}) == 2 + 3 + len(graph.nodes)
    with pytest.raises(GraphError, match="there are 1 inputs; expected 2"):
        run(graph, x)


def test_models_that_cannot_be_captured_say_why() -> None:
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
    with pytest.raises(GraphError, match="'seen' while it runs"):
        capture(counter, torch.randn(2, 3))
    assert counter.seen == 0
    with pytest.raises(GraphError, match="expected tensors only"):
        capture(Counter(), (torch.randn(2, 3), 4))


def test_operations_that_no_file_may_hold_still_run() -> None:
    class Rare(nn.Module):
        def forward(self, x):
            return torch.special.i0(x)

    graph, x = capture(Rare(), torch.randn(2, 3)), torch.randn(2, 3)
    assert_same(run(graph, x), torch.special.i0(x))
    with pytest.raises(GraphError, match="which a packed file cannot hold"):
        to_json(graph)


def test_a_dry_run_tells_shapes_and_takes_no_memory() -> None:
    graph = GRAPH()
    shapes = {name: tuple(value.shape) for name, value in dry_run(graph, batch=10**9).items()}
    assert shapes["conv2d"] == (10**9, 8, 8, 8) and shapes[graph.outputs.name] == (10**9, 10)


def test_no_operation_of_a_file_writes_reads_files_or_draws_random_numbers() -> None:
    for name in PURE:
        packet = getattr(torch.ops.aten, name)
        assert any(is_pure(f"aten.{name}.{overload}") for overload in packet.overloads()), name
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if is_pure(f"aten.{name}.{overload}"):
                random = torch.Tag.nondeterministic_seeded in op.tags and name != "scaled_dot_product_attention"  # its dropout
                assert not op._schema.is_mutable and not random, op
    for wrong in (
        *("aten.from_file.default", "aten.relu_.default", "aten.add.out", "aten.set_.source_Storage", "aten.rand.default"),
        *(
            "aten.relu.__call__",
            "aten.relu.default.x",
            "os.system",
            "operator.attrgetter",
            "prims.add.default",
            "aten.relu",
            "",
        ),
    ):
        assert not is_pure(wrong)


# ---- JSON that is not as it was written


X = {"ref": "input"}


def edits():
    """A change of the JSON, and what the refusal says."""
    yield (lambda d: d.pop("nodes"), "has the fields")
    yield (lambda d: d.update(more=1), "has the fields")
    yield (lambda d: d["kinds"].pop("0.weight"), "kinds are not those")
    yield (lambda d: d["kinds"].update({"0.weight": "code"}), "kind is not one of")
    yield (lambda d: d["aliases"].update({"x": "nothing"}), "an alias is not")
    yield (lambda d: d["aliases"].update({"0.weight": "4.weight"}), "an alias has the name of a tensor")
    yield (lambda d: d.update(inputs=[]), "no inputs")
    yield (lambda d: d["inputs"][0].append(1), "an input is not")
    yield (lambda d: d["inputs"][0].__setitem__(1, "float"), "unknown dtype")
    yield (lambda d: d["inputs"][0].__setitem__(2, [None, -1]), "a shape that is none")
    yield (lambda d: d["inputs"][0].__setitem__(0, "0.weight"), "used twice")
    yield (lambda d: d["nodes"].reverse(), "before it is there")
    yield (lambda d: d["nodes"].append(d["nodes"][0]), "used twice")
    yield (lambda d: d["nodes"][0].__setitem__(0, "a\nb"), "is none")
    yield (lambda d: d["nodes"][0].__setitem__(1, "aten.from_file.default"), "which no file may use")
    yield (lambda d: d["nodes"][0].__setitem__(1, "os.system"), "which no file may use")
    yield (lambda d: d["nodes"][0].__setitem__(1, 3), "which no file may use")
    yield (lambda d: d["nodes"][0].__setitem__(2, {"ref": "x"}), "not of a known form")
    yield (lambda d: d["nodes"][0][2].__setitem__(0, {"ref": "x", "tuple": []}), "not of a known form")
    yield (lambda d: d["nodes"][0][2].__setitem__(0, {"eval": "1 + 1"}), "is unknown")
    yield (lambda d: d["nodes"][0][2].__setitem__(0, {"dtype": "os"}), "is unknown")
    yield (lambda d: d["nodes"][0][2].__setitem__(0, 2**70), "out of range")
    yield (lambda d: d["nodes"][0][2].__setitem__(0, math.inf), "not finite")
    # torch 2.13 crashes on each of these four
    yield (lambda d: d["nodes"][0].__setitem__(slice(1, 4), ["aten._to_copy.default", [X], {"dtype": -1}]), "'dtype'")
    yield (
        lambda d: d["nodes"][0].__setitem__(slice(1, 4), ["aten.clone.default", [X], {"memory_format": 4}]),
        "'memory_format'",
    )
    yield (
        lambda d: d["nodes"][0].__setitem__(slice(1, 4), ["aten.to.prim_dtype", [X, None, True, True], {}]),
        "no file may use",
    )
    yield (lambda d: d["nodes"][0].__setitem__(slice(1, 4), ["aten.max_pool1d.default", [X, [2**63 - 1]], {}]), "out of range")
    yield (lambda d: d["nodes"][0].__setitem__(slice(1, 4), ["aten.max_pool1d.default", [X, [X]], {}]), "out of range")
    yield (lambda d: d["nodes"][0][3].update(more=1), "an argument 'more' that")
    yield (lambda d: d.update(outputs={"ref": "nothing"}), "outputs are not values")
    yield (lambda d: d.update(outputs=[1, 2]), "outputs are not values")
    yield (lambda d: d.update(outputs={"dtype": "float32"}), "the model returns")


@pytest.mark.parametrize("number", range(32))
def test_json_that_was_changed_is_refused(number: int) -> None:
    changes = list(edits())
    assert len(changes) == 32
    change, message = changes[number]
    wrong = copy.deepcopy(to_json(GRAPH()))
    change(wrong)
    with pytest.raises(GraphError, match=message):
        from_json(wrong, GRAPH().tensors)


def test_sizes_are_computed_with_plain_numbers_only() -> None:
    def of(*nodes: Node) -> Graph:
        return Graph(["x"], [(None,)], [torch.float32], list(nodes), Ref(nodes[-1].name), {}, {})

    assert run(of(Node("n", "aten.sym_size.int", (Ref("x"), 0)), Node("m", "operator.mul", (Ref("n"), 3))), torch.ones(4)) == 12
    powers = [Node("n0", "operator.add", (2**40, 0))]
    powers += [Node(f"n{i + 1}", "operator.mul", (Ref(f"n{i}"), Ref(f"n{i}"))) for i in range(30)]
    with pytest.raises(GraphError, match="out of range"):
        run(of(*powers), torch.ones(4))
    for node in (
        Node("n", "operator.mul", ("x", 10**9)),
        Node("n", "operator.getitem", (Ref("x"), 0)),
        Node("n", "aten.relu.default"),
    ):
        with pytest.raises(GraphError, match=r"node n .* failed"):
            run(of(node), torch.ones(4))
