"""Programs drawn at random: model × optimizer × method × trainer, or something that trainers do to a model.

Each ends with exact zeros in the weights that forward really uses, or with a warning or error that names the cause.
"""

import copy
import random
import traceback
import warnings
from functools import partial
from pathlib import Path

import lightning.pytorch as lightning
import pytest
import schedulefree
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from transformers.pytorch_utils import Conv1D

import optg
from optg.integrations.lightning import Sparsify
from optg.methods import METHODS
from tests.integrations.test_lightning import QUIET
from tests.integrations.used_weights import UsedWeights
from tests.toy import goal

STEPS, SPARSITY = 12, 0.8
F = nn.functional


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.encoder(x.view(len(x), 4, 16)).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0].mean(1))


class Experts(nn.Module):
    """Two experts as one stack of weights, both used for every input."""

    def __init__(self):
        super().__init__()
        self.experts, self.head = nn.Parameter(torch.randn(2, 16, 64) / 8), nn.Linear(16, 4)

    def forward(self, x):
        outputs = F.linear(x.flatten(1), self.experts.flatten(0, 1)).unflatten(1, (2, 16))
        return self.head(outputs.sum(1).relu())


def small_cnn():
    layers = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 8, 1), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (1, 8)), *layers, nn.Linear(512, 4))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)),
    "cnn": small_cnn,
    "attention": Attention,
    "recurrent": Recurrent,
    "experts": Experts,
    "transformers' Conv1D": lambda: nn.Sequential(nn.Flatten(), Conv1D(32, 64), nn.ReLU(), nn.Linear(32, 4)),
    "conv1d": lambda: nn.Sequential(nn.Conv1d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)),
}
OPTIMIZERS = {
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
FEATURES = [
    "nothing", "accumulation", "closure", "clipping", "average copied back", "early checkpoint reloaded", "copied mid-run",
    "parameter replaced", "module replaced", "second sparsifier", "nan gradient", "resume", "two optimizers", "fewer steps",
    "model.half and back", "accelerate", "Lightning", "Lightning, average",
]  # fmt: skip


def in_train_mode(optimizer):
    optimizer.train()
    return optimizer


class Module(lightning.LightningModule):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model, self.optimizer = model, optimizer

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, index):
        return loss_of(self, batch)

    def configure_optimizers(self):
        return self.optimizer


