"""Two gloo processes: masks that differ are found, and votes reach both at the same step."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console

from optg.training import agreement
from optg.training.agreement import Vote, fingerprint
from optg.training.errors import MasksDiffer
from optg.training.folder import RunFolder
from optg.training.loop import train
from optg.training.parallel import Parallel
from optg.training.progress import TrainingProgress
from optg.training.recipe import Plan, Recipe
from optg.training.saving import CheckpointPolicy
from optg.training.setup import set_up


def test_a_fingerprint_tells_masks_apart():
    g = torch.Generator().manual_seed(0)
    masks = [torch.rand(40, 5, generator=g) < 0.1 for _ in range(300)]
    for mask in masks[:50]:  # similar masks: one weight changed, two exchanged
        kept, gone = mask.nonzero()[0], (~mask).nonzero()[0]
        masks += [mask.clone(), mask.clone()]
        masks[-1][*kept] = masks[-2][*kept] = False
        masks[-1][*gone] = True
    assert len({int(fingerprint(m)) for m in masks}) == len({tuple(m.flatten().tolist()) for m in masks})
    last = torch.rand(4, 3, 2, 2, generator=g) < 0.5
    assert fingerprint(last) == fingerprint(last.to(memory_format=torch.channels_last))


def train_with_a_flipped_mask(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    recipe = Recipe("tests.training.user_code:model", "tests.training.user_code:data", epochs=3, batch_size=16, sparsity=0.5)
    messages = {
        "ddp": "the mask of 5.weight on rank 1 differs from the one on rank 0",
        "fsdp": "the mask of 5.weight has .* zeros over all ranks",
    }
    for mode, message in messages.items():
        parallel = Parallel(mode, rank, 2)
        setup = set_up(Plan(recipe), parallel)
        weights = setup.sparsifier.weights
        record = weights.mask_set.record

        def record_and_flip_one(counts, record=record, weights=weights):
            record(counts)
            if rank == 1:
                weights.masks[1].view(-1)[7].logical_not_()

        weights.mask_set.record = record_and_flip_one
        progress = TrainingProgress("", Console(), silent=True)
        with pytest.raises(MasksDiffer, match=f"step 10: {message}"), progress:
            train(setup, RunFolder(Path(folder, mode)), parallel, progress, CheckpointPolicy())
    check_votes(rank)
    dist.destroy_process_group()


def check_votes(rank: int) -> None:
    """Both learn of one process's flag at the same step, and not at every step."""
    vote, heard = Vote(Parallel("ddp", rank, 2)), []
    for step in range(400):
        time.sleep(0.0005 * (1 + rank))
        if vote(step >= 150 and rank == 1)[0]:
            heard.append(step)
    assert 150 <= heard[0] < 150 + agreement.MAX_VOTE_STEPS and 1 < len(heard) < 100
    same = torch.tensor(heard[:2])
    dist.broadcast(same, 0)
    assert same.tolist() == heard[:2]


def test_masks_that_differ_are_found_at_the_cut(tmp_path):
    mp.spawn(train_with_a_flipped_mask, args=(str(tmp_path),), nprocs=2)


def test_a_single_process_does_not_vote():
    assert Vote(Parallel())(True, False) == [True, False]
