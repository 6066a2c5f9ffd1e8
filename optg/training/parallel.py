"""One process or many: what `torchrun` has started, and how the model is spread over it."""

import os
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Parallel:
    """This process's place among those that train together. As a context, it leaves them at the end."""

    mode: str = "none"  # none, ddp (a copy of the model in each process) or fsdp (FSDP2: a piece of it in each)
    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @property
    def first(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.mode == "none" or kind not in (None, SystemExit):  # after an error the others might not come
            return
        if kind is None:
            dist.barrier()  # nobody closes a connection that another still reads from
        dist.destroy_process_group()

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
        return self.reduce(values, dist.ReduceOp.SUM)

    def most(self, *values: float) -> list[float]:
        """The largest of all processes, to the last bit the same in each."""
        return self.reduce(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Does any process say so?"""
        return self.most(float(flag))[0] > 0

    def reduce(self, values: tuple[float, ...], how: "dist.ReduceOp.RedOpType") -> list[float]:
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, how)
        return tensor.tolist()

    def gather(self, values: Tensor) -> Tensor:
        """The values of every process, a row for each."""
        rows = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(rows, values)
        return torch.stack(rows)


def start(mode: str, device: str) -> Parallel:
    """Join the processes that torchrun started; alone, nothing is to be joined."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        place = torch.device("meta")
    if place.type not in ("cuda", "cpu"):
        raise ValueError(f"unknown device {device!r}; expected auto, cuda, cuda:N or cpu")
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", place.index or 0)))
        if place.index >= torch.cuda.device_count():
            raise ValueError(f"there is no {place}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here")
        torch.cuda.set_device(place)
    if mode == "none":
        if world > 1:
            raise ValueError(f"{world} processes were started, but --parallel is none; expected ddp or fsdp")
        return Parallel(device=place)
    if "RANK" not in os.environ:
        raise ValueError(f"--parallel {mode} needs torchrun: torchrun --nproc-per-node N -m optg train --parallel {mode} …")
    backend = "nccl" if place.type == "cuda" else "gloo"
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        # After a restart torchrun's store still has the addresses of those that died. On one machine all know which try it is.
        store = next(dist.rendezvous("env://"))[0]
        store = dist.PrefixStore(f"try {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    else:
        dist.init_process_group(backend)
    return Parallel(mode, rank, world, place)
