"""Every recipe builds its model and takes two steps on synthetic images of its own size."""

import dataclasses

import pytest
import torch

from optg.training import recipe
from optg.training.parallel import Parallel
from optg.training.rates import learning_rate
from optg.training.setup import set_up

IMAGES = {"digits": "synthetic:1x8x8:10:64", "cifar10": "synthetic:3x32x32:10:64", "cifar100": "synthetic:3x32x32:100:64"}


@pytest.mark.parametrize("name", recipe.names())
def test_two_steps(name):
    plan = recipe.load(name)
    images = IMAGES.get(plan.recipe.data, "synthetic:3x64x64:1000:64")  # ImageNet's own size takes too long on a CPU
    plan.recipe = dataclasses.replace(plan.recipe, data=images, batch_size=2, compile=False, precision="float32", epochs=10)
    setup = set_up(plan, Parallel())
    for images, labels in list(setup.data.train(0))[:2]:
        assert torch.isfinite(setup.step(images, labels, learning_rate(setup.recipe, setup.sparsifier.clock)))
    assert setup.sparsifier.clock.step == 2


def test_the_learning_rate_starts_anew_with_each_cycle_of_the_lottery():
    made = set_up(dataclasses.replace(recipe.load("digits"), method="imp"), Parallel())
    assert made.recipe.cycles == made.sparsifier.method.cycles > 1
    plan = dataclasses.replace(recipe.load("digits"), method="imp")
    plan.recipe.cycles = 2
    assert set_up(plan, Parallel()).recipe.cycles == 2


def test_parts_of_a_batch_count_by_their_size():
    """12 images in 8 parts: torch makes 6 of them."""
    gradients = []
    for accumulate in (1, 8):
        plan = recipe.load("digits")
        plan.recipe = dataclasses.replace(plan.recipe, model="tests.training.own:model", batch_size=16, accumulate=accumulate)
        made = set_up(plan, Parallel())
        images, labels = next(iter(made.data.train(0)))
        made.optimizer.step = lambda: None
        made.step.eager(images[:12], labels[:12])
        gradients.append([p.grad.clone() for p in made.model.parameters()])
    for whole, parts in zip(*gradients):
        torch.testing.assert_close(parts, whole)
