"""Find the coupled channels of a model, and prove each group by running the model without some of its units."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from optg.core.accounting import as_arguments
from optg.core.channels.groups import Group, Removals, make_groups, remove_units, tensors_by_name, zeroed_tensors
from optg.core.channels.trace import find_links
from optg.core.preserve import evaluating
from optg.core.prunable import unwrap

DRAWS = 4  # trials, each with new random weights
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}  # relative to the largest output


def coupled_channels(model: nn.Module, example: Any) -> list[Group]:
    """Return the groups of channels that can only be removed together. The model does not change.

    A unit may be removed if its activation is exactly 0 everywhere once its sources are zeroed: the weights and biases that
    produce it, and its norms. Torch-Pruning proposes the groups; each is then tried on a copy of the model with random
    weights. A group is refused, with the reason in `refusal`, if the smaller copy fails or computes something else. So are
    network outputs, channels under a LayerNorm, an activation with f(0) ≠ 0 such as sigmoid, attention heads, and groups of
    one unit.

    Args:
        example: what the model is called with: a tensor, a tuple of tensors, or a dict of named ones. One example is enough.
    """
    model = copy_of(model)
    check_devices(model, example)
    for module in model.modules():
        module.training = False
    for p in model.parameters():
        p.requires_grad_(p.is_floating_point())
    try:
        groups = make_groups(model, find_links(model, example))
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"the model cannot be traced: {first_line(error)}") from error
    return check_groups(model, example, groups)


def copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of the module inside all wrappers."""
    try:
        return copy.deepcopy(unwrap(model))
    except Exception as error:
        raise ValueError(
            f"the model cannot be copied: {first_line(error)}. If it holds masks of torch.nn.utils.prune, call "
            "optg.masks_from(model) first"
        ) from error


def check_devices(model: nn.Module, example: Any) -> None:
    homes = {p.device for p in model.parameters()}
    if strays := [leaf.device for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.device not in homes]:
        raise ValueError(
            f"the example is on {strays[0]}, the model on {', '.join(sorted(map(str, homes)))}; move the example there"
        )


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def check_groups(model: nn.Module, example: Any, groups: Sequence[Group]) -> list[Group]:
    """Refuse the groups whose units cannot be removed. All are tried at once; if this fails, they are added one by one."""
    trial, checked = Trial(model, example, groups), {group: group.refusal for group in groups}
    for draw in range(DRAWS):
        trial.randomize(draw)
        left = [group for group in groups if not checked[group]]
        if trial.refusal(left):
            accepted: list[Group] = []
            for group in left:
                checked[group] = trial.refusal([*accepted, group])
                accepted += [] if checked[group] else [group]
    return [replace(group, refusal=refusal) for group, refusal in checked.items()]


class Trial:
    """A copy of the model with random weights, on which groups are tried."""

    def __init__(self, model: nn.Module, example: Any, groups: Sequence[Group]) -> None:
        self.model, self.generator = model, torch.Generator().manual_seed(0)
        self.parts = {group: self.cut_in_two(group.size) for group in groups}
        try:
            self.dtype = torch.float64
            self.example = self.random_like(example)
            self.run(model.double(), {})
        except Exception:  # the model computes in float32 whatever its parameters are
            self.dtype = torch.float32
            self.example = self.random_like(example)
            self.run(model.float(), {})

    def cut_in_two(self, size: int) -> tuple[Tensor, ...]:
        """Return the numbers below `size` in two random parts. Parts of different sizes reveal a coupling that is missing."""
        first = int(torch.randint(1, max(size, 2), (), generator=self.generator))
        return torch.randperm(size, generator=self.generator).tensor_split([first])

    def draw(self, shape: Sequence[int]) -> Tensor:
        """Return numbers of mean 0 and variance 1."""
        return (torch.rand(shape, generator=self.generator) - 0.5) * 12**0.5

    def random_like(self, example: Any) -> Any:
        def drawn(value: Any) -> Any:
            floats = isinstance(value, Tensor) and value.is_floating_point()
            return self.draw(value.shape).to(value.device, self.dtype) if floats else value

        return tree_map(drawn, example)

    @torch.no_grad()
    def randomize(self, draw: int) -> None:
        """Draw weights that let signals through: behind a silent layer, an error would stay hidden.

        Every second draw has positive weights, which silence no ReLU, and the opposite biases and means of the one before.
        """
        self.generator.manual_seed(draw // 2)
        sign = 1 - 2 * (draw % 2)
        for name, p in self.model.named_parameters():
            drawn = self.draw(p.shape)
            if p.ndim > 1:
                fan_in = p[0].numel()
                p.copy_(drawn * (2 / fan_in) ** 0.5 if sign > 0 else drawn.abs() / fan_in)
            else:
                p.copy_((1 + drawn / 4) if name.endswith("weight") else sign * (drawn + drawn.sign()) / 4)
        for name, buffer in self.model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(sign * self.draw(buffer.shape) / 4)
            if name.endswith("running_var"):
                buffer.copy_(1 + self.draw(buffer.shape) / 4)

    def refusal(self, groups: Sequence[Group]) -> str:
        """Return why the units of these groups cannot be removed; empty if one part of them can, and then the other part."""
        return next(filter(None, (self.refusal_of([(g, self.parts[g][part]) for g in groups]) for part in (0, 1))), "")

    def refusal_of(self, removals: Removals) -> str:
        """Return why these units cannot be removed."""
        smaller = copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors_by_name(self.model).values()})
        try:
            remove_units(smaller, removals)
            found = self.run(smaller, {})
        except Exception as error:
            return f"without some of its units the model fails: {first_line(error)}"
        expected = self.run(self.model, zeroed_tensors(self.model, removals))
        same = [a.shape for a in expected] == [b.shape for b in found]
        same = same and all(agree(a, b, TOLERANCE[self.dtype]) for a, b in zip(expected, found))
        return "" if same else "a zero does not stay 0 on its way to the next layer, or other channels depend on it"

    def run(self, model: nn.Module, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Return the model's outputs with other tensors in the place of some of its own."""
        args, kwargs = as_arguments(self.example)
        with evaluating(model):
            return list(filter(torch.is_tensor, tree_leaves(torch.func.functional_call(model, tensors, args, kwargs))))


def agree(expected: Tensor, found: Tensor, tolerance: float) -> bool:
    """Return whether two outputs are equal up to rounding, in finite numbers."""
    if not expected.is_floating_point():
        return torch.equal(expected, found)
    scale = expected.abs().max() if expected.numel() else expected.new_zeros(())
    return bool(scale.isfinite()) and bool(((expected - found).abs() <= tolerance * scale).all())
