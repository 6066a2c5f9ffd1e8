"""One process or many: what `torchrun` has started, and how the model is spread over it."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass
class Parallel:
    """This process's place among those that train together."""

    mode: str = "none"  # none, ddp (a copy of the model in each process) or fsdp (FSDP2: a piece of it in each)
    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.mode == "ddp":
            return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if self.mode == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for block in model.children():
                if any(True for _ in block.parameters()):
                    fully_shard(block)
            fully_shard(model)
        return model

    def total(self, *values: float) -> list[float]:
        """Sums over all processes."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def any(self, flag: bool) -> bool:
        """Does any process say so?"""
        return flag if self.world == 1 else self.total(float(flag))[0] > 0


def start(mode: str, device: str) -> Parallel:
    """Join the processes that torchrun started; alone, nothing is to be joined."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", place.index or 0)))
        torch.cuda.set_device(place)
    if mode == "none":
        if world > 1:
            raise ValueError(f"{world} processes were started, but --parallel is none; expected ddp or fsdp")
        return Parallel(device=place)
    if "RANK" not in os.environ:
        raise ValueError(f"--parallel {mode} needs torchrun: torchrun --nproc-per-node N -m optg train --parallel {mode} …")
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    return Parallel(mode, rank, world, place)
