"""Attach a method to a model and its optimizer: `sparsify`, and what a user asks of the sparse model.

The model is untouched. All work happens in the optimizer's own step hooks: see `optg.step`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from optg.core.alarms import FrozenWatch, ZerosWatch, reach_target
from optg.core.assignment import StructureLike, assign_structures
from optg.core.averages import mask_model
from optg.core.clipping import clip_grad_norm_
from optg.core.clock import ENDLESS, Clock
from optg.core.coverage import find_frozen, warn_of_coverage
from optg.core.floors import Floor
from optg.core.optimizers import attach, detach, join, refuse_attached
from optg.core.probe import Loss, Probe
from optg.core.prunable import Pattern, as_patterns, find_prunable
from optg.core.refusals import (
    refuse_fsdp1,
    refuse_optimizer,
    refuse_parameters,
    refuse_sparsity,
    refuse_structure,
    refuse_target,
)
from optg.core.state import FirstMask, StateParts, by_name
from optg.core.summary import LayerSummary, as_table, describe_progress, notes_on, summarize
from optg.core.truth import Verification, refuse_nonfinite, remove_again, verify
from optg.core.weights import SparseWeights
from optg.methods import Method, resolve
from optg.methods.keep import Keep
from optg.step import SparseStep

if TYPE_CHECKING:
    from optg.terminal import Table


def sparsify(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    method: str | Method = "optg",
    *,
    sparsity: float | None = None,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
    steps: int | None = None,
    include: Pattern | Iterable[Pattern] | None = None,
    exclude: Pattern | Iterable[Pattern] = (),
    structure: StructureLike = "unstructured",
    example: Any = None,
    floor: float = 0.0,
    floor_by: str = "part",
    loss: Loss | None = None,
    batches: Iterable[Any] | None = None,
) -> "Sparsifier":
    """Make `model` sparse while `optimizer` trains it. The training loop stays as it is.

    Args:
        optimizer: the optimizer that trains the model, as it is or wrapped by accelerate, opacus or fastai; or several
            optimizers of its parameters, which then share one budget.
        method: a name from `optg.methods.METHODS`, or an instance of a method with options of its own.
        sparsity: the share of weights to remove, 0 ≤ sparsity < 1. Exactly ⌈sparsity · N⌉ of N weights will be 0.
            Every method but "keep" needs it, and the length of training. An N:M structure implies it.
        steps: the length of training, in calls of `optimizer.step()`.
        epochs, steps_per_epoch: the other way to give it. Methods that cut once per epoch follow these epochs; with `steps`
            alone they take min(100, steps) epochs of equal length, and so does OptG if `epochs` is 1.
        include: prune only these weights, given as module classes or shell patterns for names ("encoder.*"). `...` stands for
            the default: all trained weights of linear, convolution, attention and recurrent layers, experts, and classes
            given to `optg.prunable`.
        exclude: do not prune these weights, given in the same way.
        structure: what is removed together: "unstructured" (single weights), "N:M" (all but N of every M neighbouring inputs),
            "RxC" (blocks of filters × input channels), "channel" (whole output channels, with all that is coupled to them),
            or a dict from patterns, as for `include`, to these; the first match counts.
        example: an input of the model, or a tuple of its arguments. The structure "channel" needs it; for a model that FSDP2
            has split, pass the groups that `optg.core.channels.coupled_channels` finds before.
        floor, floor_by: the share of its weights that each part of a layer keeps at least (`floor_by="part"`: an LSTM's gate,
            an expert, most often the whole layer), or each output neuron (`floor_by="output"`).
        loss, batches: for methods that prune before training: the loss as a function of the model and a batch, and an
            iterable of batches, such as the training loader, of which only the first ones are used.
    """
    name, chosen = resolve(method)
    optimizers, joint = join(optimizer)
    for one in optimizers:
        refuse_optimizer(one, type(chosen).__name__, chosen.needs_minimization or chosen.ham > 0)
    if len(optimizers) > 1 and chosen.needs_all_gradients:
        raise ValueError(f"{name} uses the gradients of all weights at once, so it works with a single optimizer only")
    refuse_fsdp1(model)
    patterns = None if include is None else as_patterns(include), as_patterns(exclude)
    parameters = find_prunable(model, *patterns)
    refuse_parameters(parameters, joint)
    refuse_attached(optimizers, parameters)
    warn_of_coverage(model, parameters, *patterns)
    assigned = assign_structures(model, parameters, structure, example)
    refuse_structure(name, chosen, assigned)
    sparsity = assigned.target(sparsity)
    refuse_target(name, chosen.needs_target, sparsity)
    target = 0.0 if sparsity is None else sparsity
    refuse_sparsity(target)
    refuse_parameters(assigned.parameters, joint)
    weights = SparseWeights(assigned.parameters, joint, float(target), assigned.axes, model, assigned)
    if floor and not chosen.needs_target:
        raise ValueError(f"{name} keeps the zeros that the model has; leave out `floor`")
    weights.mask_set.set_floor(Floor(floor, floor_by) if floor else None, weights.target)
    weights.mask_set.refuse_target(weights.target)
    endless = not chosen.needs_target and (epochs, steps_per_epoch, steps) == (None, None, None)
    clock = Clock(1, ENDLESS) if endless else Clock.of(epochs, steps_per_epoch, steps)
    if clock.epochs < chosen.least_epochs:
        clock = Clock.of(None, None, clock.total)
    sparsifier = Sparsifier(name, chosen, weights, clock, Probe(model, loss, batches, name), optimizers)
    if frozen := find_frozen(model, *patterns):
        sparsifier._step.frozen = FrozenWatch(frozen)
    return sparsifier


class Sparsifier:
    """A method at work on a model. Made by `sparsify`; the optimizer's hooks keep it alive."""

    @torch.no_grad()
    def __init__(
        self,
        name: str,
        method: Method,
        weights: SparseWeights,
        clock: Clock,
        probe: Probe,
        optimizers: list[torch.optim.Optimizer],
    ) -> None:
        self.name, self.method, self.weights, self.clock = name, method, weights, clock
        self.model, self.optimizers, self.optimizer = probe.model, optimizers, weights.optimizer
        self.frozen = False
        before, zeros = [v.clone() for v in weights.values], ZerosWatch(weights, expected=not method.needs_target)
        method.prepare(weights, clock, probe)
        method.set_time(clock)
        if method.keeps_pruned:
            weights.latent = [v.clone() for v in weights.values]
        if type(method).effective is not Method.effective:
            weights.effective, weights.soft_threshold = partial(method.effective, weights), method.soft_threshold
        weights.show_effective()
        self._step = SparseStep(name, method, weights, clock, optimizers, self.model)
        if weights.effective or not all(map(torch.equal, before, weights.values)):
            self._step.first_mask = FirstMask(before, weights)
        self._step.zeros = zeros
        attach(optimizers, weights.parameters)

    # ---- unusual steps

    @torch.no_grad()
    def advance(self) -> None:
        """Count a step that the hooks did not see: one replayed from a CUDA graph, or one that a GradScaler skipped."""
        self._step.advance()

    @property
    def capturable(self) -> bool:
        """Whether the next step may be captured in a CUDA graph or replayed from one. Otherwise run it eagerly."""
        return self.method.capturable(self.clock)

    @torch.no_grad()
    def reload(self) -> None:
        """Take the parameters as the new latent weights, removed ones too. Call it after writing to removed weights."""
        self._step.inside = False
        self.weights.store_latent()
        self.weights.show_effective()

    @torch.no_grad()
    def freeze(self) -> None:
        """Keep the masks as they are from now on, and train the kept weights. For a last phase, such as with quantization.

        Dormant weights and scores are freed. Raises if the target sparsity has not been reached yet.
        """
        self._step.leave()
        if self.frozen:
            return
        self.weights.check()
        if self.method.needs_target and not self.method.learns_sparsity and any(self.weights.missing_zeros()):
            raise ValueError(
                f"the sparsity is {self.weights.sparsity:.4f} at {self.clock.position}; expected {self.weights.target} before "
                f"freeze(): {self.name} reaches it at step {self.method.target_step(self.clock)}"
            )
        self._fix_masks()

    def _fix_masks(self) -> None:
        self.frozen = True
        self._forget_dormant()
        self.method = Keep(ham=self.method.ham, sparse_opt=self.method.sparse_opt)
        self._step.use_fixed_masks(self.method)

    def _forget_dormant(self) -> None:
        """Leave the effective weights in the parameters, and free what the method has learned beside them."""
        self._step.first_mask = self.weights.latent = self.weights.effective = None
        self.weights.soft_threshold = lambda: None  # with `effective`, a reference cycle that would keep the weights alive
        self.method.release()

    # ---- queries, clipping and averages

    @property
    @torch.no_grad()
    def sparsity(self) -> float:
        """The share of weights that the masks remove now."""
        self._step.leave()
        return self.weights.sparsity

    @property
    @torch.no_grad()
    def masks(self) -> dict[str, Tensor]:
        """The mask of each layer by name, True where a weight is kept. Not copies."""
        self._step.leave()
        self.weights.check()
        return by_name(self.weights, self.weights.masks)

    @torch.no_grad()
    def layers(self) -> list[LayerSummary]:
        """Return what each layer keeps, and what the last change of its mask removed and revived."""
        self._step.leave()
        return summarize(self.weights)

    def summary(self) -> "Table":
        """Return `layers()` as a table to print: `rich.print(sparsifier.summary())`."""
        return as_table(self.layers(), f"{self.name}, {self.clock.position}", notes_on(self.weights, self.model))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip like `torch.nn.utils.clip_grad_norm_`, by the norm of the gradients that the weights will receive.

        Gradients are dense, and most of their norm belongs to removed weights: at 98 % sparsity about 7 times the rest.
        """
        self._step.leave()
        return clip_grad_norm_(self.weights, self.method.dormant_gradient, max_norm, norm_type)

    @torch.no_grad()
    def apply_masks(self, model: nn.Module) -> None:
        """Apply the masks to another model with the same layers, such as an EMA or SWA average, or one with merged adapters."""
        mask_model(model, self.masks)

    # ---- state

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values. Save them with the model's and the optimizer's state to resume bit for bit."""
        self._step.leave()
        self.weights.check()
        return self._parts.save()

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state. The saved model may have been wrapped or distributed differently.

        The model's own state may be loaded before `sparsify`, after it, or after this call.
        """
        self._step.leave()
        if state.get("frozen") and not self.frozen:
            self._fix_masks()
        if "options" in state:
            state = {**state, "options": self.method.added | self.method.current_options(state["options"])}
        self._parts.load(state, self._step.first_mask)
        self._step.first_mask = self._step.zeros = None
        self.method.set_time(self.clock)
        self.weights.show_effective()
        self._step.renew()

    @property
    def _parts(self) -> StateParts:
        return StateParts(self.name, asdict(self.method), self.method.state, self.weights, self.clock, self.frozen)

    @torch.no_grad()
    def verify(self) -> Verification:
        """Compare the model with its masks: is every removed weight 0? Waits for the device."""
        self._step.leave()
        return verify(self.weights)

    @torch.no_grad()
    def finish(self, recalibrate: Iterable[Any] | None = None) -> None:
        """Leave a plain sparse model behind: remove the hooks, free latent weights and scores. Masks and summary stay.

        Removed weights that something has brought back (EMA, SWA, a reloaded checkpoint) are removed again, with a warning.

        Args:
            recalibrate: batches to renew batch-norm statistics with, if this call changes the model. A batch is the model's
                input, or a tuple or list that begins with it, as for `torch.optim.swa_utils.update_bn`.
        """
        self._step.leave()
        if not self._step.hooks:
            return
        self._step.end_partial_round()
        self.weights.mask_set.recount()
        self.weights.check()
        refuse_nonfinite(self.weights)
        changed = remove_again(self.weights, stacklevel=4)
        if reach_target(self.weights, self.method, self.name, self.clock):
            changed = True
            self._step.collapse.warn(self.clock, stacklevel=4)
        self._step.remove_hooks()
        self.weights.forget_model()
        self._forget_dormant()
        detach(self.optimizers, self.weights.parameters)
        if changed and recalibrate is not None:
            torch.optim.swa_utils.update_bn(recalibrate, self.model)

    def detach(self) -> None:
        """Remove the hooks and leave the model as it is, without a last cut. For a run that was interrupted."""
        if self._step.hooks:
            self._step.remove_hooks()
            detach(self.optimizers, self.weights.parameters)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a sparsifier cannot be copied or pickled: torch copies an optimizer without its hooks, so the copy would train "
            "dense. Call sparsify on the copied model and optimizer, then load_state_dict with this one's state_dict"
        )

    def __repr__(self) -> str:
        return f"Sparsifier({self.method}, {describe_progress(self.weights, self.clock, self.method.needs_target)})"
