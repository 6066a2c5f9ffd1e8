"""Everything training depends on, as named tensors and plain values: the contents of a checkpoint.

Tensors are saved whole even if the model is sharded, so a run can resume with any number of processes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from optg.core.prunable import optimizer_parameters, unwrap
from optg.core.sharding import distribute_like, is_dtensor, local_piece, to_local, with_layout_of
from optg.sparsifier import Sparsifier


def gather(
    model: nn.Module, optimizer: torch.optim.Optimizer, sparsifier: Sparsifier, keep: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state as (tensors, values). Every process must call this, because shards are joined, one tensor at a time.

    Args:
        keep: whether this process keeps the joined tensors, on the CPU; the others return none.
    """
    tensors: dict[str, Tensor] = {}

    def add(name: str, tensor: Tensor) -> None:
        joined = full_tensor(tensor)
        if keep:
            tensors[name] = joined.detach().cpu()

    for name, t in unwrap(model).state_dict().items():
        add(f"model.{name}", t)
    plain: dict[str, Any] = {}
    for i, p in enumerate(optimizer_parameters(optimizer)):
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                add(f"optimizer.{i}.{key}", value)
            else:
                plain[f"{i}.{key}"] = value
    sparse = sparsifier.state_dict()
    for kind, values in sparse.pop("tensors").items():
        for name, t in values.items():
            add(f"sparsifier.{kind}.{name}", t)
    add("random.cpu", torch.get_rng_state())
    if torch.cuda.is_available():
        add("random.cuda", torch.cuda.get_rng_state())
    return tensors, {"optimizer": plain, "sparsifier": sparse}


def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sparsifier: Sparsifier,
    tensors: dict[str, Tensor],
    values: dict[str, Any],
) -> None:
    """Undo `gather`."""
    with torch.no_grad():
        for name, t in unwrap(model).state_dict().items():
            to_local(t).copy_(local_piece(t, tensors[f"model.{name}"]))
    parameters = optimizer_parameters(optimizer)
    states: dict[int, dict[str, Any]] = {}
    for name, t in tensors.items():
        if name.startswith("optimizer."):
            _, i, key = name.split(".", 2)
            p = parameters[int(i)]
            states.setdefault(int(i), {})[key] = (
                distribute_like(p, with_layout_of(p, local_piece(p, t))) if t.shape == p.shape else t
            )
    for name, value in values["optimizer"].items():
        i, key = name.split(".", 1)
        states.setdefault(int(i), {})[key] = value
    rates = [group["lr"] for group in optimizer.param_groups]  # a CUDA graph reads these very tensors
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    for group, lr in zip(optimizer.param_groups, rates):
        group["lr"] = lr
    sparse: dict[str, dict[str, Tensor]] = {}
    for name, t in tensors.items():
        if name.startswith("sparsifier."):
            _, kind, layer = name.split(".", 2)
            sparse.setdefault(kind, {})[layer] = t
    current = sparsifier.state_dict()["tensors"]
    sparsifier.load_state_dict({**values["sparsifier"], "tensors": {kind: sparse.get(kind, {}) for kind in current}})
    torch.set_rng_state(tensors["random.cpu"])
    if torch.cuda.is_available() and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"])


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor with the shards of all processes joined."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor
