"""The order of one sparse training step, in the hooks of the optimizer:

pre-hook     parameters <- latent; the method routes the gradients
post-hook    HAM's step, if asked for; latent <- parameters; clock += 1; the method may change the mask; parameters <- effective
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from optg.core.alarms import CollapseWatch, FrozenWatch, ZerosWatch
from optg.core.amp import return_loss, unscale
from optg.core.clock import Clock
from optg.core.optimizer_state import mask_second_weights
from optg.core.optimizers import ATTACHED, MARK, Round
from optg.core.refusals import keeps_two_weights
from optg.core.state import FirstMask
from optg.core.trials import Trials
from optg.core.updates import Updates
from optg.core.weights import SparseWeights
from optg.methods import Method


def refuse_copies(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if this optimizer is a copy of one that trains a sparse model: torch copies optimizers without their hooks."""
    if MARK in optimizer.defaults and optimizer not in ATTACHED:
        raise RuntimeError(
            "this optimizer is a copy of one that trains a sparse model, without its sparsifier: it would train dense. Call "
            "sparsify on the copied model and optimizer, then load_state_dict with the original sparsifier's state_dict"
        )


register_optimizer_step_pre_hook(refuse_copies)


def without_grad(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Run a hook without gradients. Unlike `torch.no_grad`, restore the mode even if Ctrl-C interrupts the restoring."""

    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            with torch.no_grad():
                return hook(*args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return run


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured, so that the host must not wait for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def make_updates(weights: SparseWeights, method: Method) -> Updates | None:
    """Return what changes the optimizer's steps; None if they can stay as they are."""
    return Updates.make(weights, method.ham, method.sparse_opt, method.dormant_gradient, method.rests_dead)


class SparseStep:
    """Hooks into one optimizer, or into several that train one model."""

    def __init__(
        self,
        name: str,
        method: Method,
        weights: SparseWeights,
        clock: Clock,
        optimizers: list[torch.optim.Optimizer],
        model: nn.Module,
    ) -> None:
        self.method, self.weights, self.clock = method, weights, clock
        self.first_mask: FirstMask | None = None  # until the first step
        self.zeros: ZerosWatch | None = None  # until the first step
        self.frozen: FrozenWatch | None = None  # if there are frozen weights
        self.updates = make_updates(weights, method)
        self.idle = method.when == "never" and self.updates is None
        self.two_weights = any(map(keeps_two_weights, optimizers))
        self.collapse = CollapseWatch(name, weights)
        self.collapse.warn(clock)
        self.round = Round(optimizers, weights.parameters, weights.devices[0]) if len(optimizers) > 1 else None
        self.inside = False  # inside a step the parameters hold latent weights
        self.trials = (
            Trials(model, weights, lambda: method.trial_threshold(clock), self.leave) if method.tries_dormant else None
        )
        self.hooks: list[RemovableHandle] = [*self.trials.hooks] if self.trials else []
        self.hooks += [o.register_step_pre_hook(self._before_step) for o in optimizers]
        self.hooks += [o.register_step_post_hook(self._after_step) for o in optimizers]

    @torch.compiler.disable
    @without_grad
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.zeros and not is_capturing():  # looking waits for the device
            self.zeros.warn()
        if self.first_mask and self.weights.effective and not is_capturing():
            self.first_mask.adopt_changes(self.weights)
        self.first_mask = self.zeros = None
        if self.idle:
            return args, kwargs
        if self.frozen:
            self.frozen.warn()
        weights, method, clock = self.weights, self.method, self.clock
        self.leave()
        weights.check()
        if self.round:
            if optimizer in self.round.stepped:
                self.end_round()
            weights.active, weights.active_index = self.round.layers[optimizer], self.round.index[optimizer]
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args begin with the optimizer itself
        if closure:
            with torch.enable_grad():
                loss = closure()  # on effective weights
        self.inside = True
        weights.skipped = unscale(optimizer) if getattr(optimizer, "found_inf", None) is not None else None
        weights.show_latent()
        if method.due_before_update(clock) and not (weights.skipped is not None and weights.skipped):
            method.exchange(weights, clock)  # a skipped step has no gradient to grow by; asking waits for the device
        method.after_backward(weights, clock, weights.learning_rates())
        if self.updates:
            self.updates.before_step()
        return (args[:1], {**kwargs, "closure": return_loss(loss, optimizer)}) if closure else (args, kwargs)

    @torch.compiler.disable
    @without_grad
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        capturing = is_capturing()
        if self.idle:
            if not capturing and (self.round is None or self.round.add(optimizer)):
                self._move_clock()
            return
        if self.updates:
            self.updates.after_step(self.method.dormant_gradient)
        if self.two_weights:
            mask_second_weights(self.weights.optimizer, self.weights.parameters, self.weights.masks)
        if self.method.freezes_dormant:
            self.weights.show_latent()  # undo what the optimizer did to dormant weights
        if capturing:
            self.weights.settle()  # the host's part of the step is `advance`, after each replay
        elif self.round:
            self.weights.settle()
            if self.round.add(optimizer):
                self.end_round()
        else:
            self._end_step()
        self.inside, self.weights.active = False, None

    def end_round(self) -> None:
        """End the step of all optimizers together."""
        assert self.round
        self.round.stepped.clear()
        self.weights.active = None
        self.weights.show_latent()
        self._end_step()

    def _end_step(self) -> None:
        """Move the clock and, if due, the mask; then show effective weights. The parameters hold latent ones."""
        self._move_clock()
        if self.clock.step <= self.clock.total and self.method.due_after_update(self.clock):
            if self.weights.latent is None:
                self.weights.show_effective()  # momentum may have moved removed weights, which are 0 at a cut
            self.method.after_update(self.weights, self.clock)
            self.renew()
        if self.clock.at_epoch_start or self.clock.step == self.clock.total:
            self.collapse.warn(self.clock)
        self.weights.settle()

    def renew(self) -> None:
        """Follow a change of the masks."""
        if self.updates:
            self.updates.renew()

    def _move_clock(self) -> None:
        self.clock.tick()
        self.method.set_time(self.clock)

    def leave(self) -> None:
        """Show effective weights again after a trial, or if a step was interrupted, maybe in the middle of a cut."""
        if self.inside and self.weights.shards is None:  # otherwise `finish` recounts, on all ranks at once
            self.weights.mask_set.recount()
        if self.inside or (self.trials and self.trials.open):
            self.weights.show_effective()
            self.inside, self.weights.active = False, None
        if self.trials:
            self.trials.close()

    def advance(self) -> None:
        """Count a step that the hooks did not see: one replayed from a CUDA graph, or one that a GradScaler skipped."""
        self.leave()
        self.weights.check()
        if self.method.due(self.clock.at(self.clock.step + 1)):
            self.inside = True
            self.weights.show_latent()
            self._end_step()
            self.inside = False
        else:
            self._move_clock()

    def end_partial_round(self) -> None:
        """End a step that some of several optimizers have not taken."""
        if self.round and self.round.stepped:
            self.end_round()

    def use_fixed_masks(self, method: Method) -> None:
        """Take the further steps by a method that never changes the masks."""
        for hook in self.trials.hooks if self.trials else ():
            hook.remove()
        self.method, self.trials = method, None
        self.updates = make_updates(self.weights, method)

    def remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.updates, self.trials = [], None, None
