"""Train a small network on handwritten digits with every method, at 90 and 98 % sparsity, and compare.

    python examples/methods.py
    python examples/methods.py --methods optg,gmp,rigl --sparsity 0.95 --epochs 40

All methods get the same network, data, epochs, optimizer and seed. Options are those of the papers, except for those in SHORT.
"""

import argparse
import sys
import time
import warnings
from dataclasses import dataclass

import torch
from digits import evaluate, network
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import optg
from optg.data import digits
from optg.methods import METHODS
from optg.naming import nearest

# A run here has a few hundred steps, while the papers cut once every few thousand: here these methods cut once per epoch. IMP
# gets fewer cycles, and STR's threshold starts closer to its final value. GSM removes weights by weight decay alone, so it
# gets a larger one (DECAY).
SHORT = {
    **{name: {"every": "epoch"} for name in ("gmp", "taylor", "set", "rigl", "granet")},
    "imp": {"fraction": 0.5},
    "str": {"initial": -5.0, "decay": 0.02},
}
DECAY = {"gsm": 2e-2}


@dataclass
class Result:
    accuracy: float
    sparsity: float
    seconds: float
    collapsed: int  # layers without any weight left


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(name: str, sparsity: float, epochs: int, seed: int) -> Result:
    train_data, test_data = digits.load()
    torch.manual_seed(seed)
    loader = DataLoader(TensorDataset(*train_data), batch_size=64, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=DECAY.get(name, 2e-3))
    start = time.perf_counter()
    sparsifier = optg.sparsify(
        model,
        optimizer,
        METHODS[name](**SHORT.get(name, {})),
        sparsity=sparsity,
        epochs=epochs,
        steps_per_epoch=len(loader),
        loss=loss,  # for methods that prune before training
        batches=loader,
    )
    # the learning rate restarts with each training cycle; only IMP has several
    cycle = getattr(sparsifier.method, "cycle", lambda clock: None)(sparsifier.clock) or sparsifier.clock.total
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=cycle)
    model.train()
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            scheduler.step()
    sparsifier.finish()
    collapsed = sum(not mask.any() for mask in sparsifier.masks.values())
    return Result(evaluate(model, *test_data), sparsifier.sparsity, time.perf_counter() - start, collapsed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    pruning = [name for name, method in METHODS.items() if method.needs_target]  # all but keep, which needs a sparse model
    parser.add_argument("--methods", default=",".join(pruning), help="comma-separated names; default: all that prune")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.9, 0.98], help="default: 0.9 0.98")
    parser.add_argument("--epochs", type=int, default=25, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()
    names = options.methods.split(",")
    for name in names:
        if name not in pruning:
            parser.error(f"unknown method {name!r}; {nearest(name, pruning)}")
    torch.set_num_threads(1)  # this network is too small for more, and on busy cores they would slow it down
    warnings.filterwarnings("ignore", "layer collapse")  # shown in the table
    console = Console()
    table = Table(title=f"Handwritten digits, {options.epochs} epochs, seed {options.seed}", title_justify="left")
    table.add_column("method")
    for sparsity in options.sparsity:
        for column in (f"accuracy at {sparsity:.1%}", "sparsity", "seconds"):
            table.add_column(column, justify="right")
    for name in names:
        cells = []
        for sparsity in options.sparsity:
            result = train(name, 0.0 if name == "dense" else sparsity, options.epochs, options.seed)
            note = f" ({result.collapsed} layers collapsed)" if result.collapsed else ""
            cells += [f"{result.accuracy:.2%}{note}", f"{result.sparsity:.2%}", f"{result.seconds:.1f}"]
        console.print(f"{name}: {', '.join(cells[::3])}", highlight=False)
        table.add_row(name, *cells)
    console.print(table)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
