"""The Lightning callback, in Lightning's own Trainer."""

import csv
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from optg.integrations.lightning import Sparsify
from optg.methods import SET, STR, Method, RigL
from tests.integrations.zeros import expected_zeros, zeros

warnings.filterwarnings("ignore", message=".*(does not have many workers|LeafSpec|Checkpoint directory|sanity check).*")
BATCHES = 8
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


METHODS: dict[str, Callable[[], str | Method]] = {
    "optg": lambda: "optg",
    "gmp": lambda: "gmp",
    "rigl": lambda: RigL(every=5),
    "set": lambda: SET(every=5),
    "str": lambda: STR(initial=-3.0),
    "feather": lambda: "feather",
    "acdc": lambda: "acdc",
}  # runs are short: the default is to exchange every 100 steps


class Net(lightning.LightningModule):
    """Learns to predict the sum of its inputs. "score" is the number of the epoch: the first epoch has the best score."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(8, 32),
            nn.BatchNorm1d(32) if norm else nn.Identity(),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return (self.layers(batch).squeeze(1) - batch.sum(1)).square().mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("score", float(self.current_epoch))
        self.log("zeros", float(zeros(self)))

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Loader:
    """The same batches in each epoch. It can resume in the middle of one."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches = [torch.randn(16, 8, generator=generator) for _ in range(BATCHES)]
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        start, self.position = self.position % len(self), self.position % len(self)
        for batch in self.batches[start:]:
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def fit(
    tmp_path: Path, *callbacks: Any, model: Net | None = None, ckpt_path: Any = None, package: Any = lightning, **options: Any
) -> tuple[Net, Any]:
    options = {"max_epochs": 6, "default_root_dir": tmp_path, **QUIET, **options}
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        options["enable_checkpointing"] = False
    model, trainer = model or Net(), package.Trainer(callbacks=list(callbacks), **options)
    trainer.fit(model, Loader(), None if options.get("limit_val_batches") == 0 else Loader(), ckpt_path=ckpt_path)
    return model, trainer


def assert_sparse(model: nn.Module, sparsity: float = 0.9) -> None:
    assert zeros(model) == expected_zeros(model, sparsity)


@pytest.mark.parametrize("method", ["optg", "gmp", "rigl", "feather", "acdc"])
def test_two_lines_make_the_model_sparse(method: str, tmp_path: Path) -> None:
    callback = Sparsify(METHODS[method](), sparsity=0.9)
    model, trainer = fit(tmp_path, callback)
    assert_sparse(model)
    assert callback.sparsifier and callback.sparsifier.clock.epochs == 6 and callback.sparsifier.clock.total == 6 * BATCHES
    assert trainer.callback_metrics["sparsity"] == pytest.approx(0.9, abs=1e-3)


def test_loggers_follow_the_sparsity_within_an_epoch(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    fit(tmp_path, Sparsify("gmp"), max_epochs=1, limit_val_batches=0, logger=logger, log_every_n_steps=2)
    with open(tmp_path / "lightning_logs" / "version_0" / "metrics.csv") as file:
        logged = [float(row["sparsity"]) for row in csv.DictReader(file) if row["sparsity"]]
    assert logged == sorted(logged) and len(set(logged)) >= 3 and logged[-1] == pytest.approx(0.9, abs=1e-3)


class Overflow(lightning.Callback):
    """Makes the gradients of some steps infinite, so that the GradScaler skips these steps."""

    def __init__(self, *skipped: int) -> None:
        self.skipped, self.clock = skipped, []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        weight = pl_module.layers[0].weight
        weight.register_hook(lambda grad: grad * float("inf") if trainer.global_step in self.skipped else None)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        self.clock.append(next(c for c in trainer.callbacks if isinstance(c, Sparsify)).sparsifier.clock.step)


def test_steps_that_a_grad_scaler_skips_are_counted(tmp_path: Path) -> None:
    sparsify, overflow = Sparsify(), Overflow(3, 4, 17)
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(steps were seen|optimizer step).*")
        model, trainer = fit(tmp_path, sparsify, overflow, plugins=[precision])
    assert overflow.clock == list(range(6 * BATCHES))
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {6 * BATCHES - 3}
    assert_sparse(model)


def test_trainers_without_extras(tmp_path: Path) -> None:
    model = Net()
    lightning.Trainer(max_epochs=3, barebones=True, accelerator="cpu", callbacks=[Sparsify()]).fit(model, Loader())
    assert_sparse(model)


def test_pytorch_lightning_works_too(tmp_path: Path) -> None:
    class OtherNet(pytorch_lightning.LightningModule):
        training_step, configure_optimizers = Net.training_step, Net.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.layers = Net().layers

    model = OtherNet()
    checkpoints = pytorch_lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=20, save_top_k=-1)
    for path in (None, tmp_path / "epoch=2-step=20.ckpt"):
        callbacks = [Sparsify("gmp"), checkpoints]
        trainer = pytorch_lightning.Trainer(max_epochs=6, callbacks=callbacks, default_root_dir=tmp_path, **QUIET)
        trainer.fit(model, Loader(), ckpt_path=path)
        assert_sparse(model)


