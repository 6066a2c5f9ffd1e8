"""The training loop. Time is the optimizer step: data order, learning rate, masks and checkpoints are functions of it."""

from collections.abc import Callable
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
    setup: Setup,
    folder: RunFolder,
    parallel: Parallel,
    progress: "TrainingProgress",
    policy: CheckpointPolicy,
    begin: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train to the end, from the folder's newest checkpoint if it has one. Return the metrics of the last epoch.

    The first process calls `begin` before anything is written, when the checkpoint is known to be whole.
    """
    recipe, data, model, sparsifier, clock = setup.recipe, setup.data, setup.model, setup.sparsifier, setup.sparsifier.clock
    tally = EpochTally(sparsifier, data.steps_per_epoch)
    guard = DivergenceGuard(model, clock, tally, folder)
    checkpoints = Checkpointer(setup, folder, parallel, tally, guard, policy)
    masks, vote = MaskCheck(sparsifier, parallel), Vote(parallel)

    checkpoints.resume(progress, begin)
    metrics: dict[str, Any] = {}
    model.train()
    with StopSignal(parallel) as stop:
        while not clock.finished or tally.steps:  # a checkpoint may hold a whole epoch that was not evaluated yet
            batches = data.train(tally.epoch, start=tally.steps)
            for images, labels in islice(batches, clock.total - clock.step):  # max_steps may end training within an epoch
                setup.quantize_if_due()
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
            metrics = tally.row(recipe, parallel) | evaluate(model, data, recipe, parallel, recipe.validate)
            if recipe.validate:
                metrics["measured_on"] = "validation images"
            metrics["unreadable"] = int(parallel.sum(data.skipped)[0])
            if checkpoints.newest is None:
                checkpoints.save()  # rows without a checkpoint mean that checkpoints were lost
            if parallel.is_first:
                folder.metrics.append(metrics)
            progress.epoch(metrics, recipe.epochs)
            tally.clear()
            if clock.finished or parallel.any(checkpoints.due_after_epoch()):
                checkpoints.save()

    if not metrics:  # training was complete, but its result is lost
        metrics = evaluate(model, data, recipe, parallel, recipe.validate)
    if recipe.validate:
        measured = {"images": data.held_out, "accuracy": metrics["accuracy"], "loss": metrics["test_loss"]}
        metrics = metrics | evaluate(model, data, recipe, parallel) | {"validation": measured}
    sparsifier.finish()
    return metrics
