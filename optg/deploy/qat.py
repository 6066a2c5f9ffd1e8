"""Quantization-aware training: fake quantization in the forward pass, so that weights adapt to int8 while they train.

twin = fake_quantized(model, images)                    # train this, with the optimizer of `model`
int8 = quantized(model, images, ranges_of(twin))        # what optg.quantize returns, with the trained ranges

`optg train --quantize int8` does both. `quantized_run` makes the int8 model of such a run again.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from optg.core.preserve import evaluating
from optg.deploy.quantize import (
    SAME_SCALE,
    convert,
    export,
    import_pt2e,
    int8_quantizer,
    make_quantizer,
    observing_specs,
    quiet,
)
from optg.training.saved import SavedRun


def require_packages() -> None:
    """Raise ImportError, with the command that installs them, if packages are missing."""
    import_pt2e()


def fake_quantized(model: nn.Module, images: Tensor) -> fx.GraphModule:
    """Return a twin of the model, in training mode, that quantizes and dequantizes weights and activations.

    It shares the model's Parameters and buffers, so training one trains the other. Modules of its own learn the ranges.

    Args:
        images: any batch of at least two. Only its shape beyond the batch is used.
    """
    pt2e, mode = import_pt2e(), model.training
    with quiet(), torch.random.fork_rng(devices=[]):  # PT2E draws random numbers
        try:
            program = torch.export.export(model.train(), (images,), dynamic_shapes=({0: Dim.AUTO},), strict=False)
        except Exception as error:  # any exception of the model or of torch
            reason = next(iter(str(error).strip().splitlines()), "")
            raise ValueError(
                f"torch.export cannot capture this model, so int8 training is not possible: {type(error).__name__}: {reason}"
            ) from None
        finally:
            model.train(mode)
        if not program.range_constraints:
            raise ValueError("this model takes only one batch size; int8 training needs a model that takes any")
        twin = pt2e.prepare_qat_pt2e(program.module(), int8_quantizer(training=True))
    count, later = len(activations(twin)), len(activations(observed(model, images)))
    if not count:
        raise ValueError("no layer of this model can run in int8; expected convolutions or linear layers in float32")
    if count != later:
        raise ValueError(
            f"{count} activations of this model are quantized in training, {later} in evaluation; expected a model that "
            "behaves the same in both, batch norm and dropout aside"
        )
    return twin


def quantized(model: nn.Module, images: Tensor, ranges: Mapping[str, Tensor]) -> nn.Module:
    """Return the int8 model that was trained: an int8 copy of a float model, with the ranges that its twin has learned."""
    prepared = observed(model, images)
    found, known = activations(prepared), list(zip(*checked(ranges)))
    if len(found) != len(known):
        raise ValueError(f"there are ranges of {len(known)} activations, but the model has {len(found)} quantized ones")
    with quiet(), torch.no_grad():
        prepared(images.cpu())  # observes the weights; what it observes of activations is replaced
        for observer, (minimum, maximum) in zip(found, known):
            observer.min_val.fill_(minimum)
            observer.max_val.fill_(maximum)
        keep_ranges_through_dropout(prepared)
        return convert(prepared)


def checked(ranges: Mapping[str, Tensor]) -> tuple[list[float], list[float]]:
    """Return the minima and the maxima of activations, which may come from a file. Raise ValueError if they are not valid."""
    low, high = (ranges.get(key, torch.zeros(())) for key in ("minimum", "maximum"))
    if not (low.ndim == 1 and low.shape == high.shape and low.dtype == high.dtype == torch.float32):
        raise ValueError("the ranges of activations are damaged; expected as many minima as maxima, in float32")
    if not bool(((low <= high) & (high - low).isfinite()).all()):
        raise ValueError("the ranges of activations are damaged; expected finite numbers, and no minimum above its maximum")
    return low.tolist(), high.tolist()


def keep_ranges_through_dropout(prepared: fx.GraphModule) -> None:
    """Give the result of dropout the range of its input: in training it was wider, now they are the same values."""
    for node in prepared.graph.nodes:
        source = node
        while source.op == "call_function" and source.target in (*SAME_SCALE, torch.ops.aten.dropout.default):
            source = source.args[0]
        if node.target is torch.ops.aten.dropout.default and source.op == "call_module":
            known = prepared.get_submodule(str(source.target))
            for user in [user for user in node.users if user.op == "call_module"]:
                observer = prepared.get_submodule(str(user.target))
                observer.min_val, observer.max_val = known.min_val, known.max_val


def observed(model: nn.Module, images: Tensor) -> fx.GraphModule:
    """Return a copy of the model on the CPU, in evaluation mode, with an observer at each quantized value."""
    pt2e, model = import_pt2e(), copy.deepcopy(model).cpu()
    with evaluating(model), quiet(), torch.random.fork_rng(devices=[]):
        quantizer = make_quantizer(pt2e, *observing_specs(pt2e, pt2e.MinMaxObserver))
        return pt2e.prepare_pt2e(export(model, images.cpu()).module(), quantizer)


def activations(prepared: fx.GraphModule) -> list[Any]:
    """Return the observers or fake quantizers of activations, in the order of the graph. Shared ones appear once."""
    modules = [prepared.get_submodule(str(node.target)) for node in prepared.graph.nodes if node.op == "call_module"]
    found = [module for module in modules if getattr(module, "qscheme", None) == torch.per_tensor_affine]
    return list(dict.fromkeys(found))


def ranges_of(twin: fx.GraphModule) -> dict[str, Tensor]:
    """Return the range that each activation has in training, in the order of the graph."""
    observers = [module.activation_post_process for module in activations(twin)]
    return {
        "minimum": torch.stack([observer.min_val.detach().cpu() for observer in observers]),
        "maximum": torch.stack([observer.max_val.detach().cpu() for observer in observers]),
    }


def quantized_run(saved: SavedRun) -> nn.Module:
    """Return the int8 model of a run that was trained with `--quantize int8`, as `optg.quantize` returns one."""
    return quantized(saved.model(), torch.zeros(2, *saved.shape), saved.ranges())
