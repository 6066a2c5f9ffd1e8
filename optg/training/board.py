"""The metrics of each epoch for TensorBoard, where that is installed: `optg train --tensorboard`."""

from pathlib import Path
from typing import Any

SCALARS = ("loss", "test_loss", "accuracy", "sparsity", "lr", "score_lr", "images_per_second")


def refuse_missing() -> None:
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--tensorboard needs a package that is missing ({error}): pip install 'optg[tensorboard]'") from None


class Board:
    """A run's `tensorboard` folder. What it has of epochs that are done again, from `epoch` on, a viewer is told to forget."""

    def __init__(self, folder: Path, epoch: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder / "tensorboard", purge_step=epoch)

    def write(self, row: dict[str, Any]) -> None:
        for name in SCALARS:
            if name in row:
                self.writer.add_scalar(name, row[name], row["epoch"])
        self.writer.flush()  # before the checkpoint that says this epoch is done

    def close(self) -> None:
        self.writer.close()
