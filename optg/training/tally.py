"""Count what happens during an epoch. Checkpoints keep the counts, so an interrupted epoch still gets one complete row."""

import time
from typing import Any

import torch
from torch import Tensor

from optg.sparsifier import Sparsifier
from optg.training.parallel import Parallel
from optg.training.rates import learning_rate
from optg.training.recipe import Recipe


class EpochTally:
    """The losses, mask changes and time of the current epoch. They stay on the device until `row` reads them."""

    def __init__(self, sparsifier: Sparsifier, steps_per_epoch: int) -> None:
        self.sparsifier, self.counts = sparsifier, sparsifier.weights.counts
        self.steps_per_epoch = steps_per_epoch  # batches in one pass over the data; epochs of the sparsifier's clock may differ
        self.clear()

    def clear(self) -> None:
        """Start a new epoch."""
        self.losses: list[Tensor] = []
        self.moved = torch.zeros(2, dtype=torch.int64)  # weights removed and revived
        self.since = time.monotonic()

    def add(self, loss: Tensor) -> None:
        """Record a step's loss, and the mask changes if it made a cut."""
        self.losses.append(loss)
        if self.counts is not self.sparsifier.weights.counts:
            self.counts = self.sparsifier.weights.counts
            self.moved = self.moved.to(self.counts.device) + self.counts[:, 1:].sum(0)

    @property
    def steps(self) -> int:
        """Steps of this epoch trained so far."""
        return len(self.losses)

    @property
    def epoch(self) -> int:
        """The current epoch of the data, counted from 0."""
        return (self.sparsifier.clock.step - self.steps) // self.steps_per_epoch

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def row(self, recipe: Recipe, parallel: Parallel) -> dict[str, Any]:
        """Return the metrics of the epoch. Forces a CPU–GPU sync.

        Learning rates are from the last step. `layers` maps each layer to [zeros, weights removed by the last cut, weights
        revived by it].
        """
        sparsifier, weights, clock = self.sparsifier, self.sparsifier.weights, self.sparsifier.clock
        last = clock.at(clock.step - 1)
        rate = learning_rate(recipe, last, self.steps_per_epoch)
        loss, (removed, revived) = float(torch.stack(self.losses).mean()), self.moved.tolist()
        seconds = self.seconds  # after the sync: now all steps are complete
        return {
            "step": clock.step,
            "epoch": self.epoch + 1,
            "loss": parallel.sum(loss)[0] / parallel.world,
            "sparsity": sparsifier.sparsity,
            "lr": rate,
            **sparsifier.method.metrics(last, rate),
            "seconds": seconds,
            "images_per_second": self.steps * recipe.batch_size / seconds,
            "removed": removed,
            "revived": revived,
            "layers": dict(zip(weights.names, weights.counts.tolist())),
        }

    def state(self, parallel: Parallel) -> dict[str, Tensor]:
        """Return the counts as tensors for a checkpoint, with the losses of all processes. Every process must call this."""
        losses = torch.stack(self.losses) if self.losses else torch.zeros(0, device=parallel.device)
        seconds = torch.tensor(self.seconds)
        return {"epoch.losses": parallel.gather(losses), "epoch.moved": self.moved, "epoch.seconds": seconds}

    def restore(self, tensors: dict[str, Tensor], parallel: Parallel) -> None:
        """Undo `state`. If the number of processes has changed, each takes the mean of the losses."""
        device = self.sparsifier.weights.devices[0]
        losses = torch.atleast_2d(tensors["epoch.losses"].to(device))  # older checkpoints have those of the first process only
        own = losses[parallel.rank] if len(losses) == parallel.world else losses.mean(0)
        self.losses, self.moved = list(own.unbind()), tensors["epoch.moved"]
        self.counts, self.since = self.sparsifier.weights.counts, time.monotonic() - float(tensors["epoch.seconds"])
