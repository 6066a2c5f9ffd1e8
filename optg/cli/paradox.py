"""The command `optg paradox`."""

from optg.experiments.paradox.command import Paradox, paradox
from optg.training.arguments import parse_with_model_options

DESCRIPTION = """Measure the independence paradox: compare the predicted and the true effect of removing weights on the loss.

Examples: optg paradox RUN, or optg paradox vgg19 --data cifar10"""


def main(args: list[str]) -> None:
    """Compare the predicted and the true effect of removing weights on the loss."""
    paradox(parse_with_model_options(Paradox, args, "optg paradox", DESCRIPTION))
