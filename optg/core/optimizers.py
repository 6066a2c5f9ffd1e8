"""Optimizers as users have them: wrapped by other libraries, or several for one model."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from optg.core.refusals import refuse_wrapper

INNER = ("optimizer", "original_optimizer", "opt")  # accelerate and HF; opacus; fastai


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside wrappers of accelerate, opacus or fastai."""
    found = optimizer
    while "_optimizer_step_pre_hooks" not in getattr(found, "__dict__", {}):
        inner = next((getattr(found, name) for name in INNER if getattr(found, name, None) is not None), None)
        if inner is None or inner is found:
            raise TypeError(
                f"{type(optimizer).__name__} is not a torch optimizer: it has no step hooks; expected a torch.optim.Optimizer, "
                "a wrapper that has one as `.optimizer`, or a list of these: sparsify(model, optimizer, …)"
            )
        refuse_wrapper(found)
        found = inner
    return found


class JointState:
    """The states of several optimizers, by parameter."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.owner = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}

    def __getitem__(self, parameter: nn.Parameter) -> Any:
        return self.owner[parameter].state[parameter]

    def get(self, parameter: nn.Parameter, default: Any = None) -> Any:
        return self.owner[parameter].state.get(parameter, default)

    def pop(self, parameter: nn.Parameter, default: Any = None) -> Any:
        return self.owner[parameter].state.pop(parameter, default)


class JointOptimizer:
    """Several optimizers of one model, to read parameter groups and states from as if they were one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.state = JointState(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def join(optimizers: Any) -> tuple[list[torch.optim.Optimizer], Any]:
    """Return the unwrapped optimizers, and one object that reads like a single optimizer of all their parameters."""
    given = list(optimizers) if isinstance(optimizers, Iterable) and not isinstance(optimizers, nn.Module) else [optimizers]
    if not given:
        raise ValueError("there is no optimizer; expected one, or a list of them")
    found = [unwrap_optimizer(optimizer) for optimizer in given]
    if len({id(optimizer) for optimizer in found}) < len(found):
        raise ValueError("the same optimizer is listed twice")
    return found, found[0] if len(found) == 1 else JointOptimizer(found)


class Round:
    """One step of a model that several optimizers train: it ends when all have stepped, or when one steps again."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], parameters: list[nn.Parameter], device: torch.device) -> None:
        owned = [{p for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
        self.layers = {o: [i for i, p in enumerate(parameters) if p in mine] for o, mine in zip(optimizers, owned)}
        self.index = {o: torch.tensor(layers, dtype=torch.int64, device=device) for o, layers in self.layers.items()}
        self.stepped: set[torch.optim.Optimizer] = set()

    def add(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note that an optimizer has stepped. Return whether all have now; then the next round begins."""
        self.stepped.add(optimizer)
        complete = len(self.stepped) == len(self.layers)
        if complete:
            self.stepped.clear()
        return complete


# ---- which optimizers train a sparse model now

ATTACHED: WeakSet[torch.optim.Optimizer] = WeakSet()
SPARSE = WeakIdKeyDictionary()  # parameter -> True while a sparsifier prunes it
MARK = "trains_a_sparse_model"  # in `optimizer.defaults`, which copies of an optimizer keep while torch drops its hooks


def refuse_attached(optimizers: list[torch.optim.Optimizer], parameters: dict[str, nn.Parameter]) -> None:
    if any(optimizer in ATTACHED for optimizer in optimizers):
        raise ValueError(
            "this optimizer has a sparsifier already: call its finish() first. A trainer takes only one Sparsify callback"
        )
    if taken := [name for name, p in parameters.items() if p in SPARSE]:
        raise ValueError(
            f"{taken[0]} is pruned by another sparsifier already; call its finish() first, or give all optimizers of the model "
            "to one call: sparsify(model, [first, second], …)"
        )


def attach(optimizers: list[torch.optim.Optimizer], parameters: list[nn.Parameter]) -> None:
    for optimizer in optimizers:
        ATTACHED.add(optimizer)
        optimizer.defaults[MARK] = True
    for p in parameters:
        SPARSE[p] = True


def detach(optimizers: list[torch.optim.Optimizer], parameters: list[nn.Parameter]) -> None:
    for optimizer in optimizers:
        ATTACHED.discard(optimizer)
        optimizer.defaults.pop(MARK, None)
    for p in parameters:
        SPARSE.pop(p, None)
