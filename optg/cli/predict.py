"""The command `optg predict`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from optg import trust
from optg.training.arguments import TrustFlag

DESCRIPTION = """Run a trained model on this CPU, skipping its zeros.

Examples: optg predict model.optg photo.jpg, or optg predict RUN --data test"""


@dataclass
class PredictOptions:
    # packed file, run folder, or one of its checkpoints
    what: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE|RUN|CHECKPOINT")]
    # image files; prints the five most likely classes of each
    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[IMAGE …]")] = ()
    data: Literal["test"] | None = None  # test: run on the test images of the model's dataset and print accuracy and speed
    folder: str | None = None  # folder that holds the dataset; by default the recipe's, else ./data
    threads: int | None = None  # number of threads; by default one per core
    trust: TrustFlag = False


def main(args: list[str]) -> None:
    """Run a trained model on images, on this CPU."""
    options = tyro.cli(PredictOptions, args=args, prog="optg predict", description=DESCRIPTION)
    if options.trust:
        trust.allow_everything()

    from optg.deploy.predict import predict
    from optg.terminal import PlainConsole

    predict(options.what, list(options.images), options.data == "test", options.folder, options.threads, PlainConsole())
