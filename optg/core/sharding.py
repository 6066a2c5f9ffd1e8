"""Weights that are split over processes (FSDP2), and weights that are not."""

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Shards:
    """How the tensors of this process fit into the whole: `pieces[i]` says whether tensor i is a piece of a layer that is
    split along its first dimension over `group`; the others are held whole by every rank of it."""

    group: dist.ProcessGroup
    pieces: tuple[bool, ...]

    def of(self, tensor: int) -> "Shards":
        """The same, of one tensor alone."""
        return Shards(self.group, (self.pieces[tensor],))

    def counted(self) -> Tensor:
        """Which tensors this rank counts, so that each is counted once over all ranks."""
        return torch.tensor(self.pieces) | (dist.get_rank(self.group) == 0)

    def total(self, counts: Tensor) -> Tensor:
        """The sum over all ranks, entry i of `counts` being about tensor i."""
        counts = counts * self.counted().to(counts.device).view(-1, *[1] * (counts.ndim - 1))
        dist.all_reduce(counts, group=self.group)
        return counts

    def on_lower_ranks(self, counts: Tensor) -> Tensor:
        """For each tensor, the sum of `counts` over the pieces of its layer that lower ranks hold."""
        everyone = [torch.empty_like(counts) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, counts, group=self.group)
        lower = torch.stack(everyone)[: dist.get_rank(self.group)].sum(0)
        return lower * torch.tensor(self.pieces, device=counts.device)


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Is it one of FSDP2's? Their module takes half a second to import, and where nobody has, no tensor is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: all of it, but for FSDP2's DTensors."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def distribute_like(parameter: Tensor, piece: Tensor) -> Tensor:
    """A local piece of a layer as a tensor distributed as its parameter is. A value for the whole layer stays as it is."""
    if not is_dtensor(parameter) or piece.ndim == 0:
        return piece
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        piece,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def local_piece(parameter: Tensor, whole: Tensor) -> Tensor:
    """This process's piece of a tensor of the parameter's shape, given whole or distributed in whatever way."""
    if is_dtensor(whole):
        whole = whole.full_tensor()
    if not is_dtensor(parameter) or whole.ndim == 0:
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole.to(parameter.device), mesh, placements, src_data_rank=None).to_local()


def with_layout_of(parameter: Tensor, piece: Tensor) -> Tensor:
    """The same numbers in the parameter's memory format, as fused optimizers and kernels want them."""
    return torch.empty_like(to_local(parameter), dtype=piece.dtype, device=piece.device).copy_(piece)


def find_shards(parameters: dict[str, nn.Parameter]) -> Shards | None:
    """How the parameters are spread over processes; None where this process holds all of each."""
    group, pieces = None, []
    for name, p in parameters.items():
        sharded = [i for i, s in enumerate(p.placements) if not s.is_replicate()] if is_dtensor(p) else []
        pieces.append(bool(sharded))
        if not sharded:
            continue
        assert is_dtensor(p)
        if len(sharded) > 1 or not p.placements[sharded[0]].is_shard(0):
            raise ValueError(f"{name} is distributed as {p.placements}; expected whole or split once along dimension 0")
        mine = p.device_mesh.get_group(sharded[0])
        if group not in (None, mine):
            raise ValueError(f"{name} is split over other processes than the layers before it; expected one group for all")
        group = mine
    return Shards(group, tuple(pieces)) if group is not None else None


def norm(norms: Tensor, p: float, shards: Shards | None) -> Tensor:
    """The p-norm of tensors whose own p-norms these are; of the whole tensors, where each is a piece."""
    if shards is None:
        return torch.linalg.vector_norm(norms, p)
    if math.isinf(p):
        norms = norms.max()
        dist.all_reduce(norms, dist.ReduceOp.MAX, group=shards.group)
        return norms
    return shards.total(norms**p).sum() ** (1 / p)
