"""What a method is. The training loop, with the places where a method is called:

    sparsify(model, optimizer, ...)         method.prepare           first mask, own state
    model(x)                                method.trial_threshold   forward may try dormant weights (phoenix)
    loss.backward()                         the untouched model      p.grad = dL/d(effective weight), dense
    optimizer.step()
        before it                           parameters <- latent
                                            method.exchange          if it changes the mask by the dense gradient
                                            method.after_backward    route the gradient to what is learned
                                            rests_dead               no gradient for neurons without any weight
                                            SparseOpt                if asked for: a factor per output neuron
        the optimizer                       any of torch's           moves the latent weights
        after it                            HAM                      if asked for: a multiplicative step
                                            clock += 1
                                            method.after_update      if the mask changes now
                                            parameters <- effective
    sparsifier.finish()                     method.cut               only if the target was not reached

A method is a dataclass: its fields are its options.
"""

import math
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from optg.core.budgets import BUDGETS
from optg.core.clock import Clock
from optg.core.passes.reference import SoftThreshold
from optg.core.probe import Probe
from optg.core.schedules import SCHEDULES
from optg.core.weights import SparseWeights
from optg.naming import nearest


@dataclass
class Method:
    """The parts of a training step that differ between methods. The defaults train with a fixed mask."""

    paper: ClassVar[str]
    when: ClassVar[str] = "during"  # when it prunes: before, during or after training, or never
    keeps_pruned: ClassVar[bool] = False  # dormant weights keep their value and come back with it; otherwise they are 0
    revives: ClassVar[bool] = True  # removed weights can come back
    grows_by_gradient: ClassVar[bool] = False  # the mask changes before the optimizer's step, by the dense gradient
    needs_target: ClassVar[bool] = True  # `sparsify` must be told the sparsity and the length of training
    learns_sparsity: ClassVar[bool] = False  # the sparsity follows from training, whatever the target
    needs_minimization: ClassVar[bool] = False  # it learns from the gradient's sign, so the loss must be minimized
    needs_all_gradients: ClassVar[bool] = False  # it reads all gradients at once, so it works with one optimizer only
    regrows_at_zero: ClassVar[bool] = False  # removed weights come back, and start at 0
    single_weights: ClassVar[str] = ""  # why it can only remove single weights; empty if it can remove them in groups
    rate_schedule: ClassVar[str | None] = None  # the schedule of the learning rate that it is meant for, if one
    renamed: ClassVar[dict[str, str]] = {}  # options of earlier versions: old name -> new name
    removed: ClassVar[dict[str, tuple[Any, ...]]] = {}  # options of earlier versions, and their values that had no effect
    added: ClassVar[dict[str, float]] = {"ham": 0.0, "sparse_opt": False}  # options that states of earlier versions lack

    ham: float = field(default=0.0, kw_only=True)  # α of HAM, a multiplicative step after each additive one (50 to 200); 0: off
    # SparseOpt: scale the updates of each output neuron by the square root of its density, relative to its layer's
    sparse_opt: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.ham < math.inf:
            raise ValueError(f"ham is {self.ham}; expected α, at least 0")
        # Learned beside the weights and saved with them: a list has one tensor per layer, a dict has names of its own.
        self.state: dict[str, list[Tensor] | dict[str, Tensor]] = {}

    @classmethod
    def current_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Return options that an earlier version may have saved, as this version has them."""
        renamed = {cls.renamed.get(name, name): value for name, value in options.items()}
        removed = cls.removed.keys() - {field.name for field in fields(cls)}
        return {name: v for name, v in renamed.items() if name not in removed or v not in cls.removed[name]}

    @property
    def dormant_gradient(self) -> float:
        """The share of their gradient that dormant weights receive."""
        return 0.0

    @property
    def rests_dead(self) -> bool:
        """Whether the weights of output neurons that have lost all of them receive no gradient."""
        return False

    @property
    def freezes_dormant(self) -> bool:
        """Whether momentum and weight decay leave dormant weights alone."""
        return False

    @property
    def tries_dormant(self) -> bool:
        """Whether some training steps use a lower threshold in forward, see `trial_threshold`."""
        return False

    @property
    def cycles(self) -> int:
        """The number of equal cycles that training consists of. The learning rate should restart with each."""
        return 1

    @property
    def least_epochs(self) -> int:
        """The epochs that the method needs. A shorter run is divided as if its length were given in steps alone."""
        return 1

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        """Make the first mask and the method's state. Called once, before training."""

    def set_time(self, clock: Clock) -> None:
        """Update tensors that depend on time alone. Called whenever the clock has moved."""

    def target_step(self, clock: Clock) -> int:
        """Return the step after which the mask has the target sparsity. 0 if it has from the beginning, or never."""
        return 0

    def due(self, clock: Clock) -> bool:
        """Return whether the mask may change now. `after_update` and `exchange` are called only then."""
        return type(self).after_update is not Method.after_update

    def due_before_update(self, clock: Clock) -> bool:
        return self.grows_by_gradient and self.due(clock)

    def due_after_update(self, clock: Clock) -> bool:
        return not self.grows_by_gradient and self.due(clock)

    def exchange(self, weights: SparseWeights, clock: Clock) -> None:
        """Change the mask while the dense gradient is available. Called only if `grows_by_gradient`."""

    def after_backward(self, weights: SparseWeights, clock: Clock, lr: list[Tensor]) -> None:
        """Route the gradient. The parameters hold latent weights; `lr` has a scalar tensor per layer, 0 for "do not move"."""
        weights.mask_gradients(self.dormant_gradient)

    def after_update(self, weights: SparseWeights, clock: Clock) -> None:
        """Change the mask after the optimizer's step. The parameters hold latent weights; the clock has moved."""

    def capturable(self, clock: Clock) -> bool:
        """Return whether a CUDA graph can replay the next step: its forward is as usual, no mask changes before it."""
        return not self.due_before_update(clock) and self.trial_threshold(clock) is None

    def reads_removed(self, clock: Clock) -> bool:
        """Return whether the next step reads the gradients of removed weights, which then must be computed."""
        return self.dormant_gradient > 0 or self.due_before_update(clock)

    def metrics(self, clock: Clock, lr: float) -> dict[str, float]:
        """Return numbers to log about the next step, besides its learning rate."""
        return {}

    def effective(self, weights: SparseWeights, layer: int, latent: Tensor) -> Tensor:
        """Return what forward sees of a layer's kept weights. The mask is applied afterwards."""
        return latent

    def soft_threshold(self) -> SoftThreshold | None:
        """Return the numbers behind `effective` if it is a soft threshold, so that all layers can be computed at once."""
        return None

    def trial_threshold(self, clock: Clock) -> SoftThreshold | None:
        """Return a lower threshold that forward uses in the next training step, if this step tries dormant weights."""
        return None

    def release(self) -> None:
        """Free what was learned beside the weights: training has ended."""
        self.state = {}
        vars(self).pop("sgd", None)  # a ScoreSGD, whose lists are the state's

    def layers(self, kind: str) -> list[Tensor]:
        """Return one list of the state."""
        values = self.state[kind]
        assert isinstance(values, list)
        return values

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """Return one dict of the state."""
        values = self.state[kind]
        assert isinstance(values, dict)
        return values

    def scores(self, weights: SparseWeights) -> list[Tensor]:
        """Return the scores to rank: by default the magnitudes of the weights."""
        return list(torch._foreach_abs(weights.values))

    def ranked(self, weights: SparseWeights) -> list[Tensor]:
        """Return the scores. If the method never revives weights, removed ones rank below all others."""
        scores = self.scores(weights)
        return scores if self.revives else [s.where(mask, -math.inf) for s, mask in zip(scores, weights.masks)]

    def cut(self, weights: SparseWeights, sparsity: float) -> None:
        """Recompute the mask from this method's scores."""
        weights.cut(self.ranked(weights), sparsity)


