"""Every recipe builds its model and trains two steps on synthetic images of the right shape."""

import dataclasses

import pytest
import torch

from optg.training import recipe
from optg.training.parallel import Parallel
from optg.training.rates import learning_rate
from optg.training.setup import set_up

IMAGES = {"digits": "synthetic:1x8x8:10:64", "cifar10": "synthetic:3x32x32:10:64", "cifar100": "synthetic:3x32x32:100:64"}


@pytest.mark.parametrize("name", recipe.names())
def test_a_recipe_trains_two_steps(name):
    plan = recipe.load(name)
    images = IMAGES.get(plan.recipe.data, "synthetic:3x64x64:1000:64")  # ImageNet's own size takes too long on a CPU
    plan.recipe = dataclasses.replace(plan.recipe, data=images, batch_size=2, compile=False, precision="float32", epochs=10)
    setup = set_up(plan, Parallel())
    clock, steps = setup.sparsifier.clock, setup.data.steps_per_epoch
    for images, labels in list(setup.data.train(0))[:2]:
        assert torch.isfinite(setup.step(images, labels, learning_rate(setup.recipe, clock, steps)))
    assert setup.sparsifier.clock.step == 2


def test_the_learning_rate_restarts_with_each_cycle_of_imp():
    plan = dataclasses.replace(recipe.load("digits"), method="imp")
    setup = set_up(plan, Parallel())
    assert setup.recipe.cycles == setup.sparsifier.method.cycles > 1
    plan.recipe.cycles = 2
    assert set_up(plan, Parallel()).recipe.cycles == 2


def test_parts_of_a_batch_are_weighted_by_their_size():
    """torch splits 12 images in 8 parts into 6 parts of 2."""
    gradients = []
    for accumulate in (1, 8):
        plan = recipe.load("digits")
        plan.recipe = dataclasses.replace(
            plan.recipe, model="tests.training.user_code:model", batch_size=16, accumulate=accumulate
        )
        setup = set_up(plan, Parallel())
        images, labels = next(iter(setup.data.train(0)))
        setup.optimizer.step = lambda: None
        setup.step.eager(images[:12], labels[:12])
        gradients.append([p.grad.clone() for p in setup.model.parameters()])
    for whole, parts in zip(*gradients):
        torch.testing.assert_close(parts, whole)
