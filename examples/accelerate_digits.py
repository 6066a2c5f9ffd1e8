"""Train a sparse network on handwritten digits with accelerate. Two lines are about sparsity: `sparsify` and `finish`.

python examples/accelerate_digits.py
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import optg
from optg.data import digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--sparsity", type=float, default=0.95)
    options = parser.parse_args()
    torch.manual_seed(0)
    train, (images, labels) = digits.load()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(*train), 64, shuffle=True))
    steps = options.epochs * len(loader)
    sparsifier = optg.sparsify(model, optimizer, "optg", sparsity=options.sparsity, steps=steps)
    for _ in range(options.epochs):
        for batch, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(batch), targets))
            optimizer.step()
    sparsifier.finish()
    with torch.no_grad():
        predicted = model(images.to(accelerator.device)).argmax(1).cpu()
    print(f"accuracy {(predicted == labels).float().mean():.2%}, sparsity {sparsifier.sparsity:.4f}")


if __name__ == "__main__":
    main()
