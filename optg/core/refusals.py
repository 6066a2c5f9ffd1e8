"""Refuse what cannot work, with a sentence that says why and what to do instead."""

import torch
from torch import nn

from optg.core.prunable import optimizer_parameters

REFUSED = {
    torch.optim.LBFGS: "it evaluates the model many times inside one step, while the model holds latent weights",
    torch.optim.SparseAdam: "it accepts sparse gradients only, and mask scores need dense ones",
}


def refuse_sparsity(sparsity: float) -> None:
    if isinstance(sparsity, str) or not 0 <= sparsity < 1:
        raise ValueError(f"sparsity is {sparsity!r}; expected the share of weights to remove, at least 0 and below 1")


def refuse_target(method: str, needed: bool, **given: float | None) -> None:
    """Raise if a method lacks its sparsity or its length of training, or got a sparsity that it cannot use."""
    if needed and (missing := [name for name, value in given.items() if value is None]):
        raise TypeError(f"{method} needs {' and '.join(f'`{name}=`' for name in missing)}; only method='keep' does not")
    if not needed and given["sparsity"] is not None:
        raise ValueError(f"{method} keeps the zeros that the model has; leave out `sparsity`, here {given['sparsity']}")


def refuse_optimizer(optimizer: torch.optim.Optimizer, method: str, needs_minimization: bool) -> None:
    for kind, reason in REFUSED.items():
        if isinstance(optimizer, kind):
            raise TypeError(f"{kind.__name__} cannot train a sparse model: {reason}. Use SGD, AdamW or another torch optimizer")
    if needs_minimization and any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError(
            f"maximize=True: {method} learns from the gradient of a loss to minimize. Minimize its negative instead"
        )


def refuse_parameters(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    if not parameters:
        raise ValueError(
            "the model has no prunable weight: expected a trained linear, convolution, attention or recurrent layer, or an "
            "`include` pattern that names other parameters of two or more dimensions. Frozen weights are never pruned, "
            "adapters (LoRA) only if `include` names them"
        )
    known = set(optimizer_parameters(optimizer))
    if strangers := [name for name, p in parameters.items() if p not in known]:
        raise ValueError(
            f"the optimizer does not own {', '.join(strangers[:3])}{' …' if len(strangers) > 3 else ''}: give it these "
            "parameters, freeze them, or leave them out with `exclude`"
        )
