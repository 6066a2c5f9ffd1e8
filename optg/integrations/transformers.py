"""Sparse training with the Trainer of transformers: `Trainer(..., callbacks=[Sparsify(sparsity=0.9)])`."""

import os
import warnings
from pathlib import Path
from typing import Any

from optg.integrations.attachment import Attachment
from optg.integrations.state_file import fingerprint, read_state, write_state
from optg.methods import Method

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; install transformers with: pip install 'optg[transformers]'") from None

STATE_FILE = "optg.safetensors"


class Sparsify(Attachment, TrainerCallback):
    """Attach `optg.sparsify` when training begins, keep its state in the trainer's checkpoints, finish when training ends.

    Args:
        method, sparsity, options: as for `optg.sparsify`. The sparsity is 0.9 unless it, the method or `structure` says
            otherwise. The length of training comes from the trainer unless it is given.
        resume_from: the checkpoint folder to resume from, if it is not in the trainer's `output_dir`. The trainer does not tell
            its callbacks what `train(resume_from_checkpoint=…)` was given.
    """

    def __init__(
        self,
        method: str | Method = "optg",
        sparsity: float | None = None,
        *,
        resume_from: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(method, sparsity, **options)
        self.resume_from = resume_from

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        saved = None
        if state.global_step:
            source = self.resume_from or args.resume_from_checkpoint
            folder = Path(source) if isinstance(source, str | os.PathLike) else checkpoint_folder(args, state)
            saved = read_state(folder / STATE_FILE)
            if saved is None or saved["weights"] != fingerprint(model, saved["sparsifier"]["tensors"]["masks"]):
                problem = "does not exist" if saved is None else "belongs to other weights than the trainer has loaded"
                raise ValueError(
                    f"training resumes at step {state.global_step}, but {folder / STATE_FILE} {problem}: resume from a "
                    "checkpoint of a run with optg's Sparsify callback, and name one outside `output_dir` by "
                    "Sparsify(resume_from=…)"
                )
        epochs = state.num_train_epochs if args.max_steps <= 0 else None
        self.attach(model, optimizer, state.global_step, state.max_steps, epochs, saved)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.catch_up(state.global_step)
        if control.should_evaluate or control.should_save:
            self.forget_scores(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.forget_scores(state)

    def forget_scores(self, state: Any) -> None:
        """Reset the best score when the target sparsity is reached: a less sparse model reached it."""
        if self.sparsifier and self.rises_to_target():
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if self.sparsifier:
            logs["sparsity"] = state.log_history[-1]["sparsity"] = self.sparsifier.sparsity

    def on_save(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        folder = checkpoint_folder(args, state)
        if self.sparsifier and not state.is_hyper_param_search:  # a search has folders of its own, and never resumes
            saved = self.save()
            saved["weights"] = fingerprint(model, saved["sparsifier"]["tensors"]["masks"])
            write_state(folder / STATE_FILE, saved, write=state.is_world_process_zero)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.sparsifier:
            return
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.take_masks_of(Path(state.best_model_checkpoint))
        self.sparsifier.finish()

    def take_masks_of(self, best: Path) -> None:
        """Use the masks of the best checkpoint, which the trainer has loaded, if they have the target sparsity."""
        assert self.sparsifier
        saved = read_state(best / STATE_FILE)
        if saved is not None and self.reached(saved["sparsifier"]):
            self.sparsifier.load_state_dict(saved["sparsifier"])
        else:
            warnings.warn(
                f"the best checkpoint {best.name} is from before the target sparsity was reached: its weights are masked now, "
                "and its score no longer holds",
                stacklevel=2,
            )


def checkpoint_folder(args: Any, state: Any) -> Path:
    """Return where the trainer saves its checkpoint of this step."""
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
