"""A trained model out of its run: as one packed file, as plain tensors, or for other engines."""

import dataclasses
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import optg
from optg import data as datasets
from optg.core.accounting import as_arguments, count, first_tensor
from optg.core.preserve import evaluating
from optg.data import cifar, digits, imagenet, synthetic
from optg.deploy import packed
from optg.deploy.graph import capture
from optg.deploy.packed import About, Values
from optg.files import atomic_write
from optg.machine import revision
from optg.training import checkpoint, recipe
from optg.training.folder import is_run
from optg.training.recipe import Plan
from optg.training.saved import SavedRun

Form = Literal["packed", "safetensors", "onnx"]
SUFFIXES: dict[Form, str] = {"packed": ".optg", "safetensors": ".dense.safetensors", "onnx": ".onnx"}


@dataclass
class Trained:
    """A model on the CPU, in evaluation mode, and what it is."""

    model: nn.Module
    about: About
    plan: Plan | None = None  # of the run it came from; None: from a file
    path: Path | None = None  # the file it came from

    @property
    def example(self) -> Tensor:
        """An image of zeros, as a batch of one."""
        dtype = next((p.dtype for p in self.model.parameters()), torch.float32)
        return torch.zeros(1, *self.about.shape, dtype=dtype)


# ---- reading a run


def open_trained(path: Path) -> Trained:
    """The model of a run's folder, of one of its checkpoints, or of a packed file."""
    if path.is_file():
        model = packed.load(path)
        return Trained(model, model.about, path=path)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; expected the folder of a run, one of its checkpoints, or a packed file")
    saved = SavedRun.open(path)
    return described(saved.model(), saved.plan, saved.facts, {"checkpoint": path.name} if saved.is_checkpoint else {})


def load_data(settings: recipe.Recipe, batch_size: int | None = None) -> datasets.Data:
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
    origin |= {key: facts[key] for key in ("accuracy", "sparsity", "revision") if key in facts and not more}
    origin |= more | {"exported_by": f"optg {optg.__version__}, torch {torch.__version__}", "exported_at": revision()}
    shape = tuple(facts["shape"])
    account = account_of(model, torch.zeros(1, *shape, dtype=next(model.parameters()).dtype))
    about = About(plan.name, facts["classes"], shape, account=account, origin=origin, **seen_by(settings, shape))
    return Trained(model.eval(), about, plan)


def account_of(model: nn.Module, example_input: Any) -> dict[str, int]:
    """Parameters and FLOPs, with and without the zeros."""
    found = count(model, example_input)
    return {key: getattr(found, key) for key in ("parameters", "nonzero", "flops", "dense_flops")}


CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def seen_by(settings: recipe.Recipe, shape: tuple[int, ...]) -> dict[str, Any]:
    """How images become what the model was trained on; its classes' names where they are known."""
    name = settings.data.partition(":")[0]
    if name == "digits":  # whose pixels are 0 to 16
        labels = tuple(map(str, range(10)))
        return {"mean": (digits.MEAN / 16,), "std": (digits.STD / 16,), "labels": labels}
    if name in cifar.CIFARS:
        kind = cifar.CIFARS[name]
        return {"mean": kind.mean, "std": kind.std, "labels": CIFAR10 if name == "cifar10" else None}
    if name == "imagenet":
        return {"mean": imagenet.MEAN, "std": imagenet.STD, "centre": imagenet.CENTRE}
    if name == "synthetic":
        return {"mean": (synthetic.MEAN / 255,) * shape[0], "std": (synthetic.STD / 255,) * shape[0]}
    return {}  # a function of the user's: what it did to the images, only it knows


# ---- writing


def save(model: nn.Module, path: str | Path, example_input: Any, *, values: Values = "float32", name: str = "model") -> int:
    """Write any model as a packed file, for `optg.load`, `optg run` and `optg bench`. Returns its size in bytes.

    Args:
        example_input: what the model is called with: a tensor, a tuple of tensors, or a dict of named ones.
        values: what weights are written as: float32 (as they are) or bfloat16 (rounded).
        name: for people.
    """
    args, kwargs = as_arguments(example_input)
    with evaluating(model):
        outputs = model(*args, **kwargs)
    classes = outputs.shape[1] if isinstance(outputs, Tensor) and outputs.ndim == 2 else 0
    shape = tuple(first_tensor(example_input).shape[1:])
    graph = capture(model, example_input)
    graph = dataclasses.replace(graph, tensors={key: plain_zeros(t.cpu()) for key, t in graph.tensors.items()})
    return packed.save(Path(path), graph, About(name, classes, shape, account=account_of(model, example_input)), values)


