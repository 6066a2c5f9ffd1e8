"""Masks for averages of weights."""

import pytest
import torch

from tests.toy import EPOCHS, STEPS, attach, batches, convnet, count_zeros, entropy, mlp, step


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_apply_masks_makes_averages_sparse():
    model = convnet()
    optimizer, sparsifier = attach(model)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
        ema.update_parameters(model)
    assert count_zeros(ema) < count_zeros(model)
    sparsifier.apply_masks(ema)
    assert count_zeros(ema) >= count_zeros(model)
    with pytest.raises(ValueError, match=r"the other model has no 0\.weight of shape \(8, 1, 3, 3\)"):
        sparsifier.apply_masks(mlp())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_apply_masks_to_an_average_on_another_device():
    _, sparsifier = attach(convnet(), method="snip", loss=entropy, batches=batches(1))
    average = convnet().cuda()
    sparsifier.apply_masks(average)
    assert count_zeros(average) == 1736
