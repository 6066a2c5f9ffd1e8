"""Changes to an optimizer's step: HAM, SparseOpt, resting neurons, and the share of dormant weights under Adam and others.

HAM, hyperbolic-aware minimization (ICLR 2026), adds a multiplicative step after the optimizer's:

    w ← w · exp(−η · clamp(α · sign(w) · g, ±2))        sign(w) from before the step, g the gradient that w received

so that log|w| accumulates −g · sign(w). Beside SGD's step of −η·g, it moves a weight by α·|w| times as much. With momentum 0.9
a gradient moves a weight by 10·η·g in all, so HAM adds the share α·|w| / 10 of that movement.

A factor on the gradient does nothing under Adam, which divides by the gradient's size, and η·g is not the size of its step. So
where an optimizer is not linear in the gradient, everything is derived from the step Δ that it took, without decoupled weight
decay: dormant shares and SparseOpt scale Δ, and HAM is

    w ← w · exp(clamp(α/10 · sign(w) · Δ, ±0.2))

with which α means the same share of the movement, α·|w| / 10, as with SGD and momentum 0.9.

Neurons that have lost all their weights may rest: their gradients become 0, under any optimizer. A batch norm behind such a
neuron divides by √ε, because the neuron's variance is 0, so its gradient is a few hundred times as large as that of others.
"""

import torch
from torch import Tensor

from optg.core.outputs import AliveOutputs, OutputFactors
from optg.core.weights import SparseWeights

MOVEMENT = 10.0  # how far one gradient moves a weight, in learning rates, with momentum 0.9: 1 / (1 − 0.9)


class Updates:
    """Called on both sides of an optimizer's step, while the parameters hold latent weights."""

    def __init__(self, weights: SparseWeights, ham: float, sparse_opt: bool, rest_dead: bool) -> None:
        self.weights, self.ham = weights, ham
        self.outputs = OutputFactors(weights) if sparse_opt else None
        self.alive = AliveOutputs(weights) if rest_dead else None
        self.linear = [rule.linear for rule in weights.update_rules]
        self.copies_values = ham > 0 or not all(self.linear)
        self.before: list[Tensor] = []

    @classmethod
    def make(cls, weights: SparseWeights, ham: float, sparse_opt: bool, share: float, rest_dead: bool) -> "Updates | None":
        """Return None if every step can stay as the optimizer takes it. `share` scales the gradient of dormant weights."""
        shared = any(weights.gradient_share(layer, share) != share for layer in range(len(weights.names)))
        return cls(weights, ham, sparse_opt, rest_dead) if ham or sparse_opt or rest_dead or shared else None

    def renew(self) -> None:
        """Follow a change of the masks."""
        for factors in filter(None, (self.outputs, self.alive)):
            factors.renew()

    def before_step(self) -> None:
        """Scale gradients, and copy the weights. Called after the method has routed the gradients."""
        weights = self.weights
        self.renew()
        self.rates = weights.learning_rates(comparable=False)
        if self.alive and (grads := weights.grads):
            weights.passes.scale_outputs(list(grads.values()), [self.alive.tensors[i] for i in grads])
        if self.outputs and (grads := {i: grad for i, grad in weights.grads.items() if self.linear[i]}):
            weights.passes.scale_outputs(list(grads.values()), [self.outputs.tensors[i] for i in grads])
        if self.copies_values:
            self.copy_values()

    def copy_values(self) -> None:
        weights = self.weights
        if weights.latent is not None:
            self.before = weights.latent  # has room for all weights: `settle` overwrites those of kept ones anyway
            if weights.effective is not None:
                return
        elif not self.before or self.before[0].dtype != weights.values[0].dtype:
            self.before = [torch.empty_like(v) for v in weights.values]
        torch._foreach_copy_(weights.stepping(self.before), weights.stepping(weights.values))

    def after_step(self, share: float) -> None:
        """Change the step that the optimizer took."""
        weights, grads, values = self.weights, self.weights.grads, self.weights.values
        if self.ham and (layers := [i for i in grads if self.linear[i]]):
            now, before, rates = ([tensors[i] for i in layers] for tensors in (values, self.before, self.rates))
            weights.passes.hyperbolic(now, before, [grads[i] for i in layers], rates, self.ham)
        if layers := [i for i in grads if not self.linear[i]]:
            factors = [self.outputs.tensors[i] for i in layers] if self.outputs else None
            lists = values, weights.masks, self.before, self.decays()
            picked = ([tensors[i] for i in layers] for tensors in lists)
            weights.passes.rescale(*picked, factors, share, self.ham / MOVEMENT)

    def decays(self) -> list[Tensor]:
        """Return the share of each layer's weights that decoupled weight decay removes in this step."""
        decay = self.weights.group_option("weight_decay", 0.0)
        return [rate * (wd if rule.decoupled else 0) for rate, wd, rule in zip(self.rates, decay, self.weights.update_rules)]
