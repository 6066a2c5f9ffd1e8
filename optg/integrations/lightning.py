"""Sparse training with Lightning: `Trainer(callbacks=[Sparsify(sparsity=0.9)])`. Works with `pytorch_lightning` too."""

import math
import warnings
from typing import Any

import torch

from optg.core.sharding import is_dtensor
from optg.integrations.attachment import Attachment
from optg.integrations.state_file import whole

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; install Lightning with: pip install 'optg[lightning]'") from None


class Sparsify(Attachment, Callback):
    """Attach `optg.sparsify` when training starts, keep its state in Lightning's checkpoints, finish when training ends.

    Args:
        method, sparsity, options: as for `optg.sparsify`. The sparsity is 0.9 unless it, the method or `structure` says
            otherwise. The length of training comes from the trainer unless it is given.
    """

    max_epochs: int | None = None
    saved: dict[str, Any] | None = None

    @property
    def state_key(self) -> str:
        return "optg.Sparsify"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.release()
            self.saved = None
            self.max_epochs = trainer.max_epochs  # now, because SWA adds an epoch in which no weight changes
        # Come last, but before checkpoints: callbacks that put averaged weights into the model have done so then.
        others = [callback for callback in trainer.callbacks if callback is not self]
        before = sum(callback not in trainer.checkpoint_callbacks for callback in others)
        trainer.callbacks = [*others[:before], self, *others[before:]]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        steps, epochs = self.training_length(trainer)
        optimizers = trainer.optimizers if len(trainer.optimizers) > 1 else trainer.optimizers[0]
        self.attach(pl_module, optimizers, trainer.global_step, steps, epochs, self.saved)
        self.saved = None

    def training_length(self, trainer: Any) -> tuple[int, int | None]:
        """Return the number of optimizer steps, and the number of epochs if it is known."""
        epochs, per_epoch = math.inf, math.inf
        if self.max_epochs not in (None, -1):
            epochs = max(1, self.max_epochs or 1)
        if trainer.num_training_batches != math.inf:
            per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        in_epochs, limit = epochs * per_epoch, math.inf if trainer.max_steps == -1 else trainer.max_steps
        if min(in_epochs, limit) == math.inf:
            if {"steps", "steps_per_epoch"} & self.options.keys():
                return trainer.global_step + 1, None  # not used
            raise ValueError(
                "the length of training is not known: set `max_steps` in the Trainer, or give the number of optimizer steps: "
                "Sparsify(steps=…)"
            )
        return int(min(in_epochs, limit)), int(epochs) if in_epochs <= limit else None

    # ---- during training

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        if pl_module.automatic_optimization and len(trainer.optimizers) == 1:
            self.catch_up(trainer.global_step)
        if self.sparsifier and trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics({"sparsity": self.sparsifier.sparsity}, step=trainer.global_step)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.prepare_to_measure(trainer, pl_module)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.prepare_to_measure(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.sparsifier:
            pl_module.log("sparsity", self.sparsifier.sparsity, prog_bar=True, sync_dist=True)

    def prepare_to_measure(self, trainer: Any, pl_module: Any) -> None:
        """Mask averaged weights that a callback has just put into the model, and forget scores of less sparse models."""
        if self.sparsifier and self.max_epochs not in (None, -1) and trainer.current_epoch >= self.max_epochs:
            self.sparsifier.finish()  # SWA's extra epoch, which collects batch-norm statistics of the averaged weights
        elif self.sparsifier:
            self.sparsifier.apply_masks(pl_module)
            if self.rises_to_target():
                forget_scores(trainer.callbacks)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state. All processes call this: Lightning writes the state of one of them for all."""
        saved = self.save()
        if saved:
            saved["sparsifier"]["tensors"] = {
                kind: {name: whole(tensor) if is_dtensor(tensor) else tensor for name, tensor in layers.items()}
                for kind, layers in saved["sparsifier"]["tensors"].items()
            }
        return saved

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Mask the averaged weights that an EMA callback stores in place of the model's."""
        masks = self.sparsifier.masks if self.sparsifier else {}
        with torch.no_grad():
            for name in masks.keys() & checkpoint["state_dict"].keys():
                if type(values := checkpoint["state_dict"][name]) is type(masks[name]):
                    values.masked_fill_(~masks[name].to(values.device), 0)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["callbacks"].get(self.state_key)
        if trainer.state.fn == "fit":
            if not saved and checkpoint["global_step"]:  # 0 if the learning-rate finder puts everything back
                raise ValueError(
                    f"the checkpoint {trainer.ckpt_path} was saved without optg's Sparsify callback, so its run cannot resume "
                    "sparse; to start a sparse run from its weights, load them into the model and call fit without `ckpt_path`"
                )
            self.saved = saved or self.saved
        elif self.sparsifier and saved and not self.reached(saved["sparsifier"]):
            warnings.warn(
                f"the checkpoint {trainer.ckpt_path} is from before the target sparsity was reached: its weights are masked "
                "now, and the score that it was saved with no longer holds",
                stacklevel=2,
            )
            self.sparsifier.apply_masks(pl_module)

    # ---- the end

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.sparsifier:  # now, because Lightning next moves the model off the GPU
            self.sparsifier.finish()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.mask_again(pl_module, "a hook at the end of training")


def forget_scores(callbacks: list[Any]) -> None:
    """Reset the best score of ModelCheckpoint and EarlyStopping: a less sparse model reached it. Files stay where they are."""
    for callback in callbacks:
        worst = torch.tensor(math.inf if getattr(callback, "mode", "min") == "min" else -math.inf)
        if hasattr(callback, "best_k_models") and callback.monitor is not None:
            callback.best_k_models, callback.best_model_path, callback.kth_best_model_path = {}, "", ""
            callback.best_model_score, callback.kth_value = None, worst
        if hasattr(callback, "wait_count"):
            callback.best_score, callback.wait_count = worst, 0
