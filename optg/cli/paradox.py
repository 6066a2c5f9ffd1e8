"""The command `optg paradox`."""

import tyro

from optg.experiments.paradox.command import Paradox, paradox

DESCRIPTION = """Measure the independence paradox: compare the predicted and the true effect of removing weights on the loss.

Examples: optg paradox RUN, or optg paradox vgg19 --data cifar10"""


def main(args: list[str]) -> None:
    """Compare the predicted and the true effect of removing weights on the loss."""
    paradox(tyro.cli(Paradox, args=args, prog="optg paradox", description=DESCRIPTION))
