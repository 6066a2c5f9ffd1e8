"""Parameters and FLOPs of a model, dense or sparse, for one example.

FLOPs are counted as in papers on sparsity: one multiply-add is one FLOP (ResNet-50: 4.09 G, VGG-19: 398 M). A non-zero weight
costs one FLOP at every position where its layer applies it:

    FLOPs = Σ over layers  non-zero weights × positions

All layers whose weights are prunable by default count each time the model calls them: linear, convolution, attention and
recurrent layers, experts (a token counts for those it is routed to), and classes given to `optg.prunable`. Biases, norms,
pooling and products of two activations (attention scores) do not count.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.utils._pytree import tree_leaves

from optg.core.layer_kinds import PRUNABLE, RECURRENT, Owner, default_axes, is_bias, is_expert_stack
from optg.core.preserve import evaluating
from optg.core.prunable import parameters_by_name, unwrap

QKV = ("query", "key", "value")


@dataclass(frozen=True)
class Layer:
    """One weight of the model and its cost for one example."""

    name: str  # the weight's name; the stacked input projection of an attention layer appears as three: query, key, value
    shape: tuple[int, ...]
    # at which it is applied: output pixels of a convolution, tokens of a linear layer, over all calls; of experts the average
    positions: int
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
        applied = torch.as_tensor(positions[name]).double().flatten() / examples
        nonzero = weight.reshape(len(applied), -1).count_nonzero(1).cpu()  # one number, or one per expert
        mean, flops = float(applied.mean()), float((nonzero * applied).sum())
        row = round(mean), int(nonzero.sum()), round(flops), round(weight.numel() * mean)
        layers.append(Layer(name, tuple(weight.shape), *row))
    return Account(
        parameters=sum(p.numel() for p in parameters.values()),
        nonzero=sum(int(p.count_nonzero()) if p.ndim >= 2 else p.numel() for p in parameters.values()),
        layers=layers,
    )


def count_positions(
    model: nn.Module, example_input: Any, known: dict[Tensor, str]
) -> tuple[dict[str, Tensor], dict[str, int | Tensor]]:
    """Return each weight by name, and the number of positions at which one call of the model applies it.

    A weight that several layers share has one name, the `known` one; its positions add up.
    """
    weights: dict[str, Tensor] = {}
    positions: dict[str, int | Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for prefix, module in counted_modules(model):
            counted = {
                known.get(own.weight, f"{prefix}.{key}" if prefix else key): own
                for key, own in weights_of(prefix, module).items()
            }
            for name, own in counted.items():
                weights[name] = own.weight
                positions.setdefault(name, 0)

            def add(module: nn.Module, args: Any, kwargs: Any, output: Any, counted: Any = counted) -> None:
                for name, own in counted.items():
                    positions[name] = positions[name] + own.positions(Call(module, args, kwargs, output))

            if counted:
                stack.enter_context(module.register_forward_hook(add, with_kwargs=True))
        # The call sees copies of the buffers, so that its writes are discarded.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        torch.func.functional_call(model, buffers, *as_arguments(example_input))
    return weights, positions


def counted_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules whose calls may count, each with its name."""
    # An attention layer multiplies by its output projection's weight without calling that module.
    parts = {module.out_proj for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    return [(name.replace("_orig_mod.", ""), module) for name, module in model.named_modules() if module not in parts]


class Call(NamedTuple):
    """One call of a layer."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def input(self) -> Tensor:
        return next(t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor))

    @property
    def output(self) -> Tensor:
        return next(t for t in tree_leaves(self.result) if isinstance(t, Tensor))


class CountedWeight(NamedTuple):
    """A weight, and the number of positions at which one call of its layer applies it: one number, or one per expert."""

    weight: Tensor
    positions: Callable[[Call], int | Tensor]


def weights_of(name: str, module: nn.Module) -> dict[str, CountedWeight]:
    """Return the weights of a layer by their name within it; nothing if this is no layer whose calls count."""
    if isinstance(module, nn.MultiheadAttention):
        return attention_weights(module)
    if isinstance(module, RECURRENT):  # every time step of every example applies all weights
        keys = getattr(module, "_flat_weights_names", ("weight_ih", "weight_hh"))
        return {key: CountedWeight(getattr(module, key), input_rows) for key in keys if key.startswith("weight")}
    if isinstance(module, _ConvTransposeNd):  # spreads every input pixel with all its weights
        return {"weight": CountedWeight(module.weight, lambda call: call.input.numel() // module.in_channels)}
    if isinstance(module, PRUNABLE):
        weight: Tensor = module.weight  # type: ignore[assignment]  # one that a parametrization computes too
        return {"weight": CountedWeight(weight, output_positions(weight, 0))}
    found = {}
    for key, p in module._parameters.items():
        owner = Owner(f"{name}.{key}", name, module)
        if p is None or p.ndim < 2 or is_bias(key) or (axes := default_axes(owner, p)) is None:
            continue
        positions = routed_rows(len(p)) if is_expert_stack(owner, p) else output_positions(p, axes.output)
        found[key] = CountedWeight(p, positions)
    return found


def attention_weights(module: nn.MultiheadAttention) -> dict[str, CountedWeight]:
    """Return the projections of an attention layer. Each token of the query, key or value is one position."""
    if module.in_proj_weight is None:
        projections = {f"{part[0]}_proj_weight": getattr(module, f"{part[0]}_proj_weight") for part in QKV}
    else:
        projections = {f"in_proj_weight[{part}]": weight for part, weight in zip(QKV, module.in_proj_weight.chunk(3))}
    counted = {name: CountedWeight(weight, tokens_of(part)) for part, (name, weight) in zip(QKV, projections.items())}
    return {**counted, "out_proj.weight": CountedWeight(module.out_proj.weight, tokens_of("query"))}


def tokens_of(part: str) -> Callable[[Call], int]:
    return lambda call: (dict(zip(QKV, call.args)) | call.kwargs)[part].shape[:-1].numel()


def output_positions(weight: Tensor, output: int) -> Callable[[Call], int]:
    """Count the positions of the output: pixels, tokens. `output` is the dimension of the weight that runs over outputs."""
    return lambda call: call.output.numel() // weight.shape[output]


def input_rows(call: Call) -> int:
    return call.input.shape[:-1].numel()


def routed_rows(experts: int) -> Callable[[Call], Tensor]:
    """Count the rows that each expert gets: by the indices that the layer is called with, or else equal shares of its input."""

    def count_rows(call: Call) -> Tensor:
        leaves = (t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor))
        indices = next((t for t in leaves if t.dtype in (torch.int32, torch.int64)), None)
        if indices is None:  # the input is sorted by expert
            return torch.full((experts,), input_rows(call) / experts)
        return indices.flatten().bincount(minlength=experts)[:experts].cpu()  # an index beyond the last expert means: no expert

    return count_rows


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
