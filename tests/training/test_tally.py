import dataclasses

import pytest
import torch

from optg.sparsifier import sparsify
from optg.training.parallel import Parallel
from optg.training.tally import EpochTally
from tests.toy import convnet

LOSSES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 6.0, 8.0]])  # of two processes


@dataclasses.dataclass
class Two(Parallel):
    """One of two processes."""

    world: int = 2

    def gather(self, values):
        return LOSSES


def tally():
    model = convnet()
    return EpochTally(sparsify(model, torch.optim.SGD(model.parameters(), lr=0.1), sparsity=0.5, steps=20), steps_per_epoch=10)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_resumes_with_its_own_losses(rank):
    before, after = tally(), tally()
    before.losses = list(LOSSES[rank])
    saved = before.state(Two(rank=0))  # the first process writes the checkpoint
    after.restore(saved, Two(rank=rank))
    assert torch.stack(after.losses).tolist() == LOSSES[rank].tolist() and after.steps == 3


def test_another_number_of_processes_resumes_with_the_mean_loss():
    after = tally()
    after.restore(tally().state(Two()), Parallel())
    assert torch.stack(after.losses).tolist() == [2.5, 4.0, 5.5]


def test_one_process_saves_and_restores_its_losses():
    before, after = tally(), tally()
    for losses in ([], list(LOSSES[0])):
        before.losses = losses
        after.restore(before.state(Parallel()), Parallel())
        assert [float(loss) for loss in after.losses] == [float(loss) for loss in losses]
