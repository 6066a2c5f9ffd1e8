"""The engines that can be measured. `ENGINES` is the only list of them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import optg
from optg.deploy.bench.int8_engines import prepare_optg_int8, quantize_openvino, quantized_onnxruntime
from optg.deploy.two_four import semi_structured
from optg.naming import nearest

Network = Callable[[Tensor], Tensor]


@dataclass
class EngineInputs:
    """What an engine needs to prepare a model."""

    model: nn.Module
    example: Tensor  # a batch of the size to measure
    threads: int
    onnx: Path  # the model as ONNX; written only if an engine needs it
    int8: nn.Module | None = None  # the same model in int8, if the file holds one


@dataclass
class Engine:
    """A way to run a model. `prepare` returns a function that runs batches of one size."""

    name: str
    prepare: Callable[[EngineInputs], Network]
    packages: tuple[str, ...] = ()  # to be installed by the user
    needs_gpu: bool = False  # offered only where torch sees an NVIDIA GPU

    @property
    def needs_onnx(self) -> bool:
        """Return whether it reads the ONNX file."""
        return "onnx" in self.packages


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
    return open_onnxruntime(inputs.onnx, inputs)


def open_onnxruntime(file: Path, inputs: EngineInputs) -> Network:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = inputs.threads, 1
    options.add_free_dimension_override_by_name("batch", len(inputs.example))
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def prepare_openvino(precision: str) -> Callable[[EngineInputs], Network]:
    def prepare(inputs: EngineInputs) -> Network:
        import openvino

        model = openvino.Core().read_model(inputs.onnx)
        if precision == "int8":
            model = quantize_openvino(model, inputs)
        model.reshape(list(inputs.example.shape))
        options = {
            "INFERENCE_PRECISION_HINT": "f32" if precision == "int8" else precision,  # of what is not quantized
            "INFERENCE_NUM_THREADS": inputs.threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
        }
        request = openvino.Core().compile_model(model, "CPU", options).create_infer_request()
        return lambda images: torch.from_numpy(request.infer([images.numpy()], share_inputs=True)[0])

    return prepare


def prepare_gpu(inputs: EngineInputs) -> Network:
    return on_gpu(inputs.model, inputs.example)


def prepare_gpu_two_four(inputs: EngineInputs) -> Network:
    """Use the sparse tensor cores for the Linear layers whose weights are 2:4."""
    fast, layers = semi_structured(copy.deepcopy(inputs.model).to("cuda", torch.bfloat16))
    if "2:4" not in layers.values():
        raise ValueError(next(iter(layers.values()), "the model has no Linear layer"))
    return on_gpu(fast, inputs.example)


def prepare_gpu_shrunk(inputs: EngineInputs) -> Network:
    """Remove the channels that are 0, but keep multiples of 8, with which tensor cores are faster in bfloat16."""
    small = optg.shrink(inputs.model, inputs.example[:1], multiple=8)
    if sum(map(Tensor.numel, small.parameters())) == sum(map(Tensor.numel, inputs.model.parameters())):
        raise ValueError("no channel is 0 in all its coupled layers, or too few to leave a multiple of 8")
    return on_gpu(small, inputs.example)


def on_gpu(model: nn.Module, example: Tensor) -> Network:
    """Return the compiled model in bfloat16. It runs the example, already on the GPU, and copies the outputs back.

    Images are channels_last, which convolutions prefer, and a CUDA graph saves the CPU's time for each kernel.
    """
    torch._dynamo.reset()
    layout = torch.channels_last if example.dim() == 4 else torch.preserve_format
    on_card = copy.deepcopy(model).to("cuda", torch.bfloat16).to(memory_format=layout)  # type: ignore[call-overload]
    fast = torch.compile(on_card, mode="reduce-overhead")
    images = example.to("cuda", torch.bfloat16, memory_format=layout)
    return lambda _: fast(images).float().cpu()


ONNX_PACKAGES = ("onnx", "onnxscript")
prepare_onnxruntime_int8 = quantized_onnxruntime(open_onnxruntime)
ENGINES = (
    Engine("optg", prepare_optg),
    Engine("torch", prepare_torch),
    Engine("torch.compile", prepare_torch_compile),
    Engine("onnxruntime", prepare_onnxruntime, (*ONNX_PACKAGES, "onnxruntime")),
    Engine("openvino f32", prepare_openvino("f32"), (*ONNX_PACKAGES, "openvino")),
    Engine("openvino bf16", prepare_openvino("bf16"), (*ONNX_PACKAGES, "openvino")),
    Engine("optg int8", prepare_optg_int8, ("torchao",)),
    Engine("onnxruntime int8", prepare_onnxruntime_int8, (*ONNX_PACKAGES, "onnxruntime")),
    Engine("openvino int8", prepare_openvino("int8"), (*ONNX_PACKAGES, "openvino", "nncf")),
    Engine("gpu bf16", prepare_gpu, needs_gpu=True),
    Engine("gpu bf16 2:4", prepare_gpu_two_four, needs_gpu=True),
    Engine("gpu bf16 shrunk", prepare_gpu_shrunk, needs_gpu=True),
)


def select_engines(names: list[str]) -> list[Engine]:
    """Return the named engines, or all that this machine can run if no name is given."""
    known = {engine.name: engine for engine in ENGINES}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown engine {name!r}; {nearest(name, known)}")
        if known[name].needs_gpu and not torch.cuda.is_available():
            raise ValueError(f"the engine {name!r} needs an NVIDIA GPU, and torch sees none")
    return [known[name] for name in names] or [e for e in ENGINES if torch.cuda.is_available() or not e.needs_gpu]
