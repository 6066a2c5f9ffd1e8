"""Fine-tune a sparse model, from whatever source, with its zeros kept.

The mask is "the weight is not 0" of the model as given. It needs neither a sparsity nor a length of training. A layer whose
weights are all 0 is not sparse but unused or freshly initialised (the B of a LoRA, a last layer): all its weights are trained.
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch

from optg.core.clock import Clock
from optg.core.probe import Probe
from optg.core.weights import SparseWeights
from optg.methods.base import Method


@dataclass
class Keep(Method):
    paper: ClassVar[str] = "–"
    when: ClassVar[str] = "before"
    revives: ClassVar[bool] = False
    needs_target: ClassVar[bool] = False
    learns_sparsity: ClassVar[bool] = True  # the sparsity of the given model
    single_weights: ClassVar[str] = "it keeps the zeros that the model has"

    def prepare(self, weights: SparseWeights, clock: Clock, probe: Probe) -> None:
        if odd := [name for name, value in zip(weights.names, weights.values) if value.isnan().any()]:
            raise FloatingPointError(f"{odd[0]} holds NaN; expected a trained model")
        nonzero = weights.mask_set.count_nonzero(weights.values)
        if empty := [name for name, count in zip(weights.names, nonzero.tolist()) if not count]:
            warnings.warn(
                f"all weights of {', '.join(empty[:3])}{' …' if len(empty) > 3 else ''} are 0: keep trains all of them. To "
                "leave them at 0, freeze these layers",
                stacklevel=5,
            )
        weights.keep_above(torch.where(nonzero > 0, 0.0, -1.0).to(weights.state_dtype))  # |w| > 0, or all
        if not weights.sparsity:
            warnings.warn("the model has no zeros, so there is nothing to keep: it will be trained dense", stacklevel=5)
