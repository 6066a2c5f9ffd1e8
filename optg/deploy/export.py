"""Export a trained model: as a packed file, as dense safetensors, or as ONNX."""

import dataclasses
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import optg
from optg.core.accounting import as_arguments, count, first_tensor
from optg.core.preserve import evaluating
from optg.deploy import packed
from optg.deploy.calibration import quantized_graph
from optg.deploy.graph import capture, count_graph, is_quantized
from optg.deploy.onnx import require_onnx_packages, write_checked_onnx
from optg.deploy.packed import About, Values, write_packed
from optg.deploy.preprocessing import preprocessing_of
from optg.files import atomic_file, require_folder
from optg.machine import revision
from optg.training import recipe
from optg.training.folder import is_run
from optg.training.recipe import Plan
from optg.training.saved import SavedRun
from optg.training.tensors import write_tensors

if TYPE_CHECKING:
    from optg.data import Data

ExportFormat = Literal["packed", "safetensors", "onnx"]
ExportValues = Literal["float32", "bfloat16", "int8"]
SUFFIXES: dict[ExportFormat, str] = {"packed": ".optg", "safetensors": ".dense.safetensors", "onnx": ".onnx"}


@dataclass
class Trained:
    """A trained model on the CPU, in evaluation mode, with its description."""

    model: nn.Module
    about: About
    plan: Plan | None = None  # of the run it came from; None if it came from a packed file
    path: Path | None = None  # the packed file it came from

    @property
    def example(self) -> Tensor:
        """Return a batch of one image of zeros."""
        dtype = next((p.dtype for p in self.model.parameters()), torch.float32)
        return torch.zeros(1, *self.about.shape, dtype=dtype)


def open_trained(path: Path) -> Trained:
    """Open the model of a run folder, of one of its checkpoints, or of a packed file."""
    if path.is_file():
        model = packed.load(path)
        return Trained(model, model.about, path=path)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; expected the folder of a run, one of its checkpoints, or a packed file")
    saved = SavedRun.open(path)
    return described(saved.model(), saved.plan, saved.facts, {"checkpoint": path.name} if saved.is_checkpoint else {})


def load_data(settings: recipe.Recipe, batch_size: int | None = None) -> "Data":
    """Load the recipe's dataset on the CPU."""
    from optg import data as datasets  # not at the top: imagenet needs pillow

    size = batch_size or settings.batch_size
    return datasets.load(settings.data, settings.folder, batch_size=size, device="cpu", seed=settings.seed)


def described(model: nn.Module, plan: Plan, facts: dict[str, Any], more: dict[str, Any]) -> Trained:
    settings = plan.recipe
    origin: dict[str, Any] = {
        "recipe": plan.name,
        "model": settings.model,
        "data": settings.data,
        "method": plan.method,
        "seed": settings.seed,
    }
    if settings.model_options:
        origin["model_options"] = ", ".join(f"{key}={value}" for key, value in settings.model_options.items())
    origin |= {key: facts[key] for key in ("accuracy", "sparsity", "revision") if key in facts and not more}
    origin |= more | {"exported_by": f"optg {optg.__version__}, torch {torch.__version__}", "exported_at": revision()}
    shape = tuple(facts["shape"])
    account = account_of(model, torch.zeros(1, *shape, dtype=next(model.parameters()).dtype))
    about = About(plan.name, facts["classes"], shape, account=account, origin=origin, **preprocessing_of(settings, shape))
    return Trained(model.eval(), about, plan)


def account_of(model: nn.Module, example_input: Any) -> dict[str, int]:
    """Count parameters and FLOPs, with and without the zeros."""
    found = count(model, example_input)
    return {key: getattr(found, key) for key in ("parameters", "nonzero", "flops", "dense_flops")}


