"""Follow channels from layer to layer with the dependency graph of Torch-Pruning.

The graph treats most operations as elementwise and guesses how a reshape moves channels. So the links found here are
candidates: `coupled_channels` checks each group of them by running the model.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from optg.core.accounting import as_arguments
from optg.core.channels.kinds import WEIGHTED, Port, kind_of
from optg.core.channels.moves import Channel, set_moves
from optg.core.layer_kinds import has_computed_weight, is_input_first

INSEPARABLE = (nn.LayerNorm, nn.MultiheadAttention, nn.RNNBase)  # layers whose channels cannot be removed


class Link(NamedTuple):
    """Output channels of a layer that run through another operation: a layer, a bare parameter, or one without weights."""

    layer: nn.Module
    other: nn.Module | nn.Parameter
    port: Port  # where `other` is entered or left
    pairs: Tensor  # rows of (channel of `layer`, channel of `other`)
    dim: int  # the channel dimension of a bare parameter
    refusal: str  # why these channels cannot be removed; empty if nothing is against it


class InputFirstPruner:
    """What the dependency graph asks about the Conv1D of transformers, which it does not know."""

    pruning_dim = -1

    def prune_out_channels(self, layer: Any, channels: Any) -> None: ...

    def prune_in_channels(self, layer: Any, channels: Any) -> None: ...

    def get_out_channels(self, layer: Any) -> int:
        return layer.weight.shape[1]

    def get_in_channels(self, layer: Any) -> int:
        return layer.weight.shape[0]


def find_links(model: nn.Module, example: Any) -> Iterator[Link]:
    """Yield all links of a model that needs gradients in all its parameters and is in evaluation mode."""
    graph, outputs = build_graph(model, example)
    reached: dict[Any, set[int]] = defaultdict(set)
    for layer in model.modules():  # in the order of the model, not of the trace
        kind = kind_of(layer)
        if kind in WEIGHTED and layer in graph.module2node:
            channels = len(next(kind.slots(layer, "output")).index)
            if len(reached[layer]) < channels:  # else another layer's channels have led to all of these
                for link in follow(graph, outputs, layer, channels):
                    if link.port == "output":
                        reached[link.other].update(link.pairs[:, 1].tolist())
                    yield link


def build_graph(model: nn.Module, example: Any) -> tuple[Any, set[Any]]:
    """Return Torch-Pruning's dependency graph, and the functions of autograd that made the network's outputs."""
    try:
        import torch_pruning
    except ImportError:
        raise ImportError("finding coupled channels needs torch-pruning: pip install 'optg[shrink]'") from None
    args, kwargs = as_arguments(example)
    conv1d = {type(module): InputFirstPruner() for module in model.modules() if is_input_first(module)}
    outputs: list[Tensor] = []

    def forward(model: nn.Module, example: Any) -> list[Tensor]:
        leaves = tree_leaves(model(*args, **kwargs))
        outputs.extend(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
        if not outputs:
            raise ValueError("autograd sees no output that depends on parameters; does the model use torch.no_grad?")
        return outputs

    graph = torch_pruning.DependencyGraph()
    connect, nodes = graph._build_dependency, dict[Any, Any]()

    def connect_and_hide(found: dict[Any, Any]) -> None:
        connect(found)
        nodes.update(found)
        graph.module2node = {}  # there is nothing left whose sizes Torch-Pruning could infer; set_moves reads the real ones

    graph._build_dependency = connect_and_hide
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph.build_dependency(model, example, forward_fn=forward, customized_pruners=conv1d, verbose=False)
    graph.module2node = nodes
    set_moves(graph, any(isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) for module in model.modules()))
    return graph, {output.grad_fn for output in outputs}


def follow(graph: Any, outputs: set[Any], layer: nn.Module, channels: int) -> Iterator[Link]:
    """Yield the links of a layer's output channels: to itself, then to each operation that they reach."""
    operation = graph.get_pruner_of_module(layer).prune_out_channels
    todo = [(graph.module2node[layer], operation, [Channel(i, i) for i in range(channels)])]
    seen: dict[Any, set[Channel]] = defaultdict(set)
    while todo:
        node, operation, found = todo.pop()
        new = [channel for channel in found if channel not in seen[node, operation]]
        if not new:
            continue
        seen[node, operation].update(new)
        port: Port = "output" if operation == graph.get_pruner_of_module(node.module).prune_out_channels else "input"
        refusal = ""
        if port == "output" and node.grad_fn in outputs:
            refusal = "its units are outputs of the network"
        if isinstance(node.module, INSEPARABLE):
            refusal = f"its units run through a {type(node.module).__name__}, which mixes them"
        if isinstance(node.module, nn.Module) and has_computed_weight(node.module):
            refusal = f"its units run through a {type(node.module).__name__} that computes its weight at every call"
        yield Link(layer, node.module, port, torch.tensor(new).flip(1), node.pruning_dim, refusal)
        for dependency in node.dependencies if not refusal else ():
            if dependency.is_triggered_by(operation):
                mapped = new
                for mapping in filter(None, dependency.index_mapping):
                    mapped = mapping(mapped)
                todo.append((dependency.target, dependency.handler, mapped))
