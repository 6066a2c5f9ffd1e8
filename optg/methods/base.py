"""What a method is. The training loop, with the places where a method is asked:

    sparsify(model, optimizer, ...)         method.prepare           first mask, own state
    loss.backward()                         the untouched model      p.grad = dL/d(effective weight), dense
    optimizer.step()
        before it                           parameters <- latent
                                            method.after_backward    how the gradient reaches what is learned
        the optimizer                       any of torch's           moves the latent weights
        after it                            clock += 1
                                            method.after_update      a new mask?
                                            parameters <- effective
    sparsifier.finish()                     method.cut               only if the target was not reached

A method is a dataclass: its fields are its options.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optg.core.budgets import BUDGETS
from optg.core.clock import Clock
from optg.core.probe import Probe
from optg.core.schedules import SCHEDULES
from optg.core.weights import Soft, SparseWeights
from optg.naming import nearest


@dataclass
class Method:
    """What surrounds an ordinary optimizer step."""

    paper: ClassVar[str]
    when: ClassVar[str] = "during"  # does it prune before, during or after training?
    keeps_pruned: ClassVar[bool] = False  # do removed weights keep their value, to come back with it? Else they stay 0
    revives: ClassVar[bool] = True  # do removed weights come back at all?
    shardable: ClassVar[bool] = True  # does it work where FSDP2 has split the weights?
    learns_sparsity: ClassVar[bool] = False  # does the sparsity follow from training, whatever was asked for?
    freezes_weights: ClassVar[bool] = False  # are masks trained and weights not?
    descends: ClassVar[bool] = False  # does it learn by the gradient's sign, taking it for that of a loss that is to fall?

    def __post_init__(self) -> None:
        # What is learned beside the weights: a list has one tensor for each layer, a dict has names of its own.
        self.state: dict[str, list[Tensor] | dict[str, Tensor]] = {}

    @property
    def dormant_gradient(self) -> float:
        """The share of their gradient that removed weights receive."""
        return 0.0

    @property
    def freezes_dormant(self) -> bool:
        """Do momentum and decay pass over removed weights?"""
        return False

    @property
    def cycles(self) -> int:
        """Number of equal cycles that training consists of. The learning rate schedule should restart with each."""
        return 1

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        """Once, before training: the first mask, and what is learned beside the weights."""

    def set_time(self, clock: Clock) -> None:
        """Whenever the clock has moved: renew what depends on time alone and is read on the device during a step."""

    def after_backward(self, weights: SparseWeights, clock: Clock, lr: list[Tensor]) -> None:
        """Before the optimizer's step; the parameters hold latent weights, `lr` their learning rates (0-dim tensors)."""
        weights.route_gradients(self.dormant_gradient)

    def after_update(self, weights: SparseWeights, clock: Clock) -> None:
        """After the optimizer's step; the parameters hold latent weights, and the clock has moved on."""

    def due(self, clock: Clock) -> bool:
        """May `after_update` have something to do at this time?"""
        return type(self).after_update is not Method.after_update

    def capturable(self, clock: Clock) -> bool:
        """Is `after_backward` of the next step work for the device alone, so that a CUDA graph can replay it?"""
        return True

    def metrics(self, clock: Clock, lr: float) -> dict[str, float]:
        """What a log of training should say of the step that comes next, beside its learning rate."""
        return {}

    def effective(self, weights: SparseWeights, layer: int, latent: Tensor) -> Tensor:
        """What forward sees of a layer's kept weights; the mask comes after."""
        return latent

    def soft(self) -> Soft | None:
        """Where `effective` is the power threshold, what it depends on: a GPU then does it for all layers at once."""
        return None

    def layers(self, kind: str) -> list[Tensor]:
        """One list of the state."""
        values = self.state[kind]
        assert isinstance(values, list)
        return values

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """One dict of the state."""
        values = self.state[kind]
        assert isinstance(values, dict)
        return values

    def scores(self, weights: SparseWeights) -> list[Tensor]:
        """What is ranked: by default the magnitude of the weights."""
        return list(torch._foreach_abs(weights.values))

    def ranked(self, weights: SparseWeights) -> list[Tensor]:
        """The scores; where removed weights do not come back, theirs are below all others."""
        scores = self.scores(weights)
        return scores if self.revives else [s.where(mask, -math.inf) for s, mask in zip(scores, weights.masks)]

    def cut(self, weights: SparseWeights, sparsity: float) -> None:
        """Set the mask to a sparsity, by this method's own scores."""
        weights.cut(self.ranked(weights), sparsity)


