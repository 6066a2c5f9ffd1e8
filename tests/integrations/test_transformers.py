"""The callback for transformers, in its own Trainer."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from optg.integrations.transformers import Sparsify
from tests.integrations.test_lightning import METHODS, assert_same, assert_sparse
from tests.integrations.zeros import zeros

STEPS = 30  # 5 epochs of 24 batches, 4 batches to a step


def tiny_bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
    )
    return BertForSequenceClassification(config)


def sentences() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(20, (96, 6), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 2} for row in tokens]


class Interruption(Exception):
    pass


class InterruptOnce(TrainerCallback):
    step = 10

    def on_step_end(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = 0
            raise Interruption


def train(folder: Path, *callbacks: Any, resume: Any = None, data: Any = None, **options: Any) -> tuple[nn.Module, Trainer]:
    """Evaluation gives the number of the step as "eval_step": the first evaluation is the best."""
    settings = {
        "num_train_epochs": 5,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "metric_for_best_model": "step",
        "greater_is_better": False,
        **options,
    }
    arguments = TrainingArguments(str(folder), **settings)
    model, data = tiny_bert(), data or sentences()
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=sentences(), callbacks=list(callbacks))
    trainer.compute_metrics = lambda _: {"step": float(trainer.state.global_step)}
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Interruption:
        trainer.train(resume_from_checkpoint=True)
    return model, trainer


@pytest.mark.parametrize("method", ["optg", "gmp", "rigl", "feather", "acdc"])
def test_two_lines_make_the_model_sparse(method: str, tmp_path: Path) -> None:
    callback = Sparsify(METHODS[method](), sparsity=0.9)
    model, trainer = train(tmp_path, callback, logging_steps=10)
    assert_sparse(model)
    assert callback.sparsifier and callback.sparsifier.clock.epochs == 5 and callback.sparsifier.clock.total == STEPS
    logged = [row["sparsity"] for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 3 and logged[-1] == pytest.approx(0.9, abs=1e-3)


@pytest.mark.parametrize("length", [{"max_steps": 20}, {"num_train_epochs": 1}, {"num_train_epochs": 2.5}])
def test_steps_alone_are_enough(length: dict[str, Any], tmp_path: Path) -> None:
    callback = Sparsify()
    model, trainer = train(tmp_path, callback, **length)
    assert_sparse(model)
    assert callback.sparsifier and callback.sparsifier.clock.total == trainer.state.global_step


def test_iterable_datasets(tmp_path: Path) -> None:
    class Stream(IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return iter(sentences())

    model, _ = train(tmp_path, Sparsify(), data=Stream(), max_steps=20)
    assert_sparse(model)


# ---- resume


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("method", ["optg", "rigl", "str"])
def test_a_run_resumes_bit_for_bit(method: str, bf16: bool, tmp_path: Path) -> None:
    """In the middle of an epoch, with four batches per step, dropout and shuffled data."""
    whole, _ = train(tmp_path, Sparsify(METHODS[method]()), bf16=bf16, save_strategy="steps", save_steps=8)
    checkpoint = tmp_path / "checkpoint-8"
    with safe_open(checkpoint / "optg.safetensors", "pt") as file:
        assert any(key.startswith("masks/") for key in file.keys())  # noqa: SIM118  # not a dict
    resumed, trainer = train(tmp_path, Sparsify(METHODS[method]()), resume=str(checkpoint), bf16=bf16)
    assert trainer.state.global_step == STEPS
    assert zeros(whole)
    assert_same(whole, resumed)


def test_the_same_trainer_resumes_after_an_interruption(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    whole, _ = train(tmp_path / "whole", Sparsify(), **options)
    resumed, _ = train(tmp_path / "interrupted", Sparsify(), InterruptOnce(), **options)
    assert_same(whole, resumed)


def test_a_resume_without_sparsifier_state_raises(tmp_path: Path) -> None:
    train(tmp_path, max_steps=8, save_strategy="steps", save_steps=8)
    with pytest.raises(ValueError, match=r"resumes at step 8, but .*checkpoint-8.optg\.safetensors does not exist"):
        train(tmp_path, Sparsify(), resume=True, max_steps=20)


def test_a_damaged_state_names_the_file(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    train(tmp_path, Sparsify("gmp"), **options)
    state = tmp_path / "checkpoint-2" / "optg.safetensors"
    state.write_bytes(state.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"checkpoint-2.optg\.safetensors is damaged .* resume from another checkpoint"):
        train(tmp_path, Sparsify("gmp"), resume=str(state.parent), **options)


def test_a_checkpoint_from_another_folder(tmp_path: Path) -> None:
    """The trainer does not tell callbacks which folder it loads: a state of another run must not be taken for its state."""
    options: dict[str, Any] = {"max_steps": 20, "save_strategy": "steps", "save_steps": 8}
    whole, _ = train(tmp_path / "first", Sparsify(), **options)
    train(tmp_path / "second", Sparsify(), **options, seed=1)
    elsewhere = tmp_path / "first" / "checkpoint-8"
    with pytest.raises(ValueError, match="belongs to other weights"):
        train(tmp_path / "second", Sparsify(), resume=str(elsewhere), **options)
    resumed, _ = train(tmp_path / "second", Sparsify(resume_from=elsewhere), resume=str(elsewhere), **options)
    assert torch.equal(whole.classifier.weight, resumed.classifier.weight)


# ---- the best checkpoint


@pytest.mark.parametrize("method", ["optg", "gmp", "rigl", "set"])
def test_load_best_model_at_end(method: str, tmp_path: Path) -> None:
    """Scores of less sparse models do not count. RigL and SET change masks after the best step, which keeps its own."""
    callback = Sparsify(METHODS[method]())
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    model, trainer = train(tmp_path, callback, **options, load_best_model_at_end=True)
    assert_sparse(model)
    assert trainer.state.best_model_checkpoint
    best = tiny_bert().from_pretrained(trainer.state.best_model_checkpoint)
    assert_same(best, model)


def test_a_best_checkpoint_from_before_the_target_is_masked_with_a_warning(tmp_path: Path) -> None:
    """Early stopping ends training before the target sparsity is reached."""
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    with pytest.warns(UserWarning, match=r"checkpoint-3 is from before the target sparsity .* its score no longer holds"):
        model, _ = train(tmp_path, Sparsify("gmp"), EarlyStoppingCallback(2), **options, load_best_model_at_end=True)
    assert_sparse(model)


def test_early_stopping_starts_over_at_the_target(tmp_path: Path) -> None:
    """Each evaluation is worse than the one before. Patience counts from the first one at the target sparsity."""
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    callback = Sparsify("gmp", steps=18)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, trainer = train(tmp_path, callback, EarlyStoppingCallback(6), **options, load_best_model_at_end=True)
    assert trainer.state.best_metric is not None and trainer.state.best_metric > 3
    assert trainer.state.global_step > 3 + 6 * 3


class Overflow(TrainerCallback):
    """Scales the loss, and makes the gradients of some steps infinite, so that the GradScaler skips these steps.

    accelerate has no float16 on a CPU, but trains with any scaler that it finds.
    """

    def __init__(self, *skipped: int) -> None:
        self.skipped, self.clock = skipped, []

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        model.classifier.weight.register_hook(
            lambda grad: grad * float("inf") if self.state.global_step in self.skipped else None
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.state = state

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.append(self.sparsify.sparsifier.clock.step)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])  # a scaler does not call the first for a skipped step
def test_steps_that_a_grad_scaler_skips_are_counted(optim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, skipped = Accelerator.prepare, (3, 4, 17)

    def prepare_with_scaler(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        self.scaler = torch.amp.GradScaler("cpu")
        return prepare(self, *args, **kwargs)

    monkeypatch.setattr(Accelerator, "prepare", prepare_with_scaler)
    sparsify, overflow = Sparsify(), Overflow(*skipped)
    overflow.sparsify = sparsify
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(steps were seen|optimizer step).*")
        model, trainer = train(tmp_path, sparsify, overflow, max_grad_norm=0.0, optim=optim)
    assert overflow.clock == list(range(1, STEPS + 1))
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {STEPS - len(skipped)}
    assert_sparse(model)
