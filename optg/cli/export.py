"""The command `optg export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from optg import trust
from optg.naming import visible
from optg.training.arguments import TrustFlag

DESCRIPTION = """Write a trained model as one small file.

Example: optg export runs/digits-optg-0.95-seed0"""


@dataclass
class ExportOptions:
    # run folder, one of its checkpoints (RUN/checkpoints/step-N), or a packed file
    what: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT|FILE")]
    # packed: graph, masks and values, for optg.load, predict and bench; safetensors: dense tensors; onnx: for other engines
    to: Literal["packed", "safetensors", "onnx"] = "packed"
    output: Path | None = None  # file to write; by default in the run folder, or beside the packed file
    # weights of a packed file: bfloat16 rounds them; int8 also quantizes the activations, calibrated on training images
    values: Literal["float32", "bfloat16", "int8"] = "float32"
    folder: str | None = None  # folder of the dataset that int8 is calibrated on; by default the recipe's, else ./data
    shrink: bool = False  # remove channels that are 0, which makes the model smaller on any hardware; for packed and onnx
    trust: TrustFlag = False


def main(args: list[str]) -> None:
    """Write a trained model as one small file."""
    options = tyro.cli(ExportOptions, args=args, prog="optg export", description=DESCRIPTION)
    if options.trust:
        trust.allow_everything()

    from optg.deploy.export import export

    print(visible(export(options.what, options.to, options.output, options.values, options.shrink, options.folder)))