LAYER_BUDGETS = ["global", "magnitude", *BUDGETS]


def refuse_unknown(what: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}; {nearest(value, known)}")


@dataclass
class Gradual(Method):
    """A method that cuts a mask by its scores, again and again, while the sparsity rises on a schedule."""

    keeps_cutting: ClassVar[bool] = False  # after the target is reached, until training ends?

    schedule: str = "cubic"  # how the sparsity rises: constant, linear, cosine, cubic (Zhu & Gupta), sigmoid (Eq. 15)
    start: float = 0.0  # of training: where the schedule begins
    end: float = 0.75  # of training: where it arrives at the target
    initial: float = 0.0  # the sparsity that the schedule rises from
    alpha: float | None = None  # steepness of the sigmoid; None: 0.5, or 40 / epochs in runs shorter than 80 epochs
    every: int | None = None  # steps between two cuts; None: cuts are made at the start of epochs
    every_epochs: int = 1  # epochs between two cuts, where `every` is None
    budget: str = "global"  # what each layer keeps: global (by score), uniform, erk, magnitude (GS: by global magnitude)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unknown("schedule", self.schedule, SCHEDULES)
        refuse_unknown("budget", self.budget, LAYER_BUDGETS)
        if not 0 <= self.start <= self.end <= 1:
            raise ValueError(f"start is {self.start} and end {self.end}; expected 0 ≤ start ≤ end ≤ 1")
        if not 0 <= self.initial < 1:
            raise ValueError(f"initial is {self.initial}; expected the sparsity to begin with, at least 0 and below 1")
        if self.alpha is not None and not self.alpha > 0:
            raise ValueError(f"alpha is {self.alpha}; expected more than 0, or None")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every is {self.every}; expected at least 1 step, or None for the start of epochs")
        if self.every_epochs < 1:
            raise ValueError(f"every_epochs is {self.every_epochs}; expected at least 1")

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        self.warn_of_a_jump(weights, clock)
        if self.initial or self.schedule == "constant":
            self.cut(weights, self.sparsity(weights, clock))

    def warn_of_a_jump(self, weights: SparseWeights, clock: Clock) -> None:
        """A flat sigmoid has not arrived when its last cut is due, which then takes the rest at once."""
        last, target = self.last_cut(clock), weights.target
        reached = self.scheduled(weights, Clock(clock.epochs, clock.steps_per_epoch, last))
        share = (target - reached) / (1 - reached)
        if self.schedule == "sigmoid" and share > 0.5:
            warnings.warn(
                f"with alpha={self.alpha} and end={self.end} the sparsity is at {reached:.2%} when the last cut is due, step "
                f"{last} of {clock.total}: to arrive at {target:.2%} it will remove {share:.0%} of what is left at once. Give "
                "it a larger alpha (or None) or a later end",
                stacklevel=6,
            )

    def after_update(self, weights: SparseWeights, clock: Clock) -> None:
        if self.due(clock):
            self.cut(weights, self.sparsity(weights, clock))

    def cut(self, weights: SparseWeights, sparsity: float) -> None:
        weights.cut(self.ranked(weights), sparsity, self.budget)

    def period(self, clock: Clock) -> int:
        """Steps between two cuts."""
        return self.every or self.every_epochs * clock.steps_per_epoch

    def last_cut(self, clock: Clock) -> int:
        """The step whose cut arrives at the target: the last regular one up to `end` that leaves steps to train after it."""
        every, end = self.period(clock), min(round(self.end * clock.total), clock.total - 1)
        regular = end - end % every
        return max(1, regular if regular and regular >= self.start * clock.total else end)

    def due(self, clock: Clock) -> bool:
        """Is a cut to be made now?"""
        last = self.last_cut(clock)
        regular = clock.step % self.period(clock) == 0 and clock.step > 0 and clock.progress >= self.start
        return clock.step == last or (regular and (clock.step < last or self.keeps_cutting))

    def sparsity(self, weights: SparseWeights, clock: Clock) -> float:
        """The schedule's, and from the last cut on the target."""
        return weights.target if clock.step >= self.last_cut(clock) else self.scheduled(weights, clock)

    def scheduled(self, weights: SparseWeights, clock: Clock) -> float:
        """Where the schedule stands now, which may be short of the target at its end."""
        initial = min(self.initial, weights.target)
        return initial + (weights.target - initial) * SCHEDULES[self.schedule](clock, self.start, self.end, self.alpha)
