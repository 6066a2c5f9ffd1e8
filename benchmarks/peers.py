"""Compare training steps of other pruning schemes with ours, on the same model and batch, alternating in one process.

    python benchmarks/peers.py --model resnet50

    prune       torch.nn.utils.prune: each forward multiplies every weight by its mask         against our fixed mask (SNIP)
    rigl-torch  rigl-torch 0.5.2: masks weights and gradients layer by layer (if installed)    against our RigL
    layers      masked convolutions: scores are parameters, and each forward builds the mask   against our OptG
                by indexing and multiplies the weight by it (written from the OptG paper's text)

The output has median step times, their ratio to dense training, and how many times faster our step is.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from overhead import SPARSITY, WORKLOADS, Workload, timer
from torch import Tensor, nn
from torch.nn.utils import prune

from optg.sparsifier import sparsify

LAYERS = (nn.Conv2d, nn.Linear)


class MaskedLayer(nn.Module):
    """A layer whose forward builds a mask from the indices of removed weights and multiplies the weight by it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scores = layer, nn.Parameter(torch.zeros_like(layer.weight))  # type: ignore[arg-type]
        removed = torch.randperm(self.scores.numel())[: round(SPARSITY * self.scores.numel())]
        self.register_buffer("removed", removed)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(self.scores).flatten()
        mask[self.removed] = 0.0
        straight_through = mask.view_as(self.scores) + self.scores - self.scores.detach()
        weight = self.layer.weight * straight_through
        if isinstance(self.layer, nn.Conv2d):
            return self.layer._conv_forward(x, weight, self.layer.bias)
        return nn.functional.linear(x, weight, self.layer.bias)


def replace_layers(model: nn.Module) -> nn.Module:
    for name, child in model.named_children():
        setattr(model, name, MaskedLayer(child) if isinstance(child, LAYERS) else replace_layers(child))
    return model


class Trainer:
    def __init__(self, work: Workload, scheme: str, model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
        self.model, self.data = copy.deepcopy(model), data
        device = data[0].device
        if scheme == "layers":
            self.model = replace_layers(self.model).to(device)
        if scheme == "prune":
            layers = [m for m in self.model.modules() if isinstance(m, LAYERS)]
            prune.global_unstructured([(m, "weight") for m in layers], prune.L1Unstructured, amount=SPARSITY)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4, fused=cuda)
        self.step: Callable[[], Any] = self.optimizer.step
        if scheme in ("snip", "rigl", "optg"):
            sparsifier = sparsify(
                self.model, self.optimizer, scheme, sparsity=SPARSITY, epochs=100, steps_per_epoch=work.steps_per_epoch,
                loss=lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1]), batches=[data] * 2,
            )  # fmt: skip
            if scheme == "optg":
                with torch.no_grad():
                    sparsifier.weights.cut(sparsifier.weights.random(0), SPARSITY)
                    sparsifier.weights.settle()
            self.step = self.optimizer.step
        if scheme == "rigl-torch":
            from rigl_torch.RigL import RigLScheduler

            kept, end = 1 - SPARSITY, 75 * work.steps_per_epoch
            scheduler = RigLScheduler(self.model, self.optimizer, kept, T_end=end, ignore_linear_layers=False)
            self.step = lambda: scheduler() and self.optimizer.step()
        self.time = timer(device)

    def run(self, count: int) -> float:
        return self.time(lambda: [self.once() for _ in range(count)]) / count

    def once(self) -> None:
        self.optimizer.zero_grad()
        images, labels = self.data
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet32", choices=[name for name in WORKLOADS if name != "lm"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="per scheme and round")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", help="file to append the rows to, one JSON object per line")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    work = WORKLOADS[args.model]
    model, data = work.build().to(args.device), work.data(args.device)
    data = data[0].to(memory_format=torch.channels_last), data[1]
    for peer, ours in (("prune", "snip"), ("rigl-torch", "rigl"), ("layers", "optg")):
        try:
            trainers = [Trainer(work, scheme, model, data) for scheme in ("dense", peer, ours)]
        except ImportError:
            print(f"{peer:10} is not installed")
            continue
        for trainer in trainers:
            trainer.run(3)
        rounds = [[trainer.run(args.steps) for trainer in trainers] for _ in range(args.rounds)]
        dense, theirs, own = (statistics.median(column) for column in zip(*rounds))
        row = {"model": args.model, "peer": peer, "ours": ours, "dense_ms": dense, "peer_ms": theirs, "ours_ms": own}
        faster = f"{theirs / own:.3f} × faster"
        print(
            f"{peer:10} {theirs:9.2f} ms, {theirs / dense:.3f} of dense   {ours:5} {own:9.2f} ms, {own / dense:.3f}   {faster}",
            flush=True,
        )
        if args.output:
            with open(args.output, "a") as file:
                file.write(json.dumps(row) + "\n")
        del trainers


if __name__ == "__main__":
    main()
