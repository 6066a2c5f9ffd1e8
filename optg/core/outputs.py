"""Factors per output neuron on the gradients of its weights. They follow from how many weights it keeps."""

import torch
from torch import Tensor

from optg.core.weights import SparseWeights


class OutputFactors:
    """SparseOpt (ICML 2026): for a neuron with sparsity s, √(1 − s) / √(1 − mean s), with the mean over its layer's neurons.

    A neuron without any weight has the factor 1. The tensor of each layer broadcasts against its weights. It is overwritten in
    place.
    """

    def __init__(self, weights: SparseWeights) -> None:
        self.weights = weights
        sizes = [[v.shape[d] if d in a.neurons else 1 for d in range(v.ndim)] for v, a in zip(weights.values, weights.axes)]
        self.tensors = [torch.ones(s, dtype=weights.state_dtype, device=d) for s, d in zip(sizes, weights.devices)]
        self.counts: Tensor | None = None  # counts of the masks that the factors were made for

    def renew(self) -> None:
        """Compute the factors again if the masks have changed. Does not wait for the device."""
        if self.counts is self.weights.counts:
            return
        self.counts, weights = self.weights.counts, self.weights
        density = [weights.neuron_means(i, mask.to(weights.state_dtype)) for i, mask in enumerate(weights.masks)]
        sums = weights.mask_set.total(torch.stack([d.sum().to(weights.devices[0]) for d in density]))
        for i, (factor, own, total) in enumerate(zip(self.tensors, density, sums)):
            split = own.numel() < weights.neurons[i]  # FSDP2 has split the layer's neurons over processes
            mean = total.to(own.device) / weights.neurons[i] if split else own.mean()
            factor.copy_(self.factor(own, mean))

    def factor(self, density: Tensor, mean: Tensor) -> Tensor:
        """Return the factors of a layer, given the density of each neuron and their mean."""
        return (density / mean).sqrt().where(density > 0, 1.0)


class AliveOutputs(OutputFactors):
    """0 for neurons without any weight, else 1."""

    def factor(self, density: Tensor, mean: Tensor) -> Tensor:
        return (density > 0).to(density.dtype)
