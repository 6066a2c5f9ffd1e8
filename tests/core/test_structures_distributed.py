"""Structures on two ranks: the masks equal those of one process, also where FSDP2 splits blocks and groups."""

import faulthandler
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import optg
from optg.core.channels import coupled_channels
from tests.core.test_distributed import full
from tests.methods.test_contract import EPOCHS, STEPS, short
from tests.toy import batches, step

EXAMPLE = torch.zeros(2, 1, 8, 8, dtype=torch.float64)
WRAPPERS = {"one": lambda model: model, "ddp": DistributedDataParallel, "fsdp": fully_shard}
CASES = [(name, text) for name in ("optg", "rigl", "feather") for text in ("2:4", "1x4", "4x2")]
CASES += [("gmp", "channel"), ("feather", "channel"), ("s-ste", "2:4"), ("sr-ste", "2:4")]


def network() -> nn.Module:
    """Return a network with an input-first weight. No two ranks share its 7, 6 and 10 rows in multiples of 4."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 7, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(7, 6, 2, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 10),
    ).double()


def train(name: str, text: str, wrapper: str, data):
    model = network()
    groups = coupled_channels(model, EXAMPLE) if text == "channel" else None
    model = WRAPPERS[wrapper](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    rank, world = (0, 1) if wrapper == "one" else (dist.get_rank(), dist.get_world_size())
    goals = {"epochs": EPOCHS, "steps_per_epoch": STEPS, "sparsity": None if ":" in text else 0.6}
    sparsifier = optg.sparsify(model, optimizer, short(name), structure=text, example=groups, **goals)
    for x, y in data:
        step(model, optimizer, (x[rank::world], y[rank::world]))
    return sparsifier


def compare(rank: int, world: int, store: str) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    data = batches(EPOCHS * STEPS, size=12, dtype=torch.float64)
    for name, text in CASES:
        single = train(name, text, "one", data)
        for wrapper in ("ddp", "fsdp"):
            several = train(name, text, wrapper, data)
            for layer, mask in single.masks.items():
                assert torch.equal(mask, full(several.masks[layer])), (name, text, wrapper, layer)
            assert several.weights.counts.tolist() == single.weights.counts.tolist(), (name, text, wrapper)
            assert several.weights.missing_zeros() == single.weights.missing_zeros() == [0]
    with pytest.raises(ValueError, match=r"Before fully_shard, call groups = optg\.core\.channels\.coupled_channels"):
        model = fully_shard(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optg.sparsify(model, optimizer, "gmp", sparsity=0.5, steps=4, structure="channel", example=EXAMPLE)
    dist.barrier()
    os._exit(0)


def test_ranks_agree_with_one_process(tmp_path):
    mp.spawn(compare, args=(2, str(tmp_path / "store")), nprocs=2)
