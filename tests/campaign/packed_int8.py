"""Part: random int8 files are compiled, run by the engine under sanitizers, and compared with the integer reference bit by bit.

python -m tests.campaign.packed_int8 --count 100000 --seed 0 --seconds 7200

Operations take dequantized values with arguments from their domains, and most results are quantized again. Each quantized
value is also compared with torch's, computed from the same bytes: one step apart at most.
"""

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from optg.deploy.engine import build, structs
from optg.deploy.engine.int8.lower import RULES
from optg.deploy.engine.int8.segment import Int8Segment
from optg.deploy.graph import Graph, GraphError, Node, Ref, run_graph, run_node
from optg.deploy.graph.int8 import DEQUANTIZE, QUANTIZE, WEIGHT
from optg.deploy.graph.operations import DOMAINS_OF
from optg.deploy.packed import About, PackedError, pack, unpack
from tests.campaign.forging import DRAWN, draw, dry_result
from tests.campaign.packed_compiled import AnyTuner
from tests.campaign.packed_mutations import make_inputs, tensors_of
from tests.campaign.seeds import parse_args, restart_under_sanitizers, run_seeds
from tests.deploy.engine.harness import compile_graph
from tests.deploy.engine.int8 import reference
from tests.deploy.engine.test_sanitizers import SANITIZED, exact_arena

OPS = [op for op in DOMAINS_OF if op.startswith("aten.") and op.split(".")[1] in RULES]
ON_BYTES = reference.compare_runs(pytest.MonkeyPatch())  # values that the engine has computed, by name
ROUNDING = 1e-5  # of torch's floats, relative to the largest one
SHAPES = [(None, 3, 8, 8), (None, 4, 13, 5), (None, 16), (None, 2, 1, 9), (2, 3, 5, 7)]


class Growing:
    """A graph to which nodes are added if their arguments fit."""

    def __init__(self, seed: int) -> None:
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.shape = self.rng.choice(SHAPES)
        self.values: dict[str, Any] = {"x": torch.empty([2 if n is None else n for n in self.shape], device="meta")}
        self.tensors: dict[str, Tensor] = {}
        self.nodes: list[Node] = []

    def add(self, op: str, *args: Any, named: dict[str, Any] | None = None) -> Ref | None:
        node = Node(f"n{len(self.nodes)}", op, args, named or {})
        if (value := dry_result(node, self.values)) is None:
            return None
        self.nodes.append(node)
        self.values[node.name] = value
        return Ref(node.name)

    def requantize(self, x: Ref | None) -> Ref | None:
        """Quantize and dequantize a value: now and then with another scale, or not at all."""
        rng = self.rng
        kind, other = ((rng.choice((0.01, 0.05, DRAWN["scale"](rng))), DRAWN["byte"](rng)) for _ in range(2))
        q = self.add(QUANTIZE, x, *kind)
        return q if q is None or rng.random() < 0.03 else self.add(DEQUANTIZE, q, *(kind if rng.random() < 0.95 else other))

    def weight(self, *shape: int) -> Ref | None:
        name = f"w{len(self.tensors)}"
        weight = torch.randint(-127, 128, shape, generator=self.generator, dtype=torch.int8)
        scale = self.rng.choice((1e-4, 0.01, 1.0)) * (0.5 + torch.rand(shape[0], generator=self.generator))
        new = {name: weight * (torch.rand(shape, generator=self.generator) < 0.4), f"{name}_scale": scale}
        self.tensors.update(new)
        self.values.update({key: tensor.to("meta") for key, tensor in new.items()})
        return self.add(WEIGHT, Ref(name), Ref(f"{name}_scale"))

    def operate(self, inputs: list[Ref]) -> Ref | None:
        """Add a random operation on some of the inputs."""
        rng, op = self.rng, self.rng.choice(OPS)
        names = [ref.name for ref in inputs]
        given = {key: draw(rng, text, names, self.values) for key, text in DOMAINS_OF[op].items() if rng.random() < 0.8}
        source = given.get("input")
        if "weight" in given and isinstance(source, Ref) and len(self.values[source.name].shape) > 1:
            channels = self.values[source.name].shape[1]
            groups = rng.choice((1, 1, 1, channels)) if "conv" in op else 1
            kernel = [rng.choice((1, 2, 3, 3, 5)) for _ in range(2)] if "conv" in op else []
            given["weight"] = self.weight(groups * rng.choice((1, 4, 7)), channels // groups, *kernel)
            given |= {"groups": groups, "bias": None} if "conv" in op else {"bias": None}
        return self.add(op, named=given)

    def grow(self) -> Graph:
        rng = self.rng
        reals = [self.requantize(Ref("x"))]
        for _ in range(rng.choice((2, 5, 10))):
            result = self.operate([ref for ref in reals[-3:] if ref is not None] or [Ref("x")])
            if result is not None:
                reals.append(self.requantize(result) if rng.random() < 0.8 else result)
        outputs = [Ref(node.name) for node in self.nodes if rng.random() < 0.3 or node is self.nodes[-1]]
        kinds = dict.fromkeys(self.tensors, "buffer")
        return Graph(["x"], [self.shape], [torch.float32], self.nodes, outputs, self.tensors, kinds)  # type: ignore[arg-type]


def case(seed: int) -> str:
    try:
        model = unpack(pack(Growing(seed).grow(), About("grown", 3, (3,))))
    except (PackedError, GraphError) as error:
        assert str(error) and "\n" not in str(error), "the error is not one line"
        return "refused"
    graph, inputs = model.graph, make_inputs(model, seed)
    ON_BYTES.clear()
    with torch.no_grad():
        try:
            plain = tensors_of(run_graph(graph, *inputs))
            fast = compile_graph(graph, 1 + seed % 2, "scalar", tuner=AnyTuner)
        except GraphError:
            return "cannot run"
        got = tensors_of(fast(*inputs))  # every part that runs on bytes is compared with the reference
    compare_with_torch(graph, inputs)
    assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in plain], "another shape or dtype"
    on_bytes = any(isinstance(part, Int8Segment) for part in fast.network.parts)
    return "runs on bytes" if on_bytes and not any("ran in torch" in note for note in fast.notes) else "runs in torch"


def compare_with_torch(graph: Graph, inputs: list[Tensor]) -> None:
    """Run the graph in torch. After each node that quantizes, compare, and go on with the engine's bytes."""
    known: dict[str, Any] = {**graph.tensors, **dict(zip(graph.inputs, inputs))}
    largest = 0.0
    for node in graph.nodes:
        known[node.name] = value = run_node(node, known)
        if not isinstance(value, Tensor) or value.numel() == 0:
            continue
        if node.op == QUANTIZE and node.name in ON_BYTES:
            x, scale, _ = known[node.args[0].name], *node.args[1:]
            known[node.name] = found = torch.from_numpy(ON_BYTES[node.name]).reshape(value.shape)
            steps = (found.int() - value.int()).abs()[x.isfinite()]
            assert not steps.numel() or steps.max() <= 1 + ROUNDING * largest / scale, f"{node.name} differs by {steps.max()}"
        if value.is_floating_point():
            largest = max(largest, value.abs().nan_to_num(posinf=0.0).max().item())


def main() -> None:
    args = parse_args(__doc__)
    restart_under_sanitizers()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    build.ISAS["scalar"] = SANITIZED
    structs.arena = exact_arena
    build.library("scalar")
    case(0)
    run_seeds(case, args.count, args.seed, args.seconds)


if __name__ == "__main__":
    main()
