"""`optg train --log wandb`: Weights & Biases. Its own variables apply, such as WANDB_PROJECT and WANDB_MODE=offline."""

import os
from typing import Any
from uuid import uuid4

from optg.files import atomic_file
from optg.training.loggers.base import Logger


class WandB(Logger):
    name = "wandb"
    package = "wandb"
    hint = "Without an account or a network, set WANDB_MODE=offline"

    def start(self, run: str, settings: dict[str, Any]) -> None:
        import wandb

        file = self.folder / "wandb-run-id"
        if not file.exists():
            with atomic_file(file) as new:
                new.write(uuid4().hex[:8].encode())
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "optg"),
            name=run,
            id=file.read_text().strip(),
            resume="allow",
            dir=self.folder,
            config=settings,
        )

    def log(self, epoch: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=epoch)  # wandb ignores an epoch that it has already

    def finish(self) -> None:
        self.run.finish()
