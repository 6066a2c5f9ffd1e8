"""int8 in a graph: three operations of optg's own, the only ones a packed file may quantize with.

    quantize_u8(input, scale, zero_point)      floats -> bytes
    dequantize_u8(input, scale, zero_point)    bytes -> floats: scale · (byte − zero_point)
    dequantize_s8(weight, scale)               a layer's weights, from −127 to 127 -> floats; one scale per output channel

An int8 model is a float model with these operations around its layers. torch runs it as it is; the engine turns a layer and the
operations around it into one operation on bytes. `capture` translates what PyTorch's PT2E flow writes, and `load` checks the
weights of a file.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from optg.deploy.graph.interpret import dry_run, fill_refs
from optg.deploy.graph.nodes import Graph, GraphError, Node, Ref, refs_in, require

QUANTIZE, DEQUANTIZE, WEIGHT = (f"optg.{name}.default" for name in ("quantize_u8", "dequantize_u8", "dequantize_s8"))
LAYERS = ("aten.conv2d.default", "aten.conv2d.padding", "aten.linear.default")
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-40, 2.0**40  # so that quotients of scales, and products of two, are finite in float32
LARGEST_WEIGHT, LARGEST_SUM = 127, 2**31 - 1

LIBRARY = torch.library.Library("optg", "DEF")  # the operations exist as long as this object


def implement(schema: str, function: Any) -> None:
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")


def quantize_u8(input: Tensor, scale: float, zero_point: int) -> Tensor:
    return (torch.round(input * (1 / scale)) + zero_point).clamp(0, 255).nan_to_num(0.0).to(torch.uint8)


def dequantize_u8(input: Tensor, scale: float, zero_point: int) -> Tensor:
    return (input.to(torch.float32) - zero_point) * scale


def dequantize_s8(weight: Tensor, scale: Tensor) -> Tensor:
    return weight.to(torch.float32) * scale.reshape(len(weight), *[1] * (weight.ndim - 1))


implement("quantize_u8(Tensor input, float scale, int zero_point) -> Tensor", quantize_u8)
implement("dequantize_u8(Tensor input, float scale, int zero_point) -> Tensor", dequantize_u8)
implement("dequantize_s8(Tensor weight, Tensor scale) -> Tensor", dequantize_s8)


def is_scale(value: Any) -> bool:
    return type(value) is float and SMALLEST_SCALE <= value <= LARGEST_SCALE


def is_quantized(graph: Graph) -> bool:
    """Return whether a layer of the graph has int8 weights."""
    return any(node.op == WEIGHT for node in graph.nodes)


def hidden_bytes(graph: Graph) -> set[str]:
    """Return the quantized values whose bytes nobody sees: they are only dequantized, with the same scale and zero point."""
    kinds = {node.name: node.args[1:] for node in graph.nodes if node.op == QUANTIZE}
    seen = set(refs_in(graph.outputs))
    for node in graph.nodes:
        for name in refs_in((node.args, node.kwargs)):
            if node.op != DEQUANTIZE or kinds.get(name) != node.args[1:]:
                seen.add(name)
    return kinds.keys() - seen


def count_graph(graph: Graph) -> dict[str, int]:
    """Count parameters and FLOPs of convolutions and linear layers, with and without the zeros, like `optg.count`."""
    weights = {node.name: graph.tensors[weight_and_scale(node)[0].name] for node in graph.nodes if node.op == WEIGHT}
    weights |= graph.tensors
    results, flops, dense = dry_run(graph), 0, 0
    for node in graph.nodes:
        if node.op in LAYERS and node.args[1].name in weights:
            weight = weights[node.args[1].name]
            positions = results[node.name].numel() // len(weight)
            flops, dense = flops + positions * int(weight.count_nonzero()), dense + positions * weight.numel()
    stored = [t for name, t in graph.tensors.items() if t.dtype == torch.int8 or graph.kinds[name] == "parameter"]
    nonzero = sum(int(t.count_nonzero()) if t.ndim >= 2 else t.numel() for t in stored)
    return {"parameters": sum(t.numel() for t in stored), "nonzero": nonzero, "flops": flops, "dense_flops": dense}


# ---- weights of a file


def check_weights(graph: Graph) -> None:
    """Raise GraphError unless all quantized weights are stored in the graph and valid: then no 32-bit sum can overflow."""
    for node in graph.nodes:
        if node.op == WEIGHT:
            stored = [graph.tensors[ref.name] for ref in weight_and_scale(node) if ref.name in graph.tensors]
            require(len(stored) == 2, f"node {node.name} ({node.op}): its weight and scale are computed; expected stored ones")
            if problem := problem_of_weight(*stored):
                raise GraphError(f"node {node.name} ({node.op}): {problem}")


def weight_and_scale(node: Node) -> list[Ref]:
    return [*node.args, *(node.kwargs[name] for name in ("weight", "scale") if name in node.kwargs)]


def problem_of_weight(weight: Tensor, scale: Tensor) -> str | None:
    """Return what is wrong with a quantized weight."""
    if weight.dtype != torch.int8 or weight.ndim < 2 or scale.dtype != torch.float32 or scale.shape != weight.shape[:1]:
        return "expected int8 weights of at least two dimensions, and a float32 scale for each output channel"
    if not bool(((scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE)).all()):
        return f"a scale of its weights is not a number from {SMALLEST_SCALE:.1e} to {LARGEST_SCALE:.1e}"
    if weight.numel() and int(weight.min()) < -LARGEST_WEIGHT:
        return f"a weight is below -{LARGEST_WEIGHT}; expected -{LARGEST_WEIGHT} to {LARGEST_WEIGHT}"
    rows = weight.flatten(1)
    if 2 * 255 * LARGEST_WEIGHT * rows.shape[1] > LARGEST_SUM:  # a shorter sum is always small enough
        largest = 255 * (rows.abs().sum(1, dtype=torch.int64) + rows.sum(1, dtype=torch.int64).abs())  # for any zero point
        if bool((largest > LARGEST_SUM).any()):
            return f"a sum of its products may reach {int(largest.max()):,}, more than 32 bits hold"
    return None


# ---- from PT2E and to float


def translate_pt2e(graph: Graph) -> Graph:
    """Replace the operations of PT2E that have one of optg's own. Others stay: torch runs them, and no file can hold them."""
    nodes = [translated(node, graph.tensors) for node in graph.nodes]
    return replace(graph, nodes=nodes, **used_tensors(graph, nodes))


