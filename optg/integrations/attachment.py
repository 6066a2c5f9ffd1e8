"""What the callbacks share: attach to a trainer's model, resume, notice the target sparsity, mask what came back."""

import warnings
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from optg.core.prunable import parameters_by_name
from optg.core.refusals import refuse_sparsity, refuse_target
from optg.core.sharding import local_piece, to_local
from optg.methods import Method, resolve
from optg.sparsifier import Sparsifier, sparsify

# Hooks that trainers call first; the callbacks of other trainers lack them.
FIRST_HOOKS = {"on_init_end": "transformers", "setup": "lightning", "on_exception": "lightning"}


class Attachment:
    """A sparsifier for one training run of a trainer. `sparsifier` is None until training starts.

    Args:
        method, sparsity, options: as for `optg.sparsify`. The sparsity is 0.9 unless it, the method or `structure` says
            otherwise. The length of training comes from the trainer unless it is given.
    """

    def __init__(self, method: str | Method = "optg", sparsity: float | None = None, **options: Any) -> None:
        signature(sparsify).bind(None, None, method, sparsity=sparsity, **options)  # raises now, not when training starts
        name, chosen = resolve(method)
        if sparsity is None and chosen.needs_target and "structure" not in options:
            sparsity = 0.9
        refuse_sparsity(sparsity or 0.0)
        if "structure" not in options:
            refuse_target(name, chosen.needs_target, sparsity)
        self.method, self.needs_target, self.target, self.options = method, chosen.needs_target, sparsity, options
        self.sparsifier: Sparsifier | None = None
        self.at_target = False  # at the last look; a rise to the target makes earlier scores of the model worthless
        self.first_step = 0  # the trainer's step when the sparsifier's clock was at 0

    def __getattr__(self, name: str) -> Any:
        """Name the callback to import if the trainer of another package calls this one."""
        trainer = FIRST_HOOKS.get(name)
        hint = f": this trainer's Sparsify is in optg.integrations.{trainer}" if trainer else ""
        raise AttributeError(f"the Sparsify of {type(self).__module__} has no {name!r}{hint}")

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        step: int,
        steps: int,
        epochs: int | None,
        saved: dict[str, Any] | None,
    ) -> None:
        """Start at the trainer's `step` of `steps`, or resume from the values of `save`."""
        self.release()
        self.first_step = 0 if saved else step
        options: dict[str, Any] = {"sparsity": self.target}
        if self.needs_target and not {"steps", "steps_per_epoch"} & self.options.keys():
            options["steps"] = max(2, steps - self.first_step)  # OptG cuts after the first of two
            if epochs is not None and 1 < epochs <= options["steps"]:  # in one epoch OptG would never cut
                options["epochs"] = epochs
        self.sparsifier = sparsify(model, optimizer, self.method, **{**options, **self.options})
        if saved:
            self.sparsifier.load_state_dict(saved["sparsifier"])
        self.at_target = saved["at_target"] if saved else self.reached()

    def release(self) -> None:
        """Let go of the sparsifier of a run that was interrupted, without a last cut."""
        if self.sparsifier:
            self.sparsifier.detach()
            self.sparsifier = None

    def save(self) -> dict[str, Any]:
        """Return what `attach` needs to resume."""
        return {"sparsifier": self.sparsifier.state_dict(), "at_target": self.at_target} if self.sparsifier else {}

    def reached(self, state: dict[str, Any] | None = None) -> bool:
        """Return whether the masks, or those of a saved state, have the target sparsity. A learned one may be off by 0.01."""
        assert self.sparsifier
        weights, masks = self.sparsifier.weights, self.sparsifier.weights.masks
        if state:
            saved = state["tensors"]["masks"]
            masks = [local_piece(p, saved[name]) for name, p in zip(weights.names, weights.parameters)]
        if self.sparsifier.method.learns_sparsity:
            zeros = sum(row[0] for row in (state["counts"] if state else weights.counts.tolist()))
            return not self.needs_target or abs(zeros / weights.size - weights.target) <= 0.01
        return max(weights.missing_zeros(masks=masks)) <= 0

    def rises_to_target(self) -> bool:
        """Return whether the target sparsity was reached since the last call. Waits for the device."""
        assert self.sparsifier
        before, self.at_target = self.at_target, self.reached()
        return self.at_target and not before

    def catch_up(self, step: int) -> None:
        """Count the steps that the trainer took and the optimizer did not: a GradScaler skips steps that overflow."""
        while self.sparsifier and self.first_step + self.sparsifier.clock.step < step:
            self.sparsifier.advance()

    @torch.no_grad()
    def mask_again(self, model: nn.Module, cause: str) -> None:
        """Remove again the weights that something has brought back, and warn. Looks weights up by name, on any device."""
        if not self.sparsifier:
            return
        parameters, came_back = parameters_by_name(model), {}
        for name, mask in self.sparsifier.masks.items():
            values = to_local(parameters[name])
            came_back[name] = int(values[~local_piece(parameters[name], mask).to(values.device)].count_nonzero())
        if total := sum(came_back.values()):
            worst = max(came_back, key=lambda name: came_back[name])
            self.sparsifier.apply_masks(model)
            warnings.warn(
                f"{cause} brought back {total} removed weights, {came_back[worst]} of them in {worst}; they are removed again",
                stacklevel=3,
            )
