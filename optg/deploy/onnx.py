"""Write a model as ONNX for other engines, and check the file with onnxruntime."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optg.deploy.graph.capture import log_level
from optg.deploy.packed import PackedModel
from optg.files import atomic_write

TOLERANCE = 1e-5  # largest difference between onnxruntime and torch


def require_onnx_packages() -> None:
    """Raise ValueError with the install command if a package for ONNX is missing."""
    missing = [package for package in ("onnx", "onnxscript", "onnxruntime") if find_spec(package) is None]
    if missing:
        raise ValueError(f"this needs {', '.join(missing)}; install with: pip install 'optg[onnx]'")


def write_checked_onnx(path: Path, model: nn.Module, example: Tensor) -> float:
    """Write an ONNX file for any batch size, if onnxruntime agrees with torch. Return the largest difference."""
    with atomic_write(path) as partial:
        write_onnx(partial, model, example)
        return largest_difference(partial, model, example)


class SingleInput(nn.Module):
    """Give a packed model, whose forward takes `*inputs`, the signature of a model of images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        return self.model(images)


def write_onnx(path: Path, model: nn.Module, example: Tensor) -> None:
    """Write an ONNX file for any batch size, unchecked."""
    batch = {0: torch.export.Dim("batch", min=1)}
    with silence_exporter(), torch.no_grad():
        try:
            torch.onnx.export(
                SingleInput(model) if isinstance(model, PackedModel) else model.eval(),
                (torch.cat([example, example]),),
                path,
                input_names=["images"],
                output_names=["outputs"],
                dynamo=True,
                dynamic_shapes=(batch,),
                external_data=False,
                optimize=True,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            lines = str(error).partition("## Exception summary")[2].strip().splitlines() or str(error).splitlines()
            raise ValueError(f"torch cannot export this model to ONNX: {lines[0]}") from error


@contextmanager
def silence_exporter() -> Iterator[None]:
    """Suppress the exporter's messages about optional packages and deprecations."""
    with log_level("torch.onnx", logging.ERROR), redirect_stdout(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def largest_difference(path: Path, model: nn.Module, example: Tensor) -> float:
    """Return onnxruntime's largest difference from torch, relative to the largest output if that exceeds 1.

    Raise ValueError if it exceeds the tolerance.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest, generator = 0.0, torch.Generator().manual_seed(0)
    for batch in (1, 3):
        images = torch.randn(batch, *example.shape[1:], generator=generator, dtype=example.dtype)
        with torch.no_grad():
            expected = model(images)
        (found,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        difference = float((torch.from_numpy(found) - expected).abs().max() / expected.abs().max().clamp(min=1))
        if not difference <= TOLERANCE:  # also true for NaN
            raise ValueError(
                f"onnxruntime's outputs differ from torch's by {difference:.1e}; expected at most {TOLERANCE:.0e}. "
                "Nothing was written"
            )
        largest = max(largest, difference)
    return largest
