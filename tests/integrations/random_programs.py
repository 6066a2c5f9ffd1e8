"""Draw a program at random, and run it: model × optimizer × method × trainer, or something that happens during training."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import schedulefree
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import Trainer, TrainingArguments

import optg
import optg.integrations.lightning
import optg.integrations.transformers
from optg.methods import METHODS
from tests.integrations.families import MODELS
from tests.integrations.test_lightning import QUIET
from tests.toy import goal

STEPS, SPARSITY = 12, 0.8
HALF = STEPS // 2
F = nn.functional
Batch = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=1e-2),
    "schedule-free": lambda p: in_train_mode(schedulefree.AdamWScheduleFree(p, lr=1e-3)),
}


def in_train_mode(optimizer: Any) -> Any:
    optimizer.train()
    return optimizer


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclass
class Program:
    """What was drawn, and the objects that the user's code holds."""

    seed: int
    family: str
    optimizer: str
    method: str
    feature: str

    @classmethod
    def draw(cls, seed: int) -> "Program":
        rng = random.Random(seed)
        methods = [method for method in METHODS if method not in ("dense", "keep")]
        return cls(seed, *(rng.choice(list(choices)) for choices in (MODELS, OPTIMIZERS, methods, FEATURES)))

    def start(self) -> None:
        torch.manual_seed(self.seed)
        self.data: list[Batch] = [(torch.randn(8, 8, 8), torch.randint(4, (8,))) for _ in range(STEPS)]
        self.model = MODELS[self.family]()
        self.make_optimizers()
        self.options = {**goal(self.method, self.model, SPARSITY), "loss": loss_of, "batches": self.data}

    def make_optimizers(self) -> None:
        parameters = list(self.model.parameters())
        groups = [parameters[:2], parameters[2:]] if self.feature == "two optimizers" else [parameters]
        self.optimizers = [OPTIMIZERS[self.optimizer](group) for group in groups]

    def make_method(self) -> optg.methods.Method:
        """Return the method, with options for a run as short as this."""
        short = {"every": 2} if hasattr(METHODS[self.method], "every") else {"fraction": 0.6} if self.method == "imp" else {}
        return METHODS[self.method](**short)

    def sparsify(self) -> None:
        optimizer = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        self.sparsifier = optg.sparsify(self.model, optimizer, self.make_method(), steps=STEPS, **self.options)

    def run(self, folder: Path) -> None:
        self.start()
        if self.feature in TRAINERS:
            TRAINERS[self.feature](self, folder)
        else:
            self.run_own_loop()

    # ---- the user's own loop

    def run_own_loop(self) -> None:
        if self.feature == "accelerate":
            self.model, self.optimizers[0] = Accelerator(cpu=True).prepare(self.model, self.optimizers[0])
        if self.feature == "frozen at first":
            next(self.model.parameters()).requires_grad_(False)
        self.sparsify()
        if self.feature == "compiled":
            self.model.compile(backend="eager")
        average, early = copy.deepcopy(self.model), copy.deepcopy(self.model.state_dict())
        for i, batch in enumerate(self.data[: STEPS - 3 if self.feature == "fewer steps" else STEPS]):
            self.backward(batch, i)
            for optimizer in self.optimizers:
                optimizer.step(partial(loss_of, self.model, batch)) if self.feature == "closure" else optimizer.step()
            if i == HALF and self.feature in MID_RUN:
                MID_RUN[self.feature](self)
            with torch.no_grad():
                for a, p in zip(average.parameters(), self.model.parameters()) if self.feature == "average copied back" else ():
                    a.lerp_(p, 0.3)
        if self.feature == "average copied back":
            self.model.load_state_dict(average.state_dict())
        if self.feature == "early checkpoint reloaded":
            self.model.load_state_dict({name: t + 0.05 if t.is_floating_point() else t for name, t in early.items()})
        if self.optimizer == "schedule-free":
            self.optimizers[0].eval()
        if self.feature != "no finish":
            self.sparsifier.finish()

    def backward(self, batch: Batch, i: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for _ in range(2 if self.feature == "accumulation" else 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.feature == "autocast"):
                loss = loss_of(self.model, batch)
            loss.backward()
        if self.feature == "nan gradient" and i == STEPS - 2:
            for p in self.model.parameters():
                p.grad.fill_(torch.nan)
        if self.feature == "clipping":
            self.sparsifier.clip_grad_norm_(1.0)

    def linear_layer(self) -> tuple[str, nn.Linear]:
        return next((name, child) for name, child in self.model.named_children() if type(child) is nn.Linear)


# ---- what may happen in the middle of a run


def copy_everything(program: Program) -> None:
    program.model, program.optimizers = copy.deepcopy((program.model, program.optimizers))


def replace_parameter(program: Program) -> None:
    layer = program.linear_layer()[1]
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def replace_module(program: Program) -> None:
    name, layer = program.linear_layer()
    setattr(program.model, name, copy.deepcopy(layer))


def sparsify_again(program: Program) -> None:
    """Prune the same weights less, by another optimizer, which trains alone from now on."""
    other = torch.optim.SGD(program.model.parameters(), lr=0.1)
    optg.sparsify(program.model, other, "gmp", sparsity=0.5, steps=HALF)
    program.optimizers = [other]


def resume(program: Program) -> None:
    parts = program.model, program.optimizers[0], program.sparsifier
    states = copy.deepcopy([part.state_dict() for part in parts])
    program.model = MODELS[program.family]()
    program.make_optimizers()
    program.sparsify()
    for part, state in zip((program.model, program.optimizers[0], program.sparsifier), states):
        part.load_state_dict(state)


MID_RUN: dict[str, Callable[[Program], None]] = {
    "copied mid-run": copy_everything,
    "parameter replaced": replace_parameter,
    "module replaced": replace_module,
    "parametrized": lambda program: weight_norm(program.linear_layer()[1]),
    "second sparsifier": sparsify_again,
    "resume": resume,
    "half precision and back": lambda program: program.model.bfloat16().float(),
    "frozen at first": lambda program: program.model.requires_grad_(True),
}

# ---- trainers, which tell the callback the number of steps


class Module(lightning.LightningModule):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.model, self.optimizer = program.model, program.optimizers[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        return loss_of(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def run_in_lightning(
    program: Program, folder: Path, *others: Callable[[], Any], precision: Any = None, resume: bool = False
) -> None:
    checkpoints = ModelCheckpoint(folder, filename="half", every_n_train_steps=HALF + 1, save_top_k=1)
    for path in (None, folder / "half.ckpt")[: 2 if resume else 1]:
        if path:
            program.start()
        callback = optg.integrations.lightning.Sparsify(program.make_method(), **program.options)
        callbacks = [callback, checkpoints, *(make() for make in others)]
        trainer = lightning.Trainer(max_epochs=2, callbacks=callbacks, precision=precision, **QUIET)
        module = Module(program)
        trainer.fit(module, torch.utils.data.DataLoader(program.data[:HALF], batch_size=None), ckpt_path=path)
    program.model, program.sparsifier = module, callback.sparsifier


class WithLoss(nn.Module):
    """A model as transformers' Trainer wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.model(x)
        return scores if labels is None else {"loss": F.cross_entropy(scores, labels), "logits": scores}


def run_in_transformers(program: Program, folder: Path, best: bool = False, resume: bool = False) -> None:
    data = [{"x": x, "labels": y} for batch in program.data[:HALF] for x, y in zip(*batch)]
    half = {"save_strategy": "steps", "save_steps": HALF + 1} if resume else {"save_strategy": "no"}
    early = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1000}
    length = {"num_train_epochs": 2, "per_device_train_batch_size": 8}
    for checkpoint in (None, str(folder / f"checkpoint-{HALF + 1}"))[: 2 if resume else 1]:
        if checkpoint:
            program.start()
        arguments = TrainingArguments(str(folder), **length, **quiet, **(early if best else half), load_best_model_at_end=best)
        callback = optg.integrations.transformers.Sparsify(program.make_method(), **program.options)
        given = {"train_dataset": data, "eval_dataset": data[:8], "optimizers": (program.optimizers[0], None)}
        program.model = WithLoss(program.model)
        Trainer(program.model, arguments, callbacks=[callback], **given).train(resume_from_checkpoint=checkpoint)
    program.sparsifier = callback.sparsifier


TRAINERS: dict[str, Callable[[Program, Path], None]] = {
    "Lightning": run_in_lightning,
    "Lightning, average": lambda program, folder: run_in_lightning(program, folder, lambda: EMAWeightAveraging(decay=0.7)),
    "Lightning, bf16": partial(run_in_lightning, precision="bf16-mixed"),
    "Lightning, resume": partial(run_in_lightning, resume=True),
    "transformers": run_in_transformers,
    "transformers, best model": partial(run_in_transformers, best=True),
    "transformers, resume": partial(run_in_transformers, resume=True),
}
FEATURES = [
    "nothing", "accumulation", "closure", "clipping", "autocast", "nan gradient", "two optimizers", "compiled", "accelerate",
    "fewer steps", "average copied back", "early checkpoint reloaded", "no finish", *MID_RUN, *TRAINERS,
]  # fmt: skip
