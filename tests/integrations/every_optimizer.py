"""Optimizers of torch, timm, pytorch_optimizer, torch_optimizer and schedulefree: find them, build them, train with them."""

import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import optg
from tests.torchvision_import import import_torchvision

PACKAGES = ("torch.optim", "timm.optim", "pytorch_optimizer", "torch_optimizer", "schedulefree")
STEPS, SPARSITY = 8, 0.8
WORKS, BROKEN = "works", "fails without optg too"


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(384, 4)
    )


def matrices() -> nn.Module:
    """Return a model for optimizers that train matrices only."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))


@dataclass
class Setup:
    """How to train with an optimizer: which model, and whether `step` is given a closure."""

    make_model: Callable[[], nn.Module]
    with_closure: bool
    create_graph: bool

    def start(self, make: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = self.make_model()
        return model, make(model)

    def train(self, model: nn.Module, optimizer: Any, sparsifier: optg.Sparsifier | None = None) -> None:
        """Run the training loop. Removed weights must be 0 whenever the loop computes a loss."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            images, labels = torch.randn(8, 8, 8, generator=generator), torch.randint(4, (8,), generator=generator)

            def closure(images: torch.Tensor = images, labels: torch.Tensor = labels) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward(create_graph=self.create_graph)
                return loss

            if sparsifier:
                assert sparsifier.verify().ok, "the loop trains a dense model"
            if self.with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        if hasattr(optimizer, "eval"):
            optimizer.eval()
        assert all(p.isfinite().all() for p in model.parameters()), "the weights are not finite"


SETUPS = [Setup(*choice) for choice in product((convnet, matrices), (False, True), (False, True))]


@cache
def find_optimizers(package: str) -> dict[str, Callable[[nn.Module], Any]]:
    """Return how to build each optimizer of a package, by name."""
    import_torchvision()
    module = import_module(package)
    if package == "timm.optim":
        names = [*module.list_optimizers(), "lookahead_sgd"]
        return {name: lambda model, name=name: module.create_optimizer_v2(model, name, lr=0.01) for name in names}
    base = torch.optim.Optimizer
    kinds = {kind for kind in vars(module).values() if inspect.isclass(kind) and issubclass(kind, base) and kind is not base}
    return {kind.__name__: partial(build, kind) for kind in sorted(kinds, key=lambda kind: kind.__name__)}


def build(kind: Any, model: nn.Module) -> Any:
    """Return an optimizer with the defaults of its class; wrappers of an optimizer get SGD."""
    arguments = inspect.signature(kind).parameters
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    known = {"optimizer": sgd, "base_optimizer": torch.optim.SGD, "model": model, "num_iterations": STEPS, "num_data": 8}
    given = {k: v for k, v in known.items() if k in arguments and arguments[k].default is inspect.Parameter.empty}
    if "keep_num" in arguments:  # AdaShift moves no weight before it has seen so many gradients
        given["keep_num"] = 2
    if "rho_scheduler" in arguments:  # GSAM
        schedule = import_module("pytorch_optimizer").ProportionScheduler(torch.optim.lr_scheduler.ConstantLR(sgd), max_lr=0.01)
        given |= {"rho_scheduler": schedule, "base_optimizer": sgd}
    elif "base_optimizer" in given:
        given["lr"] = 0.01
    if "params" not in arguments:
        return kind(**given)
    if "use_muon" not in inspect.getsource(kind.__init__):
        return kind(params=model.parameters(), **given)
    large, small = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": large, "use_muon": True}, {"params": small, "use_muon": False}]
    return kind(params=groups[: 1 + bool(small)], **given)


def refusal(error: Exception) -> str | None:
    """Return the message of an error that optg raises on purpose, None for any other."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if not Path(last.filename).is_relative_to(Path(optg.__file__).parent) or "raise " not in (last.line or ""):
        return None
    return f"refused: {str(error).partition(' cannot train a sparse model')[2].partition(': ')[2] or error}"


def working_setups(make: Callable[[nn.Module], Any]) -> Iterator[Setup]:
    """Yield the ways to train a dense model with this optimizer."""
    for setup in SETUPS:
        try:
            model, optimizer = setup.start(make)
            before = [p.detach().clone() for p in model.parameters()]
            setup.train(model, optimizer)
        except Exception:
            continue
        if not all(map(torch.equal, before, model.parameters())):
            yield setup


def outcome(package: str, name: str, method: str) -> str:
    """Train a sparse model. Return what came of it; raise if it is dense, or if the error is not optg's own."""
    make = find_optimizers(package)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for setup in SETUPS[:: len(SETUPS) // 2]:  # refused at once, whatever the loop
            try:
                model, optimizer = setup.start(make)
            except Exception:
                continue
            try:
                optg.sparsify(model, optimizer, method, sparsity=SPARSITY, steps=STEPS).detach()
            except Exception as error:
                if message := refusal(error):
                    return message
                raise
        setup = next(working_setups(make), None)
        if setup is None:
            return BROKEN
        model, optimizer = setup.start(make)
        try:
            sparsifier = optg.sparsify(model, optimizer, method, sparsity=SPARSITY, steps=STEPS)
            setup.train(model, optimizer, sparsifier)
        except Exception as error:
            if message := refusal(error):
                return message
            raise
        assert sparsifier.verify().ok, "the model is dense after the last step"
        sparsifier.finish()
    assert sparsifier.verify().ok
    removed = {name: ~mask for name, mask in sparsifier.masks.items()}
    assert sum(int(mask.sum()) for mask in removed.values()) == sparsifier.weights.zeros(SPARSITY)[0]
    assert all(not model.get_parameter(name)[mask].any() for name, mask in removed.items())
    return WORKS