LAYER_BUDGETS = ["global", "magnitude", *BUDGETS]


def refuse_unknown(what: str, value: str, known: Iterable[str]) -> None:
    if value not in (known := list(known)):
        raise ValueError(f"unknown {what} {value!r}; {nearest(value, known)}")


def epochs_between_cuts(every: int | str) -> int | None:
    """Return 1 for "epoch", 5 for "5 epochs" and None for a number of steps."""
    if isinstance(every, int) and every >= 1:
        return None
    match = re.fullmatch(r"epoch|([1-9]\d*) epochs?", every) if isinstance(every, str) else None
    if match is None:
        raise ValueError(f'every is {every!r}; expected a number of steps, "epoch", or a number of epochs such as "5 epochs"')
    return int(match[1] or 1)


@dataclass
class Gradual(Method):
    """A method that cuts its mask repeatedly while the sparsity rises on a schedule."""

    keeps_cutting: ClassVar[bool] = False  # cuts continue after the target is reached, until training ends
    removed: ClassVar[dict[str, tuple[Any, ...]]] = {"alpha": (None, "none"), "initial": (0.0,)}

    schedule: str = "cubic"  # how the sparsity rises: constant, linear, cosine, cubic (Zhu & Gupta), sigmoid (Eq. 15)
    start: float = 0.0  # where the schedule begins, as a share of training
    end: float = 0.75  # where it reaches the target, as a share of training
    every: int | str = "epoch"  # time between two cuts: a number of steps, "epoch", or a number of epochs such as "5 epochs"
    budget: str = "global"  # how many weights each layer keeps: global (by score), uniform, erk, magnitude (by magnitude)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unknown("schedule", self.schedule, SCHEDULES)
        refuse_unknown("budget", self.budget, LAYER_BUDGETS)
        if not 0 <= self.start <= self.end <= 1:
            raise ValueError(f"start is {self.start} and end is {self.end}; expected 0 ≤ start ≤ end ≤ 1")
        if not 0 <= self.initial < 1:
            raise ValueError(f"initial is {self.initial}; expected a sparsity of at least 0 and below 1")
        if self.alpha is not None and not self.alpha > 0:
            raise ValueError(f"alpha is {self.alpha}; expected more than 0, or None")
        self.every_epochs = epochs_between_cuts(self.every)  # None if `every` is a number of steps

    @classmethod
    def current_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        options = super().current_options(options)
        epochs = options.pop("every_epochs", 1)  # an option of earlier versions that counted where `every` was None
        if options.get("every", cls.every) in (None, "none", "epoch"):
            options["every"] = "epoch" if epochs == 1 else f"{epochs} epochs"
        return options

    @property
    def alpha(self) -> float | None:
        """Steepness of the sigmoid schedule; None: its default. OptG has it as an option."""
        return None

    @property
    def initial(self) -> float:
        """The sparsity at which the schedule begins. GraNet has it as an option."""
        return 0.0

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        self.warn_of_a_jump(weights, clock)
        if self.schedule == "constant":
            self.cut(weights, self.sparsity(weights, clock))

    def warn_of_a_jump(self, weights: SparseWeights, clock: Clock) -> None:
        """Warn if a flat sigmoid is still far from the target at its last cut, which then removes the rest at once."""
        last, target = self.last_cut(clock), weights.target
        reached = self.scheduled(weights, clock.at(last))
        share = (target - reached) / (1 - reached)
        if self.schedule == "sigmoid" and share > 0.5:
            warnings.warn(
                f"with alpha={self.alpha} and end={self.end} the sparsity is only {reached:.2%} before the last cut, at step "
                f"{last} of {clock.total}. To reach {target:.2%}, that cut removes {share:.0%} of the kept weights at once. "
                "Use a later end, or with OptG a larger alpha (or None)",
                stacklevel=6,
            )

    def after_update(self, weights: SparseWeights, clock: Clock) -> None:
        self.cut(weights, self.sparsity(weights, clock))

    def cut(self, weights: SparseWeights, sparsity: float) -> None:
        weights.cut(self.ranked(weights), sparsity, self.budget)

    def period(self, clock: Clock) -> int:
        """Return the step of the first regular cut."""
        return clock.end_of(self.every_epochs) if self.every_epochs else int(self.every)

    def is_regular(self, clock: Clock) -> bool:
        """Return whether this step is a multiple of `every`."""
        if self.every_epochs:
            return clock.between_epochs and clock.epochs_before(clock.step) % self.every_epochs == 0
        return clock.step % int(self.every) == 0

    def last_cut(self, clock: Clock) -> int:
        """Return the step of the cut that reaches the target: the last regular one up to `end`, with steps left after it."""
        end = min(round(self.end * clock.total), clock.total - 1)
        epochs = clock.epochs_before(end)
        regular = clock.end_of(epochs - epochs % self.every_epochs) if self.every_epochs else end - end % int(self.every)
        return max(1, regular if regular and regular >= self.start * clock.total else end)

    def target_step(self, clock: Clock) -> int:
        return self.last_cut(clock)

    def due(self, clock: Clock) -> bool:
        last = self.last_cut(clock)
        regular = self.is_regular(clock) and clock.step > 0 and clock.progress >= self.start
        return clock.step == last or (regular and (clock.step < last or self.keeps_cutting))

    def sparsity(self, weights: SparseWeights, clock: Clock) -> float:
        """Return the sparsity of a cut made now: the schedule's, and the target from the last cut on."""
        return weights.target if clock.step >= self.last_cut(clock) else self.scheduled(weights, clock)

    def scheduled(self, weights: SparseWeights, clock: Clock) -> float:
        """Return the schedule's sparsity, which may end short of the target."""
        initial = min(self.initial, weights.target)
        return initial + (weights.target - initial) * SCHEDULES[self.schedule](clock, self.start, self.end, self.alpha)
