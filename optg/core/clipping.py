"""Gradient clipping by the norm that the weights will receive."""

import torch
from torch import Tensor

from optg.core.prunable import optimizer_parameters
from optg.core.sharding import combine_norms, find_shards, to_local
from optg.core.weights import SparseWeights


def clip_grad_norm_(weights: SparseWeights, dormant: float, max_norm: float, norm_type: float) -> Tensor:
    """Clip all gradients of the optimizer by their total norm, with gradients of dormant weights times `dormant`."""
    shares = [weights.gradient_share(layer, dormant) for layer in range(len(weights.names))]
    masks = dict(zip(weights.parameters, zip(weights.masks, shares)))
    grads = {p: to_local(p.grad) for p in optimizer_parameters(weights.optimizer) if p.grad is not None}
    norms = []
    for p, grad in grads.items():
        mask, share = masks.get(p, (None, 1.0))
        received = grad if mask is None else torch.where(mask, grad, grad * share if share else 0.0)
        norm = torch.linalg.vector_norm(received, norm_type, dtype=weights.state_dtype)
        norms.append(norm.to(weights.devices[0]))
    if not norms:
        return torch.zeros(())
    total = combine_norms(torch.stack(norms), norm_type, find_shards({str(i): p for i, p in enumerate(grads)}))
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in grads.values():
        grad.mul_(scale.to(grad.device))
    return total
