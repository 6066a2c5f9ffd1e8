"""`optg train --log tensorboard`: the folder RUN/tensorboard."""

from typing import Any

from optg.training.loggers.base import Logger


class TensorBoard(Logger):
    name = "tensorboard"
    package = "torch.utils.tensorboard"

    writer: Any = None

    def start(self, run: str, settings: dict[str, Any]) -> None:
        pass  # the writer must know the first epoch

    def log(self, epoch: int, metrics: dict[str, float]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self.writer is None:  # purges later points, which an interrupted run left
            self.writer = SummaryWriter(self.folder / "tensorboard", purge_step=epoch)
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, epoch)
        self.writer.flush()  # before the checkpoint that says this epoch is done

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()
