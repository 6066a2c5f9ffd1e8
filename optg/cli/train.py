"""The command `optg train`."""

import os
import sys

from optg.training.arguments import parse_train_args


def main(args: list[str]) -> None:
    """Train a model from a recipe and make it sparse."""
    plan, options = parse_train_args(args)

    from optg.training.run import run_training

    if plan.recipe.quantize:
        from optg.deploy import qat

        run_training(plan, options, qat)
    else:
        run_training(plan, options)
    if options.parallel != "none":  # everything is written; threads of torch.distributed sometimes abort a normal exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
