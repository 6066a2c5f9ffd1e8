"""Engines that run the model in int8, each with its own post-training quantization, calibrated on the same images.

optg runs an int8 file as it is.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import optg

if TYPE_CHECKING:
    from optg.deploy.bench.engines import EngineInputs, Network

CALIBRATION = 8  # images: enough to measure speed, which does not depend on the ranges


def calibration_images(inputs: "EngineInputs") -> Tensor:
    """Return random images of the model's shape."""
    return torch.randn(CALIBRATION, *inputs.example.shape[1:], generator=torch.Generator().manual_seed(0))


def prepare_optg_int8(inputs: "EngineInputs") -> "Network":
    model = inputs.int8 or optg.quantize(inputs.model, calibration_images(inputs).split(1))
    fast = optg.compile(model, inputs.example, threads=inputs.threads)
    if fast.library is None:
        raise RuntimeError(fast.notes[0])
    return fast


def quantized_onnxruntime(prepare: Callable[[Path, "EngineInputs"], "Network"]) -> Callable[["EngineInputs"], "Network"]:
    """Quantize the ONNX file statically, weights by channel, and let `prepare` open the new file."""

    def quantize_and_prepare(inputs: "EngineInputs") -> "Network":
        from onnxruntime import quantization

        source, output = inputs.onnx, inputs.onnx.with_suffix(".int8.onnx")
        if not output.exists():
            prepared = source.with_suffix(".prepared.onnx")
            quantization.quant_pre_process(str(source), str(prepared))
            reader = ImageReader(calibration_images(inputs), input_name(prepared))
            kinds = {"activation_type": quantization.QuantType.QUInt8, "weight_type": quantization.QuantType.QInt8}
            quantization.quantize_static(str(prepared), str(output), reader, per_channel=True, **kinds)
        return prepare(output, inputs)

    return quantize_and_prepare


class ImageReader:
    """Hands onnxruntime one image at a time."""

    def __init__(self, images: Tensor, name: str) -> None:
        self.batches: Iterator[dict[str, Any]] = iter([{name: image[None].numpy()} for image in images])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.batches, None)


def input_name(path: Path) -> str:
    import onnx

    return onnx.load(str(path), load_external_data=False).graph.input[0].name


def quantize_openvino(model: Any, inputs: "EngineInputs") -> Any:
    """Quantize a model of OpenVINO with NNCF, as its documentation recommends for CPUs."""
    import nncf

    images = [image[None].numpy() for image in calibration_images(inputs)]
    return nncf.quantize(model, nncf.Dataset(images), preset=nncf.QuantizationPreset.MIXED, subset_size=len(images))