@pytest.mark.parametrize("length", [{"max_steps": 30}, {"max_steps": 30, "max_epochs": -1}, {"max_epochs": 1}])
def test_steps_alone_are_enough(length: dict[str, int], tmp_path: Path) -> None:
    callback = Sparsify()
    model, trainer = fit(tmp_path, callback, **length)
    assert_sparse(model)
    assert callback.sparsifier and callback.sparsifier.clock.total == trainer.global_step


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(Loader())


def test_iterable_datasets_need_a_number_of_steps(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
    options = {"default_root_dir": tmp_path, "enable_checkpointing": False, **QUIET}
    model = Net()
    lightning.Trainer(max_steps=30, callbacks=[Sparsify()], **options).fit(model, loader)
    assert_sparse(model)
    model = Net()
    lightning.Trainer(max_epochs=3, callbacks=[Sparsify(steps=24)], **options).fit(model, loader)
    assert_sparse(model)
    with pytest.raises(ValueError, match=r"set `max_steps` in the Trainer, or give .* Sparsify\(steps=…\)"):
        lightning.Trainer(max_epochs=3, callbacks=[Sparsify()], **options).fit(Net(), loader)


@pytest.mark.parametrize("method", ["optg", "gmp", "rigl"])
@pytest.mark.parametrize("batches", [1, 3])
def test_fast_dev_run(method: str, batches: int, tmp_path: Path) -> None:
    model, _ = fit(tmp_path, Sparsify(METHODS[method]()), fast_dev_run=batches)
    assert_sparse(model)


# ---- resume


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("method", ["optg", "rigl", "str"])
def test_a_run_resumes_bit_for_bit(method: str, precision: Any, tmp_path: Path) -> None:
    """In the middle of an epoch, between two cuts, with two batches per step."""
    options = {"precision": precision, "accumulate_grad_batches": 2, "limit_val_batches": 0}
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=7, save_top_k=-1)
    whole, _ = fit(tmp_path, Sparsify(METHODS[method]()), checkpoints, **options)
    assert zeros(whole)
    checkpoint = tmp_path / "epoch=1-step=7.ckpt"
    assert torch.load(checkpoint, weights_only=True)["callbacks"]["optg.Sparsify"]["sparsifier"]["step"] == 7
    resumed, trainer = fit(tmp_path / "again", Sparsify(METHODS[method]()), ckpt_path=checkpoint, **options)
    assert trainer.global_step == 24
    assert_same(whole, resumed)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_a_resume_without_sparsifier_state_raises(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path, filename="dense"), max_epochs=1)
    with pytest.raises(ValueError, match=r"dense\.ckpt was saved without optg's Sparsify callback") as raised:
        fit(tmp_path, Sparsify(), ckpt_path=tmp_path / "dense.ckpt")
    assert "\n" not in str(raised.value)


