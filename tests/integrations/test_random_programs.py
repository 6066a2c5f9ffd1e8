"""Programs drawn at random: model × optimizer × method × something that trainers do to a model.

Each ends with exact zeros in the weights that forward really uses, or with a warning or error that names the cause.
"""

import copy
import random
import traceback
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import optg
from optg.methods import METHODS
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


def small_cnn():
    layers = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 8, 1), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (1, 8)), *layers, nn.Linear(512, 4))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)),
    "cnn": small_cnn,
    "attention": Attention,
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
}
FEATURES = [
    "nothing", "accumulation", "closure", "clipping", "average copied back", "early checkpoint reloaded", "copied mid-run",
    "parameter replaced", "second sparsifier", "nan gradient", "resume", "two optimizers", "fewer steps", "model.half and back",
]  # fmt: skip


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
