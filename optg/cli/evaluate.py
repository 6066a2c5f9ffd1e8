"""The command `optg evaluate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from optg import trust
from optg.training.arguments import TrustFlag


@dataclass
class EvaluateOptions:
    # run folder, or one of its checkpoints (RUN/checkpoints/step-N)
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT")]
    device: str = "auto"  # cuda, cuda:N or cpu; auto: a GPU if there is one
    trust: TrustFlag = False


def main(args: list[str]) -> None:
    """Measure the accuracy of a run, or of one of its checkpoints, on the test images."""
    options = tyro.cli(EvaluateOptions, args=args, prog="optg evaluate", description=main.__doc__)
    if options.trust:
        trust.allow_everything()

    from optg import data as datasets
    from optg.training.evaluation import evaluate
    from optg.training.parallel import start
    from optg.training.saved import SavedRun

    run, parallel = SavedRun.open(options.run), start("none", options.device)
    recipe = run.plan.recipe
    data = datasets.load(recipe.data, recipe.folder, batch_size=recipe.batch_size, device=parallel.device, seed=recipe.seed)
    metrics = evaluate(run.model(data.classes).to(parallel.device), data, recipe, parallel)
    print(f"accuracy {metrics['accuracy']:.2%}  loss {metrics['test_loss']:.4f}  ({data.sizes[1]} images)")
