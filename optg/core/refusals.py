"""Refuse unsupported arguments, optimizers and models: say why, and what to do instead."""

from typing import Any

import torch
from torch import nn

from optg.core.prunable import optimizer_parameters

TWO_WEIGHTS = (
    "it keeps two sets of weights, and `optimizer.eval()` switches to the dense one. Use method='rigl' or 'set', which are "
    "sparse from the first step, or another optimizer"
)
SECOND_ORDER = "it needs a second backward pass through gradients that a sparse step changes in place. Use SGD or AdamW"
TWO_STEPS = "its first_step and second_step bypass optimizer.step(), so optg would see no step. Use SGD or AdamW"
MOVED_WEIGHTS = "it evaluates the model at moved weights inside a step, while the model holds latent weights. Use SGD or AdamW"
IN_BACKWARD = "it updates weights during the backward pass, so optg would see no step. Use SGD or AdamW"
INNER_OPTIMIZER = "it steps an inner optimizer, which optg takes for a copy without a sparsifier. Use the inner optimizer alone"
REFUSED = {  # by class name: these classes are in many packages
    "LBFGS": "it evaluates the model many times inside one step, while the model holds latent weights. Use SGD or AdamW",
    "SparseAdam": "it accepts sparse gradients only, and mask scores need dense ones. Use SGD or AdamW",
    **dict.fromkeys(("AdaHessian", "Adahessian", "SophiaH", "Sophia"), SECOND_ORDER),
    **dict.fromkeys(("GSAM", "WSAM", "BSAM", "LookSAM", "FriendlySAM"), MOVED_WEIGHTS),
    **dict.fromkeys(("AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure"), MOVED_WEIGHTS),
    **dict.fromkeys(("LOMO", "AdaLOMO"), IN_BACKWARD),
    **dict.fromkeys(("Magma", "OrthoGrad", "PCGrad", "ScheduleFreeWrapper", "TRAC"), INNER_OPTIMIZER),
}
REFUSED_WRAPPERS = {  # these have no step hooks of their own
    "Lookahead": "it writes its slow weights to the model after the inner optimizer's step, which makes the model dense. Use "
    "the inner optimizer alone, or the Lookahead of pytorch_optimizer",
    "SafeFP16Optimizer": "it trains float32 copies of the weights. Use SGD or AdamW with torch.amp.GradScaler",
}
SPARSE_FROM_THE_START = ("rigl", "set", "keep")


def refuse_sparsity(sparsity: float) -> None:
    if isinstance(sparsity, str) or not 0 <= sparsity < 1:
        percent = not isinstance(sparsity, (str, bool)) and 1 < sparsity < 100
        hint = f". For {sparsity} %, write {sparsity / 100:g}" if percent else ""
        raise ValueError(f"sparsity is {sparsity!r}; expected the share of weights to remove, at least 0 and below 1{hint}")


def refuse_target(method: str, needed: bool, sparsity: float | None) -> None:
    """Raise if a method needs a sparsity and got none, or got one that it cannot use."""
    if needed and sparsity is None:
        raise TypeError(
            f"{method} needs `sparsity=`, the share of weights to remove. Only method='keep' and N:M structures do without"
        )
    if not needed and sparsity is not None:
        raise ValueError(f"{method} keeps the zeros that the model has; leave out sparsity={sparsity}")


def refuse_structure(name: str, method: Any, assigned: Any) -> None:
    """Raise if a method cannot remove weights in these groups."""
    structured = any(str(structure) != "unstructured" for structure in assigned.structures)
    reason = method.single_weights if structured else ""
    if assigned.followers and method.regrows_at_zero:
        reason = "it revives weights at 0, and a channel of zeros receives no gradient"
    if structured and method.tries_dormant:
        reason = "it tries single dormant weights (leave out `reopen`)"
    if reason:
        raise ValueError(f"{name} does not support structure {assigned.label!r}: {reason}. Use another method or structure")


def refuse_wrapper(optimizer: Any) -> None:
    """Raise if a wrapper changes weights outside the step of the optimizer that it wraps."""
    if reason := REFUSED_WRAPPERS.get(type(optimizer).__name__):
        raise TypeError(f"{type(optimizer).__name__} cannot train a sparse model: {reason}")


def keeps_two_weights(optimizer: Any) -> bool:
    """Return whether the optimizer keeps a second set of weights, which `optimizer.eval()` puts into the model."""
    return any("ScheduleFree" in kind.__name__ or kind.__name__ == "SPlus" for kind in type(optimizer).__mro__)


def refuse_optimizer(optimizer: torch.optim.Optimizer, method: str, needs_minimization: bool) -> None:
    for kind in type(optimizer).__mro__:
        if reason := REFUSED.get(kind.__name__):
            raise TypeError(f"{kind.__name__} cannot train a sparse model: {reason}")
    if keeps_two_weights(optimizer) and method.lower() not in SPARSE_FROM_THE_START:
        raise TypeError(f"{type(optimizer).__name__} cannot train a sparse model with {method}: {TWO_WEIGHTS}")
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):  # SAM and its relatives
        raise TypeError(f"{type(optimizer).__name__} cannot train a sparse model: {TWO_STEPS}")
    if not getattr(type(optimizer).step, "hooked", False):  # set by torch.optim.Optimizer.__init__
        refuse_wrapper(optimizer)
        raise TypeError(
            f"{type(optimizer).__name__} cannot train a sparse model: its step never runs step hooks, because its class does "
            "not call Optimizer.__init__. Use the optimizer inside it, or another one"
        )
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError(
            f"a parameter group of {type(optimizer).__name__} has no 'lr', and mask scores need one. Use an optimizer with a "
            "learning rate"
        )
    if needs_minimization and any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError(
            f"{method} needs a loss to minimize, but the optimizer has maximize=True. Minimize the negative instead"
        )


def refuse_fsdp1(model: nn.Module) -> None:
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise TypeError(
            "the model is wrapped in FSDP1 (FullyShardedDataParallel), which flattens weights. Use FSDP2: "
            "torch.distributed.fsdp.fully_shard"
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
            "parameters, freeze them, leave them out with `exclude`, or pass all optimizers of the model as a list"
        )
