"""Floors on weights that FSDP2 splits: the masks of one process, or one sentence."""

import faulthandler
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import optg
from tests.core.test_distributed import WRAPPERS, full, network
from tests.methods.test_contract import EPOCHS, STEPS, short
from tests.toy import batches, step


def train(name: str, wrapper: str, data, **options):
    model = WRAPPERS[wrapper](network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    rank, world = (0, 1) if wrapper == "one" else (dist.get_rank(), dist.get_world_size())
    goals = {"sparsity": 0.9, "epochs": EPOCHS, "steps_per_epoch": STEPS}
    sparsifier = optg.sparsify(model, optimizer, short(name), **goals, **options)
    for x, y in data:
        step(model, optimizer, (x[rank::world], y[rank::world]))
    return sparsifier


def compare(rank: int, world: int, store: str) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    data = batches(EPOCHS * STEPS, size=12, dtype=torch.float64)
    for name in ("optg", "rigl", "feather"):
        single, sharded = (train(name, wrapper, data, floor=0.05, floor_by="output") for wrapper in ("one", "fsdp"))
        for layer, mask in single.masks.items():
            assert torch.equal(mask, full(sharded.masks[layer])), (name, layer)
    with pytest.raises(ValueError, match=r"floor_by='part' needs the whole of 0\.weight, which FSDP2 has split"):
        train("optg", "fsdp", data, floor=0.05)
    dist.barrier()
    os._exit(0)


def test_ranks_agree_with_one_process(tmp_path):
    mp.spawn(compare, args=(2, str(tmp_path / "store")), nprocs=2)
