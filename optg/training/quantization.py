"""The last part of a run with `--quantize int8`: fake quantization in the forward pass, with the masks frozen.

From step `start` on, training steps call the model's twin instead of the model. The twin quantizes and dequantizes weights and
activations, and has the same Parameters and buffers, so optimizer, sparsifier and evaluation go on as before. It also learns
the ranges of the activations, which are saved in checkpoints and, at the end, in the run folder.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from optg.core.clock import Clock
from optg.methods import Method
from optg.training.parallel import Parallel
from optg.training.recipe import Recipe, RecipeError

TWIN, RANGES = "quantization.twin.", "quantization.ranges."  # prefixes of names in checkpoints
SCHEDULE_ENDS = ("end", "until")  # options of methods: where the mask stops changing, as a share of training


class Int8(Protocol):
    """The functions of `optg.deploy.qat`, which is a layer above."""

    def require_packages(self) -> None: ...
    def fake_quantized(self, model: nn.Module, images: Tensor) -> Any: ...
    def ranges_of(self, twin: Any) -> dict[str, Tensor]: ...
    def quantized(self, model: nn.Module, images: Tensor, ranges: Mapping[str, Tensor]) -> nn.Module: ...


class Quantization:
    """The twin of a model, and when training switches to it."""

    def __init__(self, int8: Int8, model: nn.Module, images: Tensor, start: int) -> None:
        self.int8, self.start = int8, start
        self.active = False
        self.twin = int8.fake_quantized(model, images)
        self.learned = [name for name in self.twin.state_dict() if name not in model.state_dict()]

    def due(self, clock: Clock) -> bool:
        """Return whether training must switch to the twin now."""
        return not self.active and clock.step >= self.start

    def ranges(self) -> dict[str, Tensor]:
        """Return the ranges of the activations, from which the int8 model is made."""
        return self.int8.ranges_of(self.twin)

    def tensors(self) -> dict[str, Tensor]:
        """Return what the twin has learned, for a checkpoint. Empty before its part of training."""
        if not self.active:
            return {}
        state = self.twin.state_dict()
        twin = {TWIN + name: state[name].detach().cpu() for name in self.learned}
        return twin | {RANGES + name: tensor for name, tensor in self.ranges().items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Undo `tensors`."""
        self.twin.load_state_dict(with_prefix(TWIN, tensors), strict=False)

    def quantized(self, model: nn.Module, image: Tensor) -> nn.Module:
        """Return the int8 model. `model` has the trained weights, on the CPU."""
        return self.int8.quantized(model, torch.cat([image, image]), self.ranges())


def ranges_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the ranges that a checkpoint holds."""
    return with_prefix(RANGES, tensors)


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def refuse_unsupported(recipe: Recipe, parallel: Parallel, int8: Int8) -> None:
    """Raise if a run cannot be trained with `--quantize`, before anything is loaded."""
    if parallel.mode != "none":
        raise RecipeError(f"--quantize {recipe.quantize} trains in a single process; leave out --parallel {parallel.mode}")
    if recipe.precision != "float32":
        raise RecipeError(f"--quantize {recipe.quantize} needs --precision float32, not {recipe.precision}")
    try:
        int8.require_packages()
    except ImportError as error:
        raise RecipeError(f"--quantize {recipe.quantize}: {error}") from None


def end_before(method: Method, share: float) -> Method:
    """Return the method with a schedule that ends before the masks are frozen, after this share of training."""
    late: dict[str, Any] = {key: share for key in SCHEDULE_ENDS if getattr(method, key, 0.0) > share}
    return dataclasses.replace(method, **late) if late else method


def refuse_late_target(name: str, method: Method, clock: Clock, start: int) -> None:
    """Raise if the method's mask reaches its sparsity only after the masks are frozen."""
    if (reached := method.target_step(clock)) > start:
        raise RecipeError(
            f"--quantize freezes the masks at step {start} of {clock.total}, but {name} reaches its sparsity at step "
            f"{reached}; use other options of the method, a later --quantize-from, or another method"
        )


def describe(quantization: Quantization, clock: Clock, given: dict[str, Any], used: Method) -> str:
    """Return a sentence about what will change, and when. `given` are the method's options before `end_before`."""
    ends = [(key, given.get(key), getattr(used, key, None)) for key in SCHEDULE_ENDS]
    earlier = [f"; method.{key} is {now} instead of {before}" for key, before, now in ends if before != now]
    return f"int8 begins at step {quantization.start} of {clock.total}; the masks are frozen then{''.join(earlier)}"
