"""Attach a method to a model and its optimizer: `sparsify`, the order of one step, and what a user asks of the sparse model.

The model is untouched. All work happens in the optimizer's own step hooks:

    pre-hook     parameters <- latent; the method routes the gradients
    post-hook    latent <- parameters; clock += 1; the method may change the mask; parameters <- effective
"""

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn

from optg.core.alarms import CollapseWatch, ZerosWatch, warn_if_far, warn_of_last_cut
from optg.core.amp import return_loss, unscale
from optg.core.averages import mask_model
from optg.core.clipping import clip_grad_norm_
from optg.core.clock import ENDLESS, Clock
from optg.core.coverage import warn_of_coverage
from optg.core.floors import Floor
from optg.core.probe import Loss, Probe
from optg.core.prunable import Pattern, as_patterns, find_axes, find_prunable
from optg.core.refusals import refuse_optimizer, refuse_parameters, refuse_sparsity, refuse_target
from optg.core.state import FirstMask, StateParts, by_name
from optg.core.summary import LayerSummary, as_table, describe_progress, summarize
from optg.core.weights import SparseWeights
from optg.methods import Method, current_options, resolve

if TYPE_CHECKING:
    from optg.terminal import Table

ATTACHED: WeakSet[torch.optim.Optimizer] = WeakSet()


def sparsify(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: str | Method = "optg",
    *,
    sparsity: float | None = None,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
    include: Pattern | Iterable[Pattern] | None = None,
    exclude: Pattern | Iterable[Pattern] = (),
    floor: float = 0.0,
    floor_by: str = "part",
    loss: Loss | None = None,
    batches: Iterable[Any] | None = None,
) -> "Sparsifier":
    """Make `model` sparse while `optimizer` trains it. The training loop stays as it is.

    Args:
        method: a name from `optg.methods.METHODS`, or an instance of a method with options of its own.
        sparsity: the share of weights to remove, 0 ≤ sparsity < 1. Exactly ⌈sparsity · N⌉ of N weights will be 0.
            Every method but "keep" needs it, and the length of training.
        epochs, steps_per_epoch: the length of training; `steps_per_epoch` counts calls of `optimizer.step()`.
        include: prune only these weights, given as module classes or shell patterns for names ("encoder.*"). `...` stands for
            the default: all trained weights of linear, convolution, attention and recurrent layers, experts, and classes
            given to `optg.prunable`.
        exclude: do not prune these weights, given in the same way.
        floor, floor_by: the share of its weights that each part of a layer keeps at least (`floor_by="part"`: an LSTM's gate,
            an expert, most often the whole layer), or each output neuron (`floor_by="output"`).
        loss, batches: for methods that prune before training: the loss as a function of the model and a batch, and an
            iterable of batches, such as the training loader, of which only the first ones are used.
    """
    name, chosen = resolve(method)
    refuse_target(name, chosen.needs_target, sparsity=sparsity, epochs=epochs, steps_per_epoch=steps_per_epoch)
    target = 0.0 if sparsity is None else sparsity
    refuse_sparsity(target)
    refuse_optimizer(optimizer, type(chosen).__name__, chosen.needs_minimization)
    if optimizer in ATTACHED:
        raise ValueError("this optimizer has a sparsifier already; call its finish() first")
    chosen_patterns = None if include is None else as_patterns(include), as_patterns(exclude)
    parameters = find_prunable(model, *chosen_patterns)
    refuse_parameters(parameters, optimizer)
    warn_of_coverage(model, parameters, *chosen_patterns)
    limit = Floor(floor, floor_by) if floor else None
    if limit and not chosen.needs_target:
        raise ValueError(f"{name} keeps the zeros that the model has; leave out `floor`")
    weights = SparseWeights(parameters, optimizer, float(target), find_axes(model, parameters))
    if limit:
        weights.mask_set.set_floor(limit, weights.axes, weights.target)
    clock = Clock(1 if epochs is None else epochs, ENDLESS if steps_per_epoch is None else steps_per_epoch)
    return Sparsifier(name, chosen, weights, clock, Probe(model, loss, batches))


