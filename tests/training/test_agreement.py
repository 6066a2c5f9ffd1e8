"""Two gloo processes whose masks differ, or that would stop at different steps."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console

from optg.training import agreement
from optg.training.agreement import Disagreement, Votes, fingerprint
from optg.training.folder import RunFolder
from optg.training.loop import Saving, train
from optg.training.parallel import Parallel
from optg.training.recipe import Plan, Recipe
from optg.training.report import Report
from optg.training.setup import set_up


def test_a_fingerprint_tells_masks_apart():
    g = torch.Generator().manual_seed(0)
    masks = [torch.rand(40, 5, generator=g) < 0.1 for _ in range(300)]
    for mask in masks[:50]:  # neighbours: one place changed, two exchanged
        kept, gone = mask.nonzero()[0], (~mask).nonzero()[0]
        masks += [mask.clone(), mask.clone()]
        masks[-1][*kept] = masks[-2][*kept] = False
        masks[-1][*gone] = True
    assert len({int(fingerprint(m)) for m in masks}) == len({tuple(m.flatten().tolist()) for m in masks})
    last = torch.rand(4, 3, 2, 2, generator=g) < 0.5
    assert fingerprint(last) == fingerprint(last.to(memory_format=torch.channels_last))


def disturbed(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    recipe = Recipe("tests.training.own:model", "tests.training.own:data", epochs=3, batch_size=16, sparsity=0.5)
    messages = {
        "ddp": "the mask of 5.weight on rank 1 is not that of rank 0",
        "fsdp": "the mask of 5.weight has .* zeros over all ranks",
    }
    for mode, message in messages.items():
        parallel = Parallel(mode, rank, 2)
        setup = set_up(Plan(recipe), parallel)
        weights = setup.sparsifier.weights
        record = weights.mask_set.record

        def spoilt(counts, record=record, weights=weights):
            record(counts)
            if rank == 1:
                weights.masks[1].view(-1)[7].logical_not_()

        weights.mask_set.record = spoilt
        with pytest.raises(Disagreement, match=f"step 10: {message}"), Report("", Console(), silent=True) as report:
            train(setup, RunFolder(Path(folder, mode)), parallel, report, Saving())
    check_votes(rank)
    dist.destroy_process_group()


def check_votes(rank: int) -> None:
    """Both hear of what one says, at the same step, and not at every step."""
    vote, heard = Votes(Parallel("ddp", rank, 2)), []
    for step in range(400):
        time.sleep(0.0005 * (1 + rank))
        if vote(step >= 150 and rank == 1)[0]:
            heard.append(step)
    assert 150 <= heard[0] < 150 + agreement.MOST and 1 < len(heard) < 100
    same = torch.tensor(heard[:2])
    dist.broadcast(same, 0)
    assert same.tolist() == heard[:2]


def test_masks_that_differ_are_found_at_the_cut(tmp_path):
    mp.spawn(disturbed, args=(str(tmp_path),), nprocs=2)


def test_one_process_need_not_vote():
    assert Votes(Parallel())(True, False) == [True, False]
