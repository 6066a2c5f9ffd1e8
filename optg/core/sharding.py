"""Weights that FSDP2 splits over processes. Everywhere else in `core`, a tensor is the piece that this process holds."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Shards:
    """How this process's tensors fit into the whole model.

    `pieces[i]` is True if tensor i is a piece of a layer that is split along its first dimension over `group`. Every rank of
    the group holds the other tensors whole.
    """

    group: dist.ProcessGroup
    pieces: tuple[bool, ...]

    def of(self, tensors: Sequence[int]) -> "Shards":
        """Return the shards of some of the tensors."""
        return Shards(self.group, tuple(self.pieces[i] for i in tensors))

    def counted(self) -> Tensor:
        """Return which tensors this rank counts, such that each weight is counted once over all ranks."""
        return torch.tensor(self.pieces) | (dist.get_rank(self.group) == 0)

    def total(self, counts: Tensor) -> Tensor:
        """Sum over all ranks; entry i of `counts` belongs to tensor i."""
        counts = counts * self.counted().to(counts.device).view(-1, *[1] * (counts.ndim - 1))
        dist.all_reduce(counts, group=self.group)
        return counts

    def join(self, piece: Tensor, rows: int) -> Tensor:
        """Return the whole of a tensor with this many rows, given this rank's piece of it."""
        ranks = dist.get_world_size(self.group)
        padded = piece.new_zeros(-(-rows // ranks), *piece.shape[1:])  # FSDP2's pieces are those of torch.chunk
        padded[: len(piece)] = piece
        everyone = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(everyone, padded, group=self.group)
        return torch.cat(everyone)[:rows]

    def split(self, whole: Tensor) -> Tensor:
        """Return this rank's piece of a whole tensor."""
        length = -(-len(whole) // dist.get_world_size(self.group))
        return whole[dist.get_rank(self.group) * length :][:length]

    def add(self, pieces: Tensor) -> Tensor:
        """Add up the tensors of all ranks."""
        dist.all_reduce(pieces, group=self.group)
        return pieces

    def on_lower_ranks(self, counts: Tensor) -> Tensor:
        """Sum, for each tensor, the `counts` of the pieces of its layer that lower ranks hold."""
        everyone = [torch.empty_like(counts) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, counts, group=self.group)
        lower = torch.stack(everyone)[: dist.get_rank(self.group)].sum(0)
        return lower * torch.tensor(self.pieces, device=counts.device)


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether FSDP2 manages this tensor.

    Importing DTensor takes half a second; until other code has imported it, no tensor can be one.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(tensor: Tensor) -> Tensor:
    """Return the piece of a DTensor that this process holds; return any other tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def distribute_like(parameter: Tensor, piece: Tensor) -> Tensor:
    """Wrap a local piece as a DTensor placed like its parameter. Scalars, which belong to the whole layer, stay unchanged."""
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
    """Return this process's piece of a tensor shaped like the parameter; `whole` may be a plain tensor or any DTensor."""
    if is_dtensor(whole):
        whole = whole.full_tensor()
    if not is_dtensor(parameter) or whole.ndim == 0:
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole.to(parameter.device), mesh, placements, src_data_rank=None).to_local()


def with_layout_of(parameter: Tensor, piece: Tensor) -> Tensor:
    """Copy into the parameter's memory format, which fused optimizers and kernels require."""
    return torch.empty_like(to_local(parameter), dtype=piece.dtype, device=piece.device).copy_(piece)


def find_shards(parameters: dict[str, nn.Parameter]) -> Shards | None:
    """Return how the parameters are split over processes; None if this process holds all of them whole."""
    group, pieces = None, []
    for name, p in parameters.items():
        sharded = [i for i, s in enumerate(p.placements) if not s.is_replicate()] if is_dtensor(p) else []
        pieces.append(bool(sharded))
        if not sharded:
            continue
        assert is_dtensor(p)
        if len(sharded) > 1 or not p.placements[sharded[0]].is_shard(0):
            raise ValueError(
                f"{name} is distributed as {p.placements}; expected it whole or split once, along dimension 0 (FSDP2). Tensor "
                "parallelism is not supported"
            )
        mine = p.device_mesh.get_group(sharded[0])
        if group not in (None, mine):
            raise ValueError(f"{name} is split over another process group than the layers before it; expected one for all")
        group = mine
    return Shards(group, tuple(pieces)) if group is not None else None


def combine_norms(norms: Tensor, p: float, shards: Shards | None) -> Tensor:
    """Return the p-norm of all tensors together, given the p-norm of each (of each local piece, if they are sharded)."""
    if shards is None:
        return torch.linalg.vector_norm(norms, p)
    if math.isinf(p):
        norms = norms.max()
        dist.all_reduce(norms, dist.ReduceOp.MAX, group=shards.group)
        return norms
    return shards.total(norms**p).sum() ** (1 / p)