class Sparsifier:
    """A method at work on a model. Made by `sparsify`; the optimizer's hooks keep it alive."""

    @torch.no_grad()
    def __init__(self, name: str, method: Method, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        self.name, self.method, self.weights, self.clock = name, method, weights, clock
        self.optimizer = optimizer = weights.optimizer
        before = [v.clone() for v in weights.values]
        self._zeros = ZerosWatch(weights, expected=not method.needs_target)
        method.prepare(weights, clock, probe)
        method.set_time(clock)
        if method.keeps_pruned:
            weights.latent = [v.clone() for v in weights.values]
        if type(method).effective is not Method.effective:
            weights.effective, weights.soft_threshold = partial(method.effective, weights), method.soft_threshold
        weights.show_effective()
        self._first_mask: FirstMask | None = FirstMask(before, weights)
        self._collapse = CollapseWatch(name, weights)
        self._collapse.warn(clock)
        self._in_step = False  # inside a step the parameters hold latent weights
        self._hooks = [optimizer.register_step_pre_hook(self._before_step), optimizer.register_step_post_hook(self._after_step)]
        ATTACHED.add(optimizer)

    # ---- one step

    @torch.compiler.disable
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._zeros.warn()
        if self.method.when == "never":
            return args, kwargs
        weights, method, clock = self.weights, self.method, self.clock
        with torch.no_grad():
            self._leave_step()
            weights.check()
            self._first_mask = None
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args begin with the optimizer itself
            if closure:
                with torch.enable_grad():
                    loss = closure()  # on effective weights
            self._in_step = True
            weights.skipped = unscale(optimizer) if getattr(optimizer, "found_inf", None) is not None else None
            weights.show_latent()
            if method.due_before_update(clock) and not (weights.skipped is not None and weights.skipped):
                method.exchange(weights, clock)  # a skipped step has no gradient to grow by; asking waits for the device
            method.after_backward(weights, clock, weights.learning_rates())
        return (args[:1], {**kwargs, "closure": return_loss(loss, optimizer)}) if closure else (args, kwargs)

    @torch.compiler.disable
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self.method.when == "never":
            if not capturing:
                self._move_clock()
            return
        with torch.no_grad():
            if self.method.freezes_dormant:
                self.weights.show_latent()  # undo what the optimizer did to dormant weights
            if capturing:
                self.weights.settle()  # the host's part of the step is `advance`, after each replay
            else:
                self._end_step()
            self._in_step = False

    def _end_step(self) -> None:
        """Move the clock and, if due, the mask; then show effective weights. The parameters hold latent ones."""
        self._move_clock()
        if self.clock.step <= self.clock.total and self.method.due_after_update(self.clock):
            if self.weights.latent is None:
                self.weights.show_effective()  # momentum may have moved removed weights, which are 0 at a cut
            self.method.after_update(self.weights, self.clock)
        if self.clock.at_epoch_start or self.clock.step == self.clock.total:
            self._collapse.warn(self.clock)
        self.weights.settle()

    def _move_clock(self) -> None:
        self.clock.tick()
        self.method.set_time(self.clock)

    def _leave_step(self) -> None:
        """Show effective weights again if a step was interrupted between the hooks."""
        if self._in_step:
            self.weights.show_effective()
            self._in_step = False

    @torch.no_grad()
    def advance(self) -> None:
        """Count a step that the hooks did not see: one replayed from a CUDA graph, or one that a GradScaler skipped."""
        self._leave_step()
        self.weights.check()
        if self.method.due_after_update(self.clock.at(self.clock.step + 1)):
            self.weights.show_latent()
            self._end_step()
        else:
            self._move_clock()

    @property
    def capturable(self) -> bool:
        """Whether the next step may be captured in a CUDA graph or replayed from one. Otherwise run it eagerly."""
        return self.method.capturable(self.clock)

    @torch.no_grad()
    def reload(self) -> None:
        """Take the parameters as the new latent weights, removed ones too. Call it after writing to removed weights."""
        self._in_step = False
        self.weights.store_latent()
        self.weights.show_effective()

    # ---- what a user asks

    @property
    def sparsity(self) -> float:
        """The share of weights that the masks remove now."""
        return self.weights.sparsity

    @property
    @torch.no_grad()
    def masks(self) -> dict[str, Tensor]:
        """The mask of each layer by name, True where a weight is kept. Not copies."""
        self._leave_step()
        self.weights.check()
        return by_name(self.weights, self.weights.masks)

    def layers(self) -> list[LayerSummary]:
        """Return what each layer keeps, and what the last change of its mask removed and revived."""
        return summarize(self.weights)

    def summary(self) -> "Table":
        """Return `layers()` as a table to print: `rich.print(sparsifier.summary())`."""
        return as_table(self.layers(), f"{self.name}, {self.clock.position}")

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip like `torch.nn.utils.clip_grad_norm_`, by the norm of the gradients that the weights will receive.

        Gradients are dense, and most of their norm belongs to removed weights: at 98 % sparsity about 7 times the rest.
        """
        self._leave_step()
        return clip_grad_norm_(self.weights, self.method.dormant_gradient, max_norm, norm_type)

    @torch.no_grad()
    def apply_masks(self, model: nn.Module) -> None:
        """Remove from another model with the same layers (an EMA or SWA average) the weights that are removed here."""
        mask_model(model, self.masks)

    # ---- state

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values. Save them with the model's and the optimizer's state to resume bit for bit."""
        self._leave_step()
        self.weights.check()
        return self._parts.save()

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state. Its model may have been wrapped or distributed in another way.

        The model's own state may be loaded before `sparsify`, after it, or after this call.
        """
        self._leave_step()
        if "options" in state:
            state = {**state, "options": current_options(self.name, state["options"])}
        self._parts.load(state, self._first_mask)
        self._first_mask = None
        self._zeros.dismiss()
        self.method.set_time(self.clock)
        self.weights.show_effective()

    @property
    def _parts(self) -> StateParts:
        return StateParts(self.name, asdict(self.method), self.method.state, self.weights, self.clock)

    @torch.no_grad()
    def finish(self) -> None:
        """Leave a plain sparse model behind: remove the hooks, free latent weights and scores. Masks and summary stay."""
        self._leave_step()
        if not self._hooks:
            return
        (weights := self.weights).check()
        if self.method.learns_sparsity and self.method.needs_target:
            warn_if_far(weights, self.name, str(self.method))
        elif not self.method.learns_sparsity and int(weights.counts[:, 0].sum()) != weights.zeros(weights.target):
            warn_of_last_cut(weights, self.clock)
            weights.show_latent()
            self.method.cut(weights, weights.target)
            weights.check()
            weights.show_effective()
        for hook in self._hooks:
            hook.remove()
        self._hooks, weights.latent, self.method.state = [], None, {}
        ATTACHED.discard(self.optimizer)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a sparsifier cannot be copied or pickled: torch copies an optimizer without its hooks, so the copy would train "
            "dense. Call sparsify on the copied model and optimizer, then load_state_dict with this one's state_dict"
        )

    def __repr__(self) -> str:
        return f"Sparsifier({self.method}, {describe_progress(self.weights, self.clock, self.method.needs_target)})"