def run_in_lightning(model, optimizer, method, data, average, **options):
    """Train in Lightning's Trainer, which tells the callback the number of steps."""
    module, callback = Module(model, optimizer), Sparsify(method, **options)
    callbacks = [callback, EMAWeightAveraging(decay=0.7)] if average else [callback]
    trainer = lightning.Trainer(max_epochs=2, callbacks=callbacks, enable_checkpointing=False, **QUIET)
    trainer.fit(module, torch.utils.data.DataLoader(data[: STEPS // 2], batch_size=None))
    return callback.sparsifier, module


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def run_program(seed):
    """Run one random program. Return its description, the sparsifier, the model and the messages that the user saw."""
    rng = random.Random(seed)
    names = [
        rng.choice(list(choices))
        for choices in (MODELS, OPTIMIZERS, [m for m in METHODS if m not in ("dense", "keep")], FEATURES)
    ]
    model_name, optimizer_name, method, feature = names
    torch.manual_seed(seed)
    model = MODELS[model_name]()
    data = [(torch.randn(8, 8, 8), torch.randint(4, (8,))) for _ in range(STEPS)]
    parameters = list(model.parameters())
    split = feature == "two optimizers"
    groups = [parameters[:2], parameters[2:]] if split else [parameters]
    optimizers = [OPTIMIZERS[optimizer_name](group) for group in groups]
    options = {"every": 2} if hasattr(METHODS[method], "every") else {"fraction": 0.6} if method == "imp" else {}
    chosen = METHODS[method](**options)
    start = {**goal(method, model, SPARSITY), "steps": STEPS, "loss": loss_of, "batches": data}
    if feature.startswith("Lightning"):
        del start["steps"]
        return names, *run_in_lightning(model, optimizers[0], chosen, data, "average" in feature, **start)
    if feature == "accelerate":
        model, optimizers[0] = Accelerator(cpu=True).prepare(model, optimizers[0])
    sparsifier = optg.sparsify(model, optimizers if split else optimizers[0], chosen, **start)
    average, early = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    early = {name: t + 0.05 if t.is_floating_point() else t for name, t in early.items()}
    for i, batch in enumerate(data[: STEPS - 3 if feature == "fewer steps" else STEPS]):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(2 if feature == "accumulation" else 1):
            loss_of(model, batch).backward()
        if feature == "nan gradient" and i == STEPS - 2:
            for p in parameters:
                p.grad.fill_(torch.nan)
        if feature == "clipping":
            sparsifier.clip_grad_norm_(1.0)
        for optimizer in optimizers:
            optimizer.step(partial(loss_of, model, batch)) if feature == "closure" else optimizer.step()
        if i == STEPS // 2:
            if feature == "copied mid-run":
                model, optimizers = copy.deepcopy((model, optimizers))
                parameters = list(model.parameters())
            if feature == "parameter replaced":
                layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
                layer.weight = nn.Parameter(layer.weight.detach().clone())
            if feature == "module replaced":
                name = next(name for name, child in model.named_children() if isinstance(child, nn.Linear))
                setattr(model, name, copy.deepcopy(getattr(model, name)))
            if feature == "second sparsifier":
                optg.sparsify(model, torch.optim.SGD(model.parameters(), lr=0.1), "gmp", sparsity=0.5, steps=5)
            if feature == "resume":
                states = copy.deepcopy((model.state_dict(), optimizers[0].state_dict(), sparsifier.state_dict()))
                model = MODELS[model_name]()
                parameters, optimizers = list(model.parameters()), [OPTIMIZERS[optimizer_name](list(model.parameters()))]
                sparsifier = optg.sparsify(model, optimizers[0], METHODS[method](**options), **start)
                for target, state in zip((model, optimizers[0], sparsifier), states):
                    target.load_state_dict(state)
            if feature == "model.half and back":
                model.bfloat16().float()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters()):
                a.lerp_(p, 0.3)
    if feature == "average copied back":
        model.load_state_dict(average.state_dict())
    if feature == "early checkpoint reloaded":
        model.load_state_dict(early)
    if optimizer_name == "schedule-free":
        optimizers[0].eval()
    sparsifier.finish()
    return names, sparsifier, model


def check_program(seed):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            names, sparsifier, model = run_program(seed)
        except (FloatingPointError, RuntimeError, TypeError, ValueError) as error:
            assert len(str(error)) > 40, f"{seed}: {error!r}"  # a sentence, not a bare exception of torch
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            assert Path(last).is_relative_to(Path(optg.__file__).parent), f"{seed}: {error!r} does not come from optg"
            return "refused"
    masks = sparsifier.masks
    expected = {name: int((~mask).sum()) for name, mask in masks.items()}
    assert sparsifier.verify().ok, (seed, names)
    with UsedWeights({name: model.get_parameter(name) for name in masks}) as used, torch.no_grad():
        model.train()(torch.randn(8, 8, 8))
    assert used.zero, (seed, names)
    for name, zero in used.zero.items():
        assert int(zero.sum()) >= expected[name], (seed, names, name)
    if not METHODS[names[2]].learns_sparsity:
        assert sum(expected.values()) == sparsifier.weights.zeros(SPARSITY)[0], (seed, names)
    if names[3] == "early checkpoint reloaded":
        assert "removed again" in " ".join(str(w.message) for w in caught), (seed, names)
    return "sparse"


@pytest.mark.parametrize("seed", range(20))
def test_a_random_program_is_sparse_or_says_why_not(seed):
    check_program(seed)


@pytest.mark.long
def test_three_hundred_random_programs():
    outcomes = [check_program(seed) for seed in range(300)]
    assert outcomes.count("sparse") > 150 and outcomes.count("refused") > 20
