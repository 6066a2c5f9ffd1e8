"""Train a sparse network on handwritten digits with Lightning. Two lines are about sparsity: the import and the callback.

python examples/lightning_digits.py
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from optg.data import digits
from optg.integrations.lightning import Sparsify


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--sparsity", type=float, default=0.95)
    options = parser.parse_args()
    pl.seed_everything(0)
    train, test = (TensorDataset(*split) for split in digits.load())
    model, callback = Classifier(), Sparsify("optg", sparsity=options.sparsity)
    trainer = pl.Trainer(max_epochs=options.epochs, callbacks=[callback], logger=False, enable_checkpointing=False)
    trainer.fit(model, DataLoader(train, batch_size=64, shuffle=True))
    trainer.test(model, DataLoader(test, batch_size=360))
    print(f"sparsity {callback.sparsifier.sparsity:.4f}")


if __name__ == "__main__":
    main()
