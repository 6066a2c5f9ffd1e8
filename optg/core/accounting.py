"""Parameters and FLOPs of a model, dense or sparse, for one example.

FLOPs are counted as in papers on sparsity: one multiply-add is one FLOP (ResNet-50: 4.09 G, VGG-19: 398 M). A non-zero weight
costs one FLOP at every position where its layer applies it:

    FLOPs = Σ over layers  non-zero weights × positions

Linear, bilinear, convolution and attention layers count each time the model calls them. Biases, norms, pooling and products
of two activations (attention scores) do not count.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from optg.core.layer_kinds import PRUNABLE
from optg.core.preserve import evaluating
from optg.core.prunable import parameters_by_name, unwrap


@dataclass(frozen=True)
class Layer:
    """One weight of the model and its cost for one example."""

    name: str  # of the weight; the stacked input projection of an attention layer appears as three: query, key, value
    shape: tuple[int, ...]
    positions: int  # at which it is applied: output pixels of a convolution, tokens of a linear layer, over all calls
    nonzero: int
    flops: int
    dense_flops: int


@dataclass(frozen=True)
class Account:
    """A model's size and its cost for one example."""

    parameters: int  # shared ones count once
    nonzero: int  # parameters that are not 0; biases and norms (fewer than two dimensions) count whole
    layers: list[Layer]

    @property
    def flops(self) -> int:
        return sum(layer.flops for layer in self.layers)

    @property
    def dense_flops(self) -> int:
        """The FLOPs if no weight were removed."""
        return sum(layer.dense_flops for layer in self.layers)


def count(model: nn.Module, example_input: Any, *, batch_size: int | None = None) -> Account:
    """Run the model once in evaluation mode and count its parameters and FLOPs. The model does not change.

    Args:
        example_input: a tensor, a tuple of arguments, or a dict of keyword arguments to call the model with.
        batch_size: the number of examples in it. By default the first dimension of the first tensor.
    """
    model = unwrap(model)
    examples = batch_size or first_tensor(example_input).shape[0]
    parameters = parameters_by_name(model)
    weights, positions = count_positions(model, example_input, {p: name for name, p in parameters.items()})
    layers = []
    for name, weight in weights.items():
        applied, nonzero = positions[name] / examples, int(weight.count_nonzero())
        flops, dense_flops = round(nonzero * applied), round(weight.numel() * applied)
        layers.append(Layer(name, tuple(weight.shape), round(applied), nonzero, flops, dense_flops))
    return Account(
        parameters=sum(p.numel() for p in parameters.values()),
        nonzero=sum(int(p.count_nonzero()) if p.ndim >= 2 else p.numel() for p in parameters.values()),
        layers=layers,
    )


def count_positions(model: nn.Module, example_input: Any, known: dict[Tensor, str]) -> tuple[dict[str, Tensor], Counter[str]]:
    """Return each weight by name, and the number of positions at which one call of the model applies it.

    A weight that several layers share has one name, the `known` one; its positions add up.
    """
    weights: dict[str, Tensor] = {}
    positions: Counter[str] = Counter()
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for prefix, module in counted_modules(model):
            own = [(known.get(weight, prefix + name), weight) for name, weight in weights_of(module).items()]
            weights.update(own)

            def add(module: nn.Module, args: Any, kwargs: Any, output: Any, own: Any = own) -> None:
                for (name, _), applied in zip(own, positions_of(module, args, kwargs, output)):
                    positions[name] += applied

            stack.enter_context(module.register_forward_hook(add, with_kwargs=True))
        # The call sees copies of the buffers, so that its writes are discarded.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        torch.func.functional_call(model, buffers, *as_arguments(example_input))
    return weights, positions


def counted_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers whose calls count, each with the prefix of its parameters' names."""
    # An attention layer multiplies by its output projection's weight without calling that module.
    parts = {module.out_proj for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, PRUNABLE) and m not in parts]
    return [(f"{name}.".replace("_orig_mod.", "") if name else "", module) for name, module in found]


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a layer by their name within it."""
    if not isinstance(module, nn.MultiheadAttention):
        return {"weight": module.weight}  # type: ignore[dict-item]
    projections: dict[str, Tensor]
    if module.in_proj_weight is None:
        projections = {name: getattr(module, name) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")}
    else:
        parts = zip(("query", "key", "value"), module.in_proj_weight.chunk(3))
        projections = {f"in_proj_weight[{part}]": weight for part, weight in parts}
    return {**projections, "out_proj.weight": module.out_proj.weight}


def positions_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[int]:
    """Return the number of positions at which one call applies each of the layer's weights, over the whole batch."""
    if isinstance(module, nn.MultiheadAttention):
        inputs = dict(zip(("query", "key", "value"), args)) | kwargs
        query, key, value = (inputs[name].shape[:-1].numel() for name in ("query", "key", "value"))
        return [query, key, value, query]
    if isinstance(module, _ConvTransposeNd):  # spreads every input pixel with all its weights
        pixels = args[0] if args else kwargs["input"]
        return [pixels.numel() // module.in_channels]
    if isinstance(module, _ConvNd):
        return [output.numel() // module.out_channels]
    return [output.shape[:-1].numel()]


def as_arguments(example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_input, Mapping):
        return (), dict(example_input)
    return (example_input if isinstance(example_input, tuple) else (example_input,)), {}


def first_tensor(example_input: Any) -> Tensor:
    args, kwargs = as_arguments(example_input)
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim:
            return value
    raise ValueError("the example input holds no tensor with a batch dimension; give batch_size")
