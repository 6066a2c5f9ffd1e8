"""Capture a model as a graph, for any batch size where the model allows it."""

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.utils import _pytree as pytree

from optg.core.accounting import as_arguments, first_tensor
from optg.core.preserve import evaluating
from optg.core.prunable import unwrap
from optg.deploy.graph.int8 import translate_pt2e
from optg.deploy.graph.interpret import run_graph
from optg.deploy.graph.nodes import Graph, GraphError
from optg.deploy.graph.record import record
from optg.deploy.graph.translate import Trace, input_specs, remove_inplace_ops, trace_of, translate

LARGE_BATCH = 2**31  # a limit on the batch size above this one counts as no limit


def capture(model: nn.Module, example_input: Any) -> Graph:
    """Return the graph of a model in evaluation mode. The model is left unchanged.

    The batch dimension (the first dimension of the first tensor, and of every other tensor where it has the same size)
    may have any size if the model allows it. All other sizes are fixed to those of the example.

    Args:
        example_input: what the model is called with: a tensor, a tuple of tensors, or a dict of named tensors.
    """
    if isinstance(graph := getattr(model, "graph", None), Graph):  # the model was loaded from a packed file
        return graph
    model = unwrap(model)
    args, kwargs = as_arguments(example_input)
    order = list(inspect.signature(model.forward).parameters)
    kwargs = dict(sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Tensor):
            raise GraphError(f"the example input contains a {type(value).__name__}; expected tensors only")
    # About an example that the model does not accept, torch.export logs some fifty lines besides raising an error.
    silent = log_level("torch._subclasses.fake_tensor", logging.CRITICAL)
    with evaluating(model), warnings.catch_warnings(), silent:
        warnings.simplefilter("ignore", FutureWarning)  # raised by torch.export about torch itself
        if (trace := trace_any_batch(model, args, kwargs)) is not None:
            graph = translate_pt2e(translate(model, trace))
            if is_right_for_one_example(graph, model, args, kwargs):
                return graph
        return translate_pt2e(translate(model, trace_of(export_fixed_batch(model, args, kwargs))))


@contextmanager
def log_level(name: str, level: int) -> Iterator[None]:
    """Set the level of a logger inside the block."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def export_fixed_batch(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> ExportedProgram:
    """Export the model for exactly the example's sizes."""
    try:
        return remove_inplace_ops(torch.export.export(model, args, kwargs, strict=False))
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        raise GraphError(
            f"torch.export cannot capture this model with this example: {type(error).__name__}: {reason}"
        ) from error


def trace_any_batch(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Trace | None:
    """Return the model's operations for any batch size, or None if some batch sizes behave differently."""
    args, kwargs, batched = batched_examples(args, kwargs)
    if (trace := record(model, args, kwargs, batched)) is not None:
        return trace
    program = export_any_batch(model, args, kwargs)
    return None if program is None else trace_of(program)


def batched_examples(
    args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor], list[Tensor]]:
    """Return the inputs with a batch of at least 2, because torch.export specialises on 1, and those that have a batch."""
    size = first_tensor((*args, *kwargs.values())).shape[0]

    def double(value: Tensor) -> Tensor:
        return torch.cat([value, value]) if value.ndim > 0 and value.shape[0] == size == 1 else value

    args, kwargs = tuple(map(double, args)), {name: double(value) for name, value in kwargs.items()}
    return args, kwargs, [v for v in (*args, *kwargs.values()) if v.ndim > 0 and v.shape[0] == max(2, size)]


def export_any_batch(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> ExportedProgram | None:
    """Export the model for any batch size. Return None if that fails or if some batch sizes behave differently."""
    args, kwargs, batched = batched_examples(args, kwargs)
    shapes = ShapesCollection()
    for value in batched:
        shapes[value] = {0: Dim.AUTO}
    try:
        program = remove_inplace_ops(
            torch.export.export(model, args, kwargs, dynamic_shapes=shapes.dynamic_shapes(model, args, kwargs), strict=False)
        )
    except Exception:  # any exception the model or torch raises; the export for a fixed batch reports it
        return None
    unrestricted = all(limits.lower <= 2 and limits.upper > LARGE_BATCH for limits in program.range_constraints.values())
    return program if unrestricted and any(None in spec.shape for spec in input_specs(program)) else None


def is_right_for_one_example(graph: Graph, model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> bool:
    """Return whether the graph agrees with the model on a batch of one: torch.export assumes that the batch is larger."""
    one = [value[:1] if None in shape else value for value, shape in zip((*args, *kwargs.values()), graph.shapes)]
    with torch.no_grad():
        try:
            expected = model.eval()(*one[: len(args)], **dict(zip(kwargs, one[len(args) :])))
        except Exception:
            return True  # the model itself does not accept a batch of one
        found = run_graph(graph, *(value.cpu() for value in one))
    return all(map(nearly_equal, pytree.tree_leaves(found), pytree.tree_leaves(expected)))


def nearly_equal(a: Any, b: Any) -> bool:
    """Return whether two outputs agree up to rounding, on any device and in any dtype."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)
    a, b = a.double().cpu().nan_to_num(), b.double().cpu().nan_to_num()
    return a.shape == b.shape and bool(((a - b).abs() <= 0.05 * b.abs().amax() if b.numel() else a == b).all())