def translated(node: Node, tensors: dict[str, Tensor]) -> Node:
    match node.op.removeprefix("quantized_decomposed.").removesuffix(".default"), node.args:
        case (("quantize_per_tensor" | "dequantize_per_tensor" as op), (x, scale, int(zero_point), 0, 255, torch.uint8)):
            if is_scale(scale) and 0 <= zero_point <= 255:
                return Node(node.name, QUANTIZE if op == "quantize_per_tensor" else DEQUANTIZE, (x, scale, zero_point))
        case "dequantize_per_channel", (Ref(weight), Ref(scale), Ref(zeros), 0, _, _, torch.int8):
            symmetric = {weight, scale, zeros} <= tensors.keys() and not tensors[zeros].any()
            if symmetric and problem_of_weight(tensors[weight], tensors[scale]) is None:
                return Node(node.name, WEIGHT, (Ref(weight), Ref(scale)))
    return node


def as_float(graph: Graph) -> Graph:
    """Return the graph without quantized activations. Its weights are floats: those that the bytes stand for."""
    made = [*graph.inputs, *graph.tensors, *(node.name for node in graph.nodes)]
    values: dict[str, Any] = {name: Ref(name) for name in made}
    nodes, floats = list[Node](), dict[str, Tensor]()
    for node in graph.nodes:
        args, kwargs = fill_refs(node.args, values), fill_refs(node.kwargs, values)
        if node.op == WEIGHT:
            floats[node.name] = dequantize_s8(*(graph.tensors[ref.name] for ref in weight_and_scale(node)))
        elif node.op in (QUANTIZE, DEQUANTIZE):
            values[node.name] = args[0] if args else kwargs["input"]
        else:
            nodes.append(Node(node.name, node.op, args, kwargs))
    kept = used_tensors(graph, nodes)
    kept["tensors"].update(floats)
    kept["kinds"].update(dict.fromkeys(floats, "parameter"))
    return replace(graph, nodes=nodes, outputs=fill_refs(graph.outputs, values), **kept)


def used_tensors(graph: Graph, nodes: list[Node]) -> dict[str, Any]:
    """Return the graph's tensors with their kinds and aliases, without those that its nodes use but the new nodes do not."""
    before, after = (set(refs_in([(node.args, node.kwargs) for node in each])) for each in (graph.nodes, nodes))
    gone = before - after - set(refs_in(graph.outputs))
    return {
        "tensors": {name: tensor for name, tensor in graph.tensors.items() if name not in gone},
        "kinds": {name: kind for name, kind in graph.kinds.items() if name not in gone},
        "aliases": {alias: name for alias, name in graph.aliases.items() if name not in gone},
    }
