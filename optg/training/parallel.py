"""One process or many: join the processes that `torchrun` started, and spread the model over them."""

import os
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Parallel:
    """This process's place in the group that trains together. As a context manager, it leaves the group at the end."""

    mode: str = "none"  # none; ddp: every process has a copy of the model; fsdp: FSDP2, every process has a part of it
    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.mode == "none" or kind not in (None, SystemExit):  # after an error the others might never get here
            return
        if kind is None:
            dist.barrier()  # do not close a connection that another process still reads from
        dist.destroy_process_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model wrapped for DDP or sharded by FSDP2."""
        if self.mode == "ddp":
            return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if self.mode == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for block in model.children():
                if any(True for _ in block.parameters()):
                    fully_shard(block)
            fully_shard(model)
        return model

    def sum(self, *values: float) -> list[float]:
        """Return the sum of each value over all processes."""
        return self.reduce(values, dist.ReduceOp.SUM)

    def max(self, *values: float) -> list[float]:
        """Return the maximum of each value over all processes, bit-identical on each."""
        return self.reduce(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any process."""
        return self.max(float(flag))[0] > 0

    def reduce(self, values: tuple[float, ...], operation: "dist.ReduceOp.RedOpType") -> list[float]:
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, operation)
        return tensor.tolist()

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of every process, one row each."""
        if self.world == 1:
            return values[None]
        rows = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(rows, values)
        return torch.stack(rows)


def start(mode: str, device: str) -> Parallel:
    """Choose the device and, unless `mode` is none, join the processes that torchrun started."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    chosen = choose_device(device)
    if mode == "none":
        if world > 1:
            raise ValueError(f"torchrun started {world} processes, but --parallel is none; expected --parallel ddp or fsdp")
        return Parallel(device=chosen)
    if "RANK" not in os.environ:
        raise ValueError(f"--parallel {mode} needs torchrun: torchrun --nproc-per-node N -m optg train --parallel {mode} …")
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        # After a restart, torchrun's store still holds the addresses of the dead processes. On a single machine all processes
        # know the number of restarts, so they use it to start with fresh keys.
        store = next(dist.rendezvous("env://"))[0]
        store = dist.PrefixStore(f"try {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    else:
        dist.init_process_group(backend)
    return Parallel(mode, rank, world, chosen)


def choose_device(name: str) -> torch.device:
    """Return the device of this process. `auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"unknown device {name!r}; expected auto, cuda, cuda:N or cpu")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        if device.index >= torch.cuda.device_count():
            found = f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here"
            raise ValueError(f"there is no {device}: {found}; expected another --device, such as auto or cpu")
        torch.cuda.set_device(device)
    return device
