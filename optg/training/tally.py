"""What has happened since the last row of metrics. A checkpoint keeps it, so that an interrupted epoch has one whole row."""

import time
from typing import Any

import torch
from torch import Tensor

from optg.core.clock import Clock
from optg.sparsifier import Sparsifier
from optg.training.parallel import Parallel
from optg.training.rates import learning_rate
from optg.training.recipe import Recipe


class Tally:
    """Losses, mask changes and time of an epoch, on the device until a row is made of them."""

    def __init__(self, sparsifier: Sparsifier) -> None:
        self.sparsifier, self.counts = sparsifier, sparsifier.weights.counts
        self.clear()

    def clear(self) -> None:
        self.losses: list[Tensor] = []
        self.moved = torch.zeros(2, dtype=torch.int64)  # weights that were removed, and revived
        self.since = time.monotonic()

    def add(self, loss: Tensor) -> None:
        self.losses.append(loss)
        if self.counts is not self.sparsifier.weights.counts:  # a new mask
            self.counts = self.sparsifier.weights.counts
            self.moved = self.moved.to(self.counts.device) + self.counts[:, 1:].sum(0)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def row(self, recipe: Recipe, parallel: Parallel) -> dict[str, Any]:
        """The epoch so far. Rates are those of its last step; of each layer: zeros now, removed and revived by the last cut."""
        sparsifier, weights, clock = self.sparsifier, self.sparsifier.weights, self.sparsifier.clock
        last = Clock(clock.epochs, clock.steps_per_epoch, clock.step - 1)
        rate = learning_rate(recipe, last)
        loss, (removed, revived) = float(torch.stack(self.losses).mean()), self.moved.tolist()  # a sync: now all steps are done
        seconds = self.seconds
        return {
            "step": clock.step,
            "epoch": last.epoch,
            "loss": parallel.total(loss)[0] / parallel.world,
            "sparsity": sparsifier.sparsity,
            "lr": rate,
            **sparsifier.method.metrics(last, rate),
            "seconds": seconds,
            "images_per_second": len(self.losses) * recipe.batch_size / seconds,
            "removed": removed,
            "revived": revived,
            "layers": dict(zip(weights.names, weights.counts.tolist())),
        }

    def state(self) -> dict[str, Tensor]:
        losses = torch.stack(self.losses) if self.losses else torch.zeros(0)
        return {"epoch.losses": losses, "epoch.moved": self.moved, "epoch.seconds": torch.tensor(self.seconds)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        device = self.sparsifier.weights.devices[0]
        self.losses, self.moved = list(tensors["epoch.losses"].to(device).unbind()), tensors["epoch.moved"]
        self.counts, self.since = self.sparsifier.weights.counts, time.monotonic() - float(tensors["epoch.seconds"])
