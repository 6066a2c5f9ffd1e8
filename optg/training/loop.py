"""The training loop. Time is the optimizer step: data order, learning rate, masks and checkpoints are functions of it."""

from itertools import islice
from typing import TYPE_CHECKING, Any

from optg.training.agreement import MaskCheck, Vote
from optg.training.divergence import DivergenceGuard
from optg.training.evaluation import evaluate
from optg.training.folder import RunFolder
from optg.training.parallel import Parallel
from optg.training.rates import learning_rate
from optg.training.saving import Checkpointer, CheckpointPolicy
from optg.training.setup import Setup
from optg.training.signals import StopSignal
from optg.training.tally import EpochTally

if TYPE_CHECKING:
    from optg.training.progress import TrainingProgress


def train(
    setup: Setup, folder: RunFolder, parallel: Parallel, progress: "TrainingProgress", policy: CheckpointPolicy
) -> dict[str, Any]:
    """Train to the end, from the folder's newest checkpoint if it has one. Return the metrics of the last epoch."""
    recipe, data, model, sparsifier, clock = setup.recipe, setup.data, setup.model, setup.sparsifier, setup.sparsifier.clock
    tally = EpochTally(sparsifier, data.steps_per_epoch)
    guard = DivergenceGuard(model, clock, tally, folder)
    checkpoints = Checkpointer(setup, folder, parallel, tally, guard, policy)
    masks, vote = MaskCheck(sparsifier, parallel), Vote(parallel)

    checkpoints.resume(progress)
    metrics: dict[str, Any] = (folder.metrics() or [{}])[-1]
    model.train()
    with StopSignal(parallel) as stop:
        while not clock.finished or tally.steps:  # a checkpoint may hold a whole epoch that was not evaluated yet
            batches = data.train(tally.epoch, start=tally.steps)
            for images, labels in islice(batches, clock.total - clock.step):  # max_steps may end training within an epoch
                with guard.watch_cuts():
                    tally.add(setup.step(images, labels, learning_rate(recipe, clock, data.steps_per_epoch)))
                masks.check()
                progress.step(tally, recipe)
                stopping, saving = vote(stop.requested, checkpoints.due())
                if stopping or saving:
                    checkpoints.save()
                if stopping:
                    stop.exit(f"Stopped at step {clock.step} of {clock.total}. To continue, give the same command again.")
            guard.check()
            metrics = tally.row(recipe, parallel) | evaluate(model, data, recipe, parallel)
            metrics["unreadable"] = int(parallel.sum(data.skipped)[0])
            if parallel.is_first:
                folder.append_metrics(metrics)
            progress.epoch(metrics, recipe.epochs)
            tally.clear()
            if clock.finished or parallel.any(checkpoints.due_after_epoch()):
                checkpoints.save()

    if parallel.any(metrics.get("step") != clock.step):  # training was complete, but the last row of metrics is lost
        metrics = evaluate(model, data, recipe, parallel) | {"unreadable": 0}
    sparsifier.finish()
    return metrics
