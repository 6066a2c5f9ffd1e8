"""`optg train --log tensorboard`: the folder RUN/tensorboard."""

import time
from pathlib import Path
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
            folder = self.folder / "tensorboard"
            wait_for_later_name(folder)
            self.writer = SummaryWriter(folder, purge_step=epoch)
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, epoch)
        self.writer.flush()  # before the checkpoint that says this epoch is done

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()


def wait_for_later_name(folder: Path) -> None:
    """Wait while a file of this second exists. TensorBoard reads files in the order of their names: second, host, process."""
    while any(folder.glob(f"events.out.tfevents.{int(time.time())}.*")):
        time.sleep(0.05)
