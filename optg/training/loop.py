"""The training loop. Time is the optimizer step: data order, learning rate, masks and checkpoints are functions of it."""

import time
import warnings
from dataclasses import dataclass
from typing import Any

from optg.training import checkpoint, state
from optg.training.agreement import SameMasks, Votes
from optg.training.divergence import no_mask_of_nan, refuse_nan
from optg.training.evaluation import evaluate
from optg.training.folder import RunFolder
from optg.training.parallel import Parallel
from optg.training.rates import learning_rate
from optg.training.report import Report
from optg.training.setup import Setup
from optg.training.signals import Stop
from optg.training.tally import Tally


@dataclass
class Saving:
    minutes: float = 10.0  # between two checkpoints; after an epoch one is made if a tenth of that has passed
    keep: int = 2  # how many of the last to keep

    def __post_init__(self) -> None:
        if self.keep < 1 or not self.minutes > 0:
            raise ValueError(f"keep is {self.keep} and minutes {self.minutes}; expected at least 1, and above 0")


def train(setup: Setup, folder: RunFolder, parallel: Parallel, report: Report, saving: Saving) -> dict[str, Any]:
    """Train to the end, going on from the folder's newest checkpoint. Returns the last epoch's metrics."""
    recipe, data, model, sparsifier, clock = setup.recipe, setup.data, setup.model, setup.sparsifier, setup.sparsifier.clock
    tally, masks, vote = Tally(sparsifier), SameMasks(sparsifier, parallel), Votes(parallel)
    resume(setup, folder, parallel, report, tally)
    metrics: dict[str, Any] = (folder.metrics() or [{}])[-1]  # of the last epoch, where all are done
    saved = time.monotonic()

    def save() -> None:
        nonlocal saved
        refuse_nan(tally.losses, model, folder, clock)
        with no_mask_of_nan(tally.losses, model, folder, clock):
            tensors, values = state.gather(model, setup.optimizer, sparsifier, keep=parallel.first)
        if parallel.first:
            values |= {"classes": data.classes, "shape": data.shape}
            checkpoint.save(folder.checkpoints, clock.step, tensors | tally.state(), values, saving.keep)
        saved = time.monotonic()

    model.train()
    with Stop(parallel) as stop:
        while not clock.finished or tally.losses:  # an epoch may have been left after its last step
            epoch = (clock.step - len(tally.losses)) // data.steps_per_epoch
            for images, labels in data.train(epoch, start=len(tally.losses)):
                rate = learning_rate(recipe, clock)
                with no_mask_of_nan(tally.losses, model, folder, clock):
                    tally.add(setup.step(images, labels, rate))
                masks.check()
                report.step(sparsifier, tally.losses, recipe.batch_size)
                asked, late = vote(stop.asked, time.monotonic() - saved > 60 * saving.minutes)
                if asked or late:
                    save()
                if asked:
                    stop.leave(f"stopped at step {clock.step} of {clock.total}; the same command goes on from there")
            refuse_nan(tally.losses, model, folder, clock)
            metrics = tally.row(recipe, parallel) | evaluate(model, data, recipe, parallel)
            metrics["unreadable"] = int(parallel.total(data.skipped)[0])
            if parallel.first:
                folder.log(metrics)
            report.metrics(metrics, recipe.epochs)
            tally.clear()
            if clock.finished or parallel.any(time.monotonic() - saved > 6 * saving.minutes):
                save()
    if parallel.any(metrics.get("step") != clock.step):  # trained to the end before, and the last row is lost
        metrics = evaluate(model, data, recipe, parallel) | {"unreadable": 0}
    sparsifier.finish()
    return metrics


def resume(setup: Setup, folder: RunFolder, parallel: Parallel, report: Report, tally: Tally) -> None:
    """Go on from the newest checkpoint that is whole, if there is one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checkpoint.load_newest(folder.checkpoints)
    for warning in caught:
        report.say(str(warning.message))
    if found:
        path, tensors, values = found
        state.restore(setup.model, setup.optimizer, setup.sparsifier, tensors, values)
        tally.restore(tensors)
    step = setup.sparsifier.clock.step
    if parallel.most(step) != [-least for least in parallel.most(-step)]:
        raise ValueError(
            f"this process would go on from step {step}, another from elsewhere; {folder.path} must be one folder for all of "
            "them, on a disk that they share"
        )
    if parallel.first:  # one process writes
        folder.forget_after(step - len(tally.losses))  # the row of an unfinished epoch is to come
    if found:
        report.say(f"going on from {path.name}")
