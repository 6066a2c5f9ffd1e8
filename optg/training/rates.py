"""The learning rate of every step, as a plain function of the recipe and the clock."""

import math

from optg.core.clock import Clock, cycle_length
from optg.training.recipe import Recipe


def learning_rate(recipe: Recipe, clock: Clock, steps_per_epoch: int) -> float:
    """Return the learning rate of the next step. `steps_per_epoch` counts the steps of a whole epoch of the data."""
    epoch, epochs = clock.step / steps_per_epoch, clock.total / steps_per_epoch
    if epoch < recipe.warmup:
        return recipe.lr * (clock.step + 1) / (recipe.warmup * steps_per_epoch + 1)
    if recipe.rate_per == "epoch":
        epoch = math.floor(epoch)
    progress = (epoch - recipe.warmup) / (epochs - recipe.warmup)
    if recipe.cycles > 1:
        length = cycle_length(clock.total, recipe.cycles)  # as IMP divides training
        done = min(clock.step // length, recipe.cycles - 1)
        progress = (clock.step - done * length) / (length if done < recipe.cycles - 1 else clock.total - done * length)
    return recipe.lr * SCHEDULES[recipe.schedule](recipe, min(progress, 1.0))


def constant(recipe: Recipe, progress: float) -> float:
    return 1.0


def cosine(recipe: Recipe, progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def hold(recipe: Recipe, progress: float) -> float:
    return cosine(recipe, max(progress - recipe.hold, 0.0) / (1 - recipe.hold))


def multistep(recipe: Recipe, progress: float) -> float:
    return recipe.gamma ** sum(progress >= milestone for milestone in recipe.milestones)


SCHEDULES = {f.__name__: f for f in (constant, cosine, hold, multistep)}
