"""The engines that can be measured. `ENGINES` is the only list of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import optg
from optg.naming import nearest

Network = Callable[[Tensor], Tensor]


@dataclass
class EngineInputs:
    """What an engine needs to prepare a model."""

    model: nn.Module
    example: Tensor  # a batch of the size to measure
    threads: int
    onnx: Path  # the model as ONNX; written only if an engine needs it


@dataclass
class Engine:
    """A way to run a model. `prepare` returns a function that runs batches of one size."""

    name: str
    prepare: Callable[[EngineInputs], Network]
    packages: tuple[str, ...] = ()  # to be installed by the user; an engine with packages reads the ONNX file


def prepare_optg(inputs: EngineInputs) -> Network:
    fast = optg.compile(inputs.model, inputs.example, threads=inputs.threads)
    if fast.library is None:
        raise RuntimeError(fast.notes[0])
    return fast


def prepare_torch(inputs: EngineInputs) -> Network:
    return inputs.model


def prepare_torch_compile(inputs: EngineInputs) -> Network:
    """Compile with frozen weights, which folds norms and selects layouts: the fastest form for inference."""
    torch._dynamo.reset()
    return torch.compile(inputs.model, options={"freezing": True})


def prepare_onnxruntime(inputs: EngineInputs) -> Network:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = inputs.threads, 1
    options.add_free_dimension_override_by_name("batch", len(inputs.example))
    session = onnxruntime.InferenceSession(str(inputs.onnx), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def prepare_openvino(precision: str) -> Callable[[EngineInputs], Network]:
    def prepare(inputs: EngineInputs) -> Network:
        import openvino

        model = openvino.Core().read_model(inputs.onnx)
        model.reshape(list(inputs.example.shape))
        options = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": inputs.threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
        }
        request = openvino.Core().compile_model(model, "CPU", options).create_infer_request()
        return lambda images: torch.from_numpy(request.infer([images.numpy()], share_inputs=True)[0])

    return prepare


ONNX_PACKAGES = ("onnx", "onnxscript")
ENGINES = (
    Engine("optg", prepare_optg),
    Engine("torch", prepare_torch),
    Engine("torch.compile", prepare_torch_compile),
    Engine("onnxruntime", prepare_onnxruntime, (*ONNX_PACKAGES, "onnxruntime")),
    Engine("openvino f32", prepare_openvino("f32"), (*ONNX_PACKAGES, "openvino")),
    Engine("openvino bf16", prepare_openvino("bf16"), (*ONNX_PACKAGES, "openvino")),
)


def select_engines(names: list[str]) -> list[Engine]:
    """Return the named engines, or all if no name is given."""
    known = {engine.name: engine for engine in ENGINES}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown engine {name!r}; {nearest(name, known)}")
    return [known[name] for name in names] or list(ENGINES)
