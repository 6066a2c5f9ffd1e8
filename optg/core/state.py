"""A sparsifier's state: what `state_dict` saves, and the checks before `load_state_dict` changes anything."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from optg.core.clock import ENDLESS, Clock
from optg.core.sharding import distribute_like, local_piece, to_local
from optg.core.weights import SparseWeights

Tensors = list[Tensor] | dict[str, Tensor]
LENGTH = ("epochs", "steps_per_epoch", "steps")  # `steps` is there only if the length was given in steps


def by_name(weights: SparseWeights, values: Tensors) -> dict[str, Tensor]:
    """Return one tensor per layer by the layer's name, distributed like its parameter. A dict is returned unchanged."""
    if isinstance(values, dict):
        return values
    return {name: distribute_like(p, value) for name, p, value in zip(weights.names, weights.parameters, values)}


class StateParts(NamedTuple):
    """What a state is made of. `learned` is the method's own part."""

    method: str
    options: dict[str, Any]
    learned: dict[str, Tensors]
    weights: SparseWeights
    clock: Clock
    frozen: bool = False

    def identity(self) -> dict[str, Any]:
        """Return the values that a saved state and the sparsifier that loads it must share."""
        floor, structure = self.weights.mask_set.floor, self.weights.assignment.label
        return {
            "method": self.method,
            "options": self.options,
            "sparsity": self.weights.target,
            "epochs": self.clock.epochs,
            "steps_per_epoch": self.clock.steps_per_epoch,
            **({} if self.clock.steps is None else {"steps": self.clock.steps}),
            **({"floor": floor.share, "floor_by": floor.by} if floor else {}),
            **({} if structure == "unstructured" else {"structure": structure}),
            **({"frozen": True} if self.frozen else {}),
        }

    def save(self) -> dict[str, Any]:
        tensors: dict[str, Tensors] = {"masks": self.weights.masks, **self.learned}
        if self.weights.latent is not None:
            tensors["latent"] = self.weights.latent
        return {
            **self.identity(),
            "step": self.clock.step,
            "counts": self.weights.counts.tolist(),
            "tensors": {kind: by_name(self.weights, values) for kind, values in tensors.items()},
        }

    def load(self, saved: dict[str, Any], first_mask: "FirstMask | None") -> None:
        """Load a state after checking that it fits."""
        current = self.save()
        refuse_misfit(saved, current, self.identity(), self.learned)
        if first_mask:
            first_mask.undo(self.weights)
        for kind, values in current["tensors"].items():
            if isinstance(self.learned.get(kind), dict):
                self.learned[kind] = {name: tensor.clone() for name, tensor in saved["tensors"][kind].items()}
            else:
                for name, tensor in values.items():
                    to_local(tensor).copy_(local_piece(tensor, saved["tensors"][kind][name]))
        self.weights.mask_set.load_counts(saved["counts"])
        self.clock.step = saved["step"]


def refuse_misfit(
    state: dict[str, Any], current: dict[str, Any], identity: dict[str, Any], learned: dict[str, Tensors]
) -> None:
    """Raise unless a saved state fits this sparsifier. The dicts of a method may hold any names."""
    if "floor" in (state.keys() ^ identity.keys()):
        saved, here = ("a" if "floor" in keys else "no" for keys in (state, identity))
        raise ValueError(f"the state was saved with {saved} floor, here there is {here} floor; expected the same")
    saved, here = (keys.get("structure", "unstructured") for keys in (state, identity))
    if saved != here:
        raise ValueError(f"the state was saved with structure={saved!r}, here it is {here!r}; expected the same")
    if identity.get("frozen") and not state.get("frozen"):
        raise ValueError("the state was saved before freeze(), but this sparsifier is frozen; load it before freeze()")
    if missing := [key for key in current if key not in state and key != "steps"]:
        raise ValueError(f"this is not a sparsifier state: it has no {missing[0]!r}")
    for key, value in identity.items():
        if key not in LENGTH and state[key] != value:
            raise ValueError(f"the state was saved with {key}={state[key]!r}, here it is {value!r}; expected the same")
    if length(state) != length(identity):
        raise ValueError(
            f"the state was saved in a run of {describe_length(state)}, this run has {describe_length(identity)}; expected "
            "the same. To train longer, finish this run, then train its model with method='keep'"
        )
    for kind, layers in current["tensors"].items():
        if kind not in state["tensors"]:
            raise ValueError(f"the state has no {kind}: it was saved after finish(), which leaves nothing to resume from")
        if isinstance(learned.get(kind), dict):
            continue
        saved = state["tensors"][kind]
        if odd := sorted(set(saved) ^ set(layers)):
            side = "only the state" if odd[0] in saved else "only this model"
            raise ValueError(f"the state belongs to another model: {side} has {odd[0]} ({kind})")
        for name, tensor in layers.items():
            if saved[name].shape != tensor.shape:
                shapes = f"{tuple(saved[name].shape)} in the state, {tuple(tensor.shape)} here"
                raise ValueError(f"the state belongs to another model: {name} ({kind}) has the shape {shapes}")


def length(state: dict[str, Any]) -> tuple[int, int]:
    """Return the length of training in steps and in epochs."""
    return state.get("steps", state["epochs"] * state["steps_per_epoch"]), state["epochs"]


def describe_length(state: dict[str, Any]) -> str:
    steps, epochs = length(state)
    if steps >= ENDLESS:
        return "no given length"
    return f"{steps} steps ({epochs} epoch{'' if epochs == 1 else 's'})"


class FirstMask:
    """The weights before and after `sparsify` applied the first mask, kept until the first step.

    Memory is no concern: gradients and optimizer state, which need as much, do not exist yet.
    """

    def __init__(self, before: list[Tensor], weights: SparseWeights) -> None:
        self.before = before
        self.after = [v.clone() for v in weights.values]

    def undo(self, weights: SparseWeights) -> None:
        """Restore the weights as `sparsify` found them, unless they were changed since.

        If a checkpoint was loaded before `sparsify`, this brings back its weights that the first mask removed.
        """
        if all(map(torch.equal, self.after, weights.values)):
            torch._foreach_copy_(weights.values, self.before)

    def adopt_changes(self, weights: SparseWeights) -> None:
        """Take layers that were changed since as latent weights: a checkpoint was loaded, or DDP has broadcast rank 0's."""
        assert weights.latent is not None
        for after, value, latent in zip(self.after, weights.values, weights.latent):
            if not torch.equal(after, value):
                latent.copy_(value)
