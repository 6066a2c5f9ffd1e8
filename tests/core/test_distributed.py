"""Train every method in two and three gloo processes, with DDP and FSDP2: the masks equal those of one process bit for bit.

In float64 and without batch norm, results could differ only by rounding.
"""

import copy
import dataclasses
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
from optg.core.masks import keep_top
from optg.core.sharding import Shards
from optg.methods import METHODS
from tests.methods.test_contract import EPOCHS, STEPS, short
from tests.toy import batches, convnet, entropy, goal, step


def network() -> nn.Module:
    torch.manual_seed(0)
    return convnet(norm=False).double()


def shard(model: nn.Module) -> nn.Module:
    fully_shard(model[4])
    fully_shard(model)
    return model


WRAPPERS = {"one": lambda model: model, "ddp": DistributedDataParallel, "fsdp": shard}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(name: str, wrapper: str, data, until: int = EPOCHS * STEPS, **options):
    model = network()
    target = goal(name, model, 0.9)
    model = WRAPPERS[wrapper](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    rank, world = (0, 1) if wrapper == "one" else (dist.get_rank(), dist.get_world_size())
    data = [(x[rank::world], y[rank::world]) for x, y in data]
    sparsifier = optg.sparsify(
        model, optimizer, dataclasses.replace(short(name), **options), epochs=EPOCHS, steps_per_epoch=STEPS, loss=entropy,
        batches=data, **target,
    )  # fmt: skip
    for batch in data[:until]:
        step(model, optimizer, batch)
    return model, sparsifier


def train_and_compare(rank: int, world: int, store: str, report) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    data = batches(EPOCHS * STEPS, size=12, dtype=torch.float64)
    for name in METHODS:
        _, single = train(name, "one", data)
        expected = {n: m.clone() for n, m in single.masks.items()}
        for wrapper in ("ddp", "fsdp"):
            if wrapper == "fsdp" and name == "grasp":
                with pytest.raises(ValueError, match="does not work on weights that FSDP2 has split"):
                    train(name, wrapper, data)
                continue
            _, sparsifier = train(name, wrapper, data)
            masks = {n: full(m) for n, m in sparsifier.masks.items()}
            assert list(masks) == list(expected), (name, wrapper)
            for layer, mask in masks.items():
                assert torch.equal(mask, expected[layer]), (name, wrapper, layer)
            assert sparsifier.weights.counts.tolist() == single.weights.counts.tolist(), (name, wrapper)
            state = copy.deepcopy(single.state_dict())  # the state of one process loads into several
            sparsifier.load_state_dict(state)
            for kind, layers in sparsifier.state_dict()["tensors"].items():
                for layer, tensor in layers.items():
                    assert torch.equal(full(tensor), single.state_dict()["tensors"][kind][layer]), (name, wrapper, kind)
    check_ties_over_shards(rank, world)
    check_clipping(data)
    check_split_filters()
    check_sparse_opt(data)
    check_dead_neurons()
    report.put(rank)
    dist.barrier()  # a process that exits early breaks the connections of the others
    os._exit(0)  # a normal exit sometimes aborts in torch's own threads


def check_ties_over_shards(rank: int, world: int) -> None:
    """Check masks of random ties, with one layer split unevenly over the ranks and one held whole by each."""
    g = torch.Generator().manual_seed(0)
    for zeros in range(0, 60, 7):
        split, held = torch.randint(0, 3, (9, 5), generator=g).float(), torch.randint(0, 3, (15,), generator=g).float()
        pieces = Shards(dist.group.WORLD, (True, False))
        part, same = keep_top([split.tensor_split(world)[rank], held], zeros, shards=pieces)
        expected = keep_top([split, held], zeros)
        assert torch.equal(part, expected[0].tensor_split(world)[rank]) and torch.equal(same, expected[1])
    mine = torch.full((2,), torch.nan if rank == 1 else 0.0)
    with pytest.raises(FloatingPointError, match="NaN in the scores of a"):  # on every rank, or the others would hang
        keep_top([mine], 1, shards=Shards(dist.group.WORLD, (True,)), names=["a"])


def check_sparse_opt(data) -> None:
    """Check that the factors of neurons, and what is learned with them, do not depend on how weights are split."""
    _, single = train("dpf", "one", data, ham=20.0, sparse_opt=True)
    for wrapper in ("ddp", "fsdp"):
        _, sparsifier = train("dpf", wrapper, data, ham=20.0, sparse_opt=True)
        saved, expected = (s.state_dict()["tensors"]["latent"] for s in (sparsifier, single))
        for layer, latent in saved.items():
            torch.testing.assert_close(full(latent), expected[layer], rtol=1e-6, atol=1e-9)


def check_clipping(data) -> None:
    """Check that the norm of the received gradients does not depend on how weights are split."""
    norms = {}
    for wrapper in WRAPPERS:
        model, sparsifier = train("optg", wrapper, data, until=17)
        rank, world = (0, 1) if wrapper == "one" else (dist.get_rank(), dist.get_world_size())
        x, y = data[17]
        sparsifier.optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rank::world]), y[rank::world]).backward()
        norms[wrapper] = [float(sparsifier.clip_grad_norm_(1e9, p)) for p in (2.0, 1.0, float("inf"))]
    assert norms["ddp"] == pytest.approx(norms["one"]) and norms["fsdp"] == pytest.approx(norms["one"])


def check_split_filters() -> None:
    """Check that ST-3 rescales filters whose inputs are split over the ranks, here unevenly, as one process does."""
    found = []
    for wrap in (lambda model: model, fully_shard):
        torch.manual_seed(0)
        model = wrap(nn.ConvTranspose2d(5, 6, 3, bias=False).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = METHODS["st3"](schedule="constant")
        optg.sparsify(model, optimizer, method, sparsity=0.5, epochs=1, steps_per_epoch=9)
        found.append(full(model.weight.detach()))
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


def check_dead_neurons() -> None:
    """Check that a neuron whose inputs are split over the ranks is dead only if all ranks have removed its weights."""
    found = []
    for wrap in (lambda model: model, fully_shard):
        torch.manual_seed(0)
        model = nn.ConvTranspose2d(5, 6, 3, bias=False).double()
        with torch.no_grad():
            model.weight[:, 1] *= 1e-3  # dead
            model.weight[:4, 2] *= 1e-3  # alive on one rank
        model = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = METHODS["phoenix"](schedule="constant", sparse_opt=True)
        updates = optg.sparsify(model, optimizer, method, sparsity=0.5, steps=9)._step.updates
        updates.renew()
        found.append((updates.alive.tensors[0].flatten(), updates.outputs.tensors[0].flatten()))
    assert found[0][0].tolist() == [1, 0, 1, 1, 1, 1]
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3])
def test_ranks_agree_with_one_process(world, tmp_path):
    report = mp.get_context("spawn").SimpleQueue()
    mp.spawn(train_and_compare, args=(world, str(tmp_path / "store"), report), nprocs=world)
    assert sorted(report.get() for _ in range(world)) == list(range(world))
