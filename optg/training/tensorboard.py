"""Write each epoch's metrics for TensorBoard: `optg train --tensorboard`."""

from pathlib import Path
from typing import Any

SCALARS = ("loss", "test_loss", "accuracy", "sparsity", "lr", "score_lr", "images_per_second")


def require_tensorboard() -> None:
    """Raise an error that says what to install if TensorBoard is missing."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--tensorboard needs a missing package ({error}); run: pip install 'optg[tensorboard]'") from None


class TensorBoardLog:
    """The `tensorboard` folder of a run. Points from `epoch` on, left by an interrupted run, are purged."""

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