def test_training_again_after_an_interruption(tmp_path: Path) -> None:
    class Interrupt(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 20:
                raise RuntimeError("out of memory")

    callback, checkpoints = Sparsify(), ModelCheckpoint(tmp_path, every_n_train_steps=7, save_top_k=-1)
    model = Net()
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(tmp_path, callback, checkpoints, Interrupt(), model=model)
    fit(tmp_path, callback, model=model, ckpt_path=tmp_path / "epoch=1-step=14.ckpt", limit_val_batches=0)
    whole, _ = fit(tmp_path, Sparsify(), limit_val_batches=0)
    assert torch.equal(model.layers[0].weight, whole.layers[0].weight)


# ---- callbacks that average weights


AVERAGES = {
    "EMA": lambda: EMAWeightAveraging(decay=0.9),
    "SWA": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("method", ["optg", "rigl"])
def test_averages_are_sparse(method: str, average: str, norm: bool, first: bool, tmp_path: Path) -> None:
    """In any order of callbacks: the model at the end, the model that is validated, and the one in the checkpoints."""
    callback = Sparsify(METHODS[method]())
    callbacks = [callback, AVERAGES[average]()][:: 1 if first else -1]
    model, trainer = fit(tmp_path, *callbacks, ModelCheckpoint(tmp_path, save_last=True), model=Net(norm))
    assert_sparse(model)
    assert callback.sparsifier and callback.sparsifier.clock.total == 6 * BATCHES  # SWA's extra epoch is not training
    assert trainer.callback_metrics["zeros"] >= expected_zeros(model, 0.9)
    last = Net(norm)
    last.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"])
    assert_sparse(last)


def test_averages_are_sparse_where_only_one_thing_looks_at_them(tmp_path: Path) -> None:
    _, trainer = fit(tmp_path, Sparsify(), EMAWeightAveraging(decay=0.9))  # validation, no checkpoints
    assert trainer.callback_metrics["zeros"] >= expected_zeros(Net(), 0.9)
    fit(tmp_path, Sparsify(), EMAWeightAveraging(decay=0.9), ModelCheckpoint(tmp_path, filename="last"), limit_val_batches=0)
    saved = Net()
    saved.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"])
    assert_sparse(saved)


@pytest.mark.parametrize("average", AVERAGES)
def test_averages_resume_bit_for_bit(average: str, tmp_path: Path) -> None:
    whole, _ = fit(tmp_path, Sparsify(), AVERAGES[average](), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1))
    resumed, _ = fit(
        tmp_path / "again",
        Sparsify(),
        AVERAGES[average](),
        ModelCheckpoint(tmp_path / "again", filename="{epoch}", save_top_k=-1),
        ckpt_path=tmp_path / "epoch=2.ckpt",
    )
    assert_same(whole, resumed)


@pytest.mark.parametrize("moved", [False, True])
def test_weights_written_in_the_models_own_hook_are_removed_again(moved: bool, tmp_path: Path) -> None:
    """That hook comes after all callbacks. Lightning may have moved the weights to new memory since: it ends on the CPU."""

    class Rewind(Net):
        def on_train_end(self) -> None:
            for p, first in zip(self.parameters(), Net().parameters()):
                p.data = first.data.clone() if moved else p.data.copy_(first.data)

    with pytest.warns(UserWarning, match="brought back .* removed weights"):
        model, _ = fit(tmp_path, Sparsify(), model=Rewind())
    assert_sparse(model)


# ---- best scores


def test_the_best_checkpoint_has_the_target_sparsity(tmp_path: Path) -> None:
    best, stopping = ModelCheckpoint(tmp_path, monitor="score"), EarlyStopping("score", patience=6)
    fit(tmp_path, Sparsify("gmp"), best, stopping)
    model = Net()
    model.load_state_dict(torch.load(best.best_model_path, weights_only=True)["state_dict"])
    assert_sparse(model)
    assert best.best_model_score == stopping.best_score > 0


def test_an_early_checkpoint_is_masked_with_a_warning(tmp_path: Path) -> None:
    model, trainer = fit(tmp_path, Sparsify("gmp"), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1))
    with pytest.warns(UserWarning, match="from before the target sparsity .* score .* no longer holds"):
        trainer.test(model, Loader(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    assert zeros(model) >= expected_zeros(model, 0.9)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*target sparsity.*")
        trainer.test(model, Loader(), ckpt_path=tmp_path / "epoch=5.ckpt", verbose=False)
    assert_sparse(model)


def test_a_learning_rate_finder_comes_first(tmp_path: Path) -> None:
    class WithRate(Net):
        learning_rate = 1e-2

    callback = Sparsify()
    model, trainer = fit(tmp_path, callback, LearningRateFinder(num_training_steps=5), model=WithRate())
    assert_sparse(model)
    assert callback.sparsifier and callback.sparsifier.clock.step == trainer.global_step


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sparsityy": 0.5}, "sparsityy"),
        ({"sparsity": 90}, "sparsity is 90; .* For 90 %, write 0.9"),
        ({"method": "optgg"}, "did you mean 'optg'"),
        ({"method": "keep", "sparsity": 0.5}, "keep keeps the zeros that the model has; leave out sparsity=0.5"),
    ],
)
def test_mistakes_are_refused_before_training(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Sparsify(**options)


def test_a_structure_sets_the_sparsity(tmp_path: Path) -> None:
    model, _ = fit(tmp_path, Sparsify(structure="2:4", exclude="layers.5"))
    assert ((model.layers[3].weight.view(-1, 4) == 0).sum(1) == 2).all()
