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
        self.dims = [axes.neurons for axes in weights.axes]
        for name, dims, piece in zip(weights.names, self.dims, weights.shards.pieces if weights.shards else ()):
            if piece and 0 not in dims:
                raise ValueError(
                    f"sparse_opt needs the whole of {name}, which FSDP2 has split along its inputs; expected output-first "
                    "weights, or DDP"
                )
        sizes = [[v.shape[d] if d in dims else 1 for d in range(v.ndim)] for v, dims in zip(weights.values, self.dims)]
        self.tensors = [torch.ones(s, dtype=weights.state_dtype, device=d) for s, d in zip(sizes, weights.devices)]
        self.counts: Tensor | None = None  # counts of the masks that the factors were made for

    def renew(self) -> None:
        """Compute the factors again if the masks have changed. Does not wait for the device."""
        if self.counts is self.weights.counts:
            return
        self.counts = self.weights.counts
        neurons = self.weights.neurons
        inner = [shape.numel() // count for shape, count in zip(self.weights.shapes, neurons)]
        inputs = [[d for d in range(mask.ndim) if d not in dims] for mask, dims in zip(self.weights.masks, self.dims)]
        dtype = self.weights.state_dtype
        density = [m.sum(dims, keepdim=True).to(dtype) / size for m, dims, size in zip(self.weights.masks, inputs, inner)]
        device = self.weights.devices[0]
        sums = self.weights.mask_set.total(torch.stack([d.sum().to(device) for d in density]))
        for factor, own, total, count in zip(self.tensors, density, sums, neurons):
            mean = total.to(own.device) / count
            factor.copy_(self.factor(own, mean))

    def factor(self, density: Tensor, mean: Tensor) -> Tensor:
        """Return the factors of a layer, given the density of each neuron and their mean."""
        return (density / mean).sqrt().where(density > 0, 1.0)


class AliveOutputs(OutputFactors):
    """0 for neurons without any weight, else 1."""

    def factor(self, density: Tensor, mean: Tensor) -> Tensor:
        return (density > 0).to(density.dtype)