@contextmanager
def collection_paused() -> Iterator[None]:
    """Switch Python's garbage collector off: it would search the many objects of a deep model's graph again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@collection_paused()
def save(model: nn.Module, path: str | Path, example_input: Any, *, values: Values = "float32", name: str = "model") -> int:
    """Write any model as a packed file for `optg.load`, `optg predict` and `optg bench`. Return its size in bytes.

    The int8 weights of a model from `optg.quantize` are stored as bytes.

    Args:
        example_input: what the model is called with: a tensor, a tuple of tensors, or a dict of named tensors.
        values: how float32 weights are stored: float32 (exactly) or bfloat16 (rounded).
        name: shown to people.
    """
    args, kwargs = as_arguments(example_input)
    with evaluating(model):
        outputs = model(*args, **kwargs)
    classes = outputs.shape[1] if isinstance(outputs, Tensor) and outputs.ndim == 2 else 0
    shape = tuple(first_tensor(example_input).shape[1:])
    graph = capture(model, example_input)
    graph = dataclasses.replace(graph, tensors={key: without_negative_zeros(t.cpu()) for key, t in graph.tensors.items()})
    account = count_graph(graph) if is_quantized(graph) else account_of(model, example_input)
    return write_packed(Path(path), graph, About(name, classes, shape, account=account), values)


def without_negative_zeros(tensor: Tensor) -> Tensor:
    """Replace −0.0 by 0.0. A product with a mask produces −0.0, and a packed file would store each one as a value."""
    return tensor.masked_fill(tensor == 0, 0)


def export(
    path: Path, to: ExportFormat, output: Path | None, values: ExportValues, shrink: bool = False, folder: str | None = None
) -> str:
    """Export the model of a run, a checkpoint or a packed file. Return a message for the user.

    Args:
        folder: of the run's dataset, which int8 is calibrated on; by default the recipe's.
    """
    if shrink and to == "safetensors":
        raise ValueError("--shrink changes the shapes of tensors, which safetensors files do not explain; use packed or onnx")
    if values != "float32" and to != "packed":
        raise ValueError(f"--values {values} only works with --to packed; {to} files hold float32")
    if folder is not None and values != "int8":
        raise ValueError("--folder names the images that --values int8 is calibrated on; leave it out")
    if to == "onnx":
        require_onnx_packages()
    trained = open_trained(path)
    if to == "packed" and trained.path:
        raise ValueError(f"{path} is already a packed file; expected a run or a checkpoint")
    if trained.path and is_quantized(capture(trained.model, trained.example)):
        raise ValueError(f"{path} holds int8 values, which {to} files cannot hold; expected the run or a checkpoint")
    if shrink and trained.path:
        raise ValueError(f"{path} is a packed file, whose channels are fixed; --shrink needs the run or a checkpoint")
    dense = sum(t.numel() * t.element_size() for t in trained.model.state_dict().values())
    if shrink:
        trained = shrunk(trained)
    output = output or default_output(path, to)
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder; expected a file, such as {output / path.name}{SUFFIXES[to]}")
    if is_run(output.parent) and output.name == "model.safetensors":
        raise ValueError(f"--output {output} is the run's own model; choose another name")
    require_folder(output)
    about, replaced = trained.about, output.exists()
    note = f" It replaces the earlier {output.name}." if replaced else ""
    if values == "int8":
        graph, about = quantized_graph(trained.model, about, SavedRun.open(path), folder)
        write_packed(output, graph, about)
    elif to == "packed":
        write_packed(output, capture(trained.model, trained.example), about, values)
    elif to == "safetensors":
        write_safetensors(output, trained)
    else:
        difference = write_checked_onnx(output, trained.model, trained.example)
        note = f" onnxruntime's outputs differ by at most {difference:.1e}.{note}"
    before = " before shrinking" if shrink else ""
    return export_summary(trained, about, output, values, dense, before) + note


def shrunk(trained: Trained) -> Trained:
    """Remove the channels that are 0."""
    model = optg.shrink(trained.model, trained.example)
    about = dataclasses.replace(trained.about, account=account_of(model, trained.example))
    return dataclasses.replace(trained, model=model, about=about)


def default_output(path: Path, to: ExportFormat) -> Path:
    """Return the path of the exported file: in the run's folder, or next to the packed file."""
    if path.is_file():
        return path.with_suffix(SUFFIXES[to])
    if is_run(path):
        return path / f"model{SUFFIXES[to]}"
    checkpoint = path if path.name.startswith("step-") else path.resolve()  # "." has no name
    return checkpoint.parent.parent / f"{checkpoint.name}{SUFFIXES[to]}"


def export_summary(trained: Trained, about: About, output: Path, values: ExportValues, dense: int, before: str) -> str:
    """Return a message about the file, and the `dense` bytes that it stands for."""
    size, account = output.stat().st_size, about.account
    dtype = str(trained.example.dtype).removeprefix("torch.")
    images = about.origin.get("calibration_images")
    rounded = {
        "float32": "",
        "bfloat16": " (weights as bfloat16)",
        "int8": f" (int8, calibrated on {images} training images)" if images else " (int8, with the ranges of its training)",
    }[values]
    return (
        f"{output}: {size / 1e6:,.3f} MB{rounded}, {size / dense:.2%} of the {dense / 1e6:,.3f} MB of the dense {dtype} "
        f"tensors{before}. {account['nonzero']:,} of {account['parameters']:,} parameters are non-zero "
        f"({account['nonzero'] / account['parameters']:.2%}); {account['flops'] / 1e6:,.2f} of "
        f"{account['dense_flops'] / 1e6:,.2f} MFLOPs remain."
    )


def write_safetensors(output: Path, trained: Trained) -> None:
    """Write the state_dict as dense tensors, zeros included."""
    tensors = {name: t.detach().contiguous() for name, t in trained.model.state_dict().items()}
    metadata = {"format": "pt", "optg": json.dumps(dataclasses.asdict(trained.about))}
    with atomic_file(output) as file:
        write_tensors(file, tensors, metadata)