def plain_zeros(tensor: Tensor) -> Tensor:
    """The same values, no zero with a sign: products with a mask leave such, and a file would keep each of them."""
    return tensor.masked_fill(tensor == 0, 0)


def export(path: Path, to: Form, output: Path | None, values: Values) -> str:
    """Write a run's or a checkpoint's model in another form. Returns what to tell the user."""
    if values != "float32" and to != "packed":
        raise ValueError(f"--values {values} is for --to packed; {to} files hold float32")
    if to == "onnx":
        refuse_missing("onnx", "onnxscript", "onnxruntime")
    trained = open_trained(path)
    if to == "packed" and trained.path:
        raise ValueError(f"{path} is a packed file already; expected a run or a checkpoint")
    output = output or default_output(path, to)
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder; expected a file, such as {output / path.name}{SUFFIXES[to]}")
    if is_run(output.parent) and output.name == "model.safetensors":
        raise ValueError(f"--output {output} is the run's own model; give another name")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {output.parent} to write {output.name} into")
    note = ""
    if to == "packed":
        packed.save(output, capture(trained.model, trained.example), trained.about, values)
    elif to == "safetensors":
        write_safetensors(output, trained)
    else:
        note = f" onnxruntime's outputs differ by at most {write_onnx(output, trained):.1e}."
    return summary(trained, output, values) + note


def default_output(path: Path, to: Form) -> Path:
    """Beside what is exported: in the run's folder, or next to the file."""
    if path.is_file():
        return path.with_suffix(SUFFIXES[to])
    return path / f"model{SUFFIXES[to]}" if is_run(path) else path.parent.parent / f"{path.name}{SUFFIXES[to]}"


def summary(trained: Trained, output: Path, values: Values) -> str:
    size, account = output.stat().st_size, trained.about.account
    dense = sum(t.numel() * t.element_size() for t in trained.model.state_dict().values())
    kept = account["nonzero"] / account["parameters"]
    return (
        f"{output}: {size / 1e6:,.3f} MB, {size / dense:.2%} of the {dense / 1e6:,.3f} MB of the dense {values_of(trained)} "
        f"tensors{' (weights as bfloat16)' if values == 'bfloat16' else ''}. {account['nonzero']:,} of "
        f"{account['parameters']:,} parameters are not 0 ({kept:.2%}); {account['flops'] / 1e6:,.2f} of "
        f"{account['dense_flops'] / 1e6:,.2f} MFLOPs."
    )


def values_of(trained: Trained) -> str:
    return str(next(trained.model.parameters()).dtype).removeprefix("torch.")


def refuse_missing(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ValueError(f"this needs {', '.join(missing)}; install with: pip install 'optg[onnx]'")


def write_safetensors(output: Path, trained: Trained) -> None:
    """Plain dense tensors with their zeros, under the names of the state_dict."""
    tensors = {name: t.detach().contiguous() for name, t in trained.model.state_dict().items()}
    facts = {"format": "pt", "optg": json.dumps(dataclasses.asdict(trained.about))}
    with atomic_write(output) as partial:
        checkpoint.write_tensors(partial, tensors, facts)


def write_onnx(output: Path, trained: Trained) -> float:
    """An ONNX file for batches of any size, once onnxruntime computes the same from it. Returns the largest difference."""
    with atomic_write(output) as partial:
        to_onnx(trained.model, trained.example, partial)
        return check_onnx(trained.model, trained.example, partial)


class OneInput(nn.Module):
    """A model of a packed file, whose inputs have no names, as one of images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        return self.model(images)


def to_onnx(model: nn.Module, example: Tensor, path: Path) -> None:
    batch = {0: torch.export.Dim("batch", min=1)}
    with quiet(), torch.no_grad():
        try:
            torch.onnx.export(
                OneInput(model) if isinstance(model, packed.Packed) else model.eval(),
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
            raise ValueError(f"torch cannot write this model as ONNX: {lines[0]}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch's exporter says of packages that are not needed, and of its own future."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def check_onnx(model: nn.Module, example: Tensor, path: Path) -> float:
    """The largest difference from torch, relative to the largest output where that is above 1; refused above 1e-5."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest, generator = 0.0, torch.Generator().manual_seed(0)
    for batch in (1, 3):
        images = torch.randn(batch, *example.shape[1:], generator=generator, dtype=example.dtype)
        with torch.no_grad():
            expected = model(images)
        (found,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        difference = float((torch.from_numpy(found) - expected).abs().max() / expected.abs().max().clamp(min=1))
        if not difference <= 1e-5:  # nor NaN
            raise ValueError(
                f"onnxruntime's outputs differ from torch's by {difference:.1e}; expected at most 1e-5. Nothing was written"
            )
        largest = max(largest, difference)
    return largest
