"""Measure the overhead of methods: time of a training step relative to dense training, with the amortised time of cuts.

    python benchmarks/overhead.py --model resnet50 --mode eager compiled
    python benchmarks/overhead.py --model vgg19 --mode graph --methods optg rigl

All methods train the same model in one process and alternate with dense training every few steps, so that both see the same
clock rates, memory and kernels. The cost of a cut is the extra time of the steps around it, divided by the number of steps
between two cuts. The output has medians, the quartiles of the ratio over the rounds, and the memory that a method adds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optg import models
from optg.core.clock import Clock
from optg.methods import METHODS
from optg.sparsifier import Sparsifier, sparsify
from optg.training.parallel import Parallel
from optg.training.recipe import Recipe
from optg.training.step import WARMUP_STEPS, TrainStep

EPOCHS, SPARSITY = 100, 0.9


class LanguageModel(nn.Module):
    """GPT-2 small with untied embeddings: 85M weights in 12 blocks of width 768."""

    def __init__(self, classes: int = 1024) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(classes, 768), nn.Parameter(torch.zeros(512, 768))
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(768, classes, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device, torch.float32)
        return self.head(self.blocks(self.tokens(tokens) + self.positions, causal, is_causal=True)).flatten(0, 1)


@dataclass
class Workload:
    """A model and the shape of its batches."""

    batch: int
    steps_per_epoch: int
    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 32, 32)
    classes: int = 10

    def data(self, device: str) -> tuple[Tensor, Tensor]:
        if len(self.shape) == 1:
            tokens = torch.randint(self.classes, (self.batch, *self.shape), device=device)
            return tokens, tokens.flatten()
        return torch.randn(self.batch, *self.shape, device=device), torch.randint(self.classes, (self.batch,), device=device)


def image_workload(name: str, batch: int, steps: int, size: int, classes: int) -> Workload:
    return Workload(batch, steps, lambda: models.build(name, classes), (3, size, size), classes)


WORKLOADS = {
    "resnet50": image_workload("resnet50", 256, 5004, 224, 1000),
    "vit_s": image_workload("vit_s", 256, 5004, 224, 1000),
    "vgg19": image_workload("vgg19", 128, 390, 32, 10),
    "resnet32": image_workload("resnet32", 128, 390, 32, 10),
    "lm": Workload(16, 5000, LanguageModel, (512,), 1024),
}


class Trainer:
    """Training steps of one method, or of dense training, on the shared model."""

    def __init__(
        self, method: str, work: Workload, model: nn.Module, forward: Any, data: tuple[Tensor, Tensor], mode: str
    ) -> None:
        device = data[0].device
        cuda = device.type == "cuda"
        self.data, self.work = data, work
        rate = torch.tensor(1e-4, device=device) if cuda else 1e-4
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4, fused=cuda)
        kind, prunes = METHODS[method], METHODS[method].when != "never"
        batches = [(images[:16], labels[: 16 * len(data[1]) // len(data[0])]) for images, labels in [data] * 200]
        before = torch.cuda.memory_allocated() if cuda else 0
        self.sparsifier: Sparsifier = sparsify(
            model, optimizer, kind(), sparsity=SPARSITY if prunes else 0.0, epochs=EPOCHS, steps_per_epoch=work.steps_per_epoch,
            loss=lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1]), batches=batches,
        )  # fmt: skip
        self.memory = torch.cuda.memory_allocated() - before if cuda else 0
        clock, weights = self.sparsifier.clock, self.sparsifier.weights
        clock.step = round(0.6 * clock.total) + 7  # in the middle of training
        with torch.no_grad():
            weights.show_latent()
            # Start from the mask that the method would have by this step.
            if prunes and kind.when != "after" and not weights.sparsity:
                random = weights.random(0)
                weights.cut([r.to(weights.state_dtype) for r in random], SPARSITY)
            weights.settle()
        if method == "dense":
            self.sparsifier.finish()
        recipe = Recipe(
            precision="bfloat16" if cuda else "float32", channels_last=len(work.shape) == 3, graph=mode == "graph",
            batch_size=work.batch, compile=False,
        )  # fmt: skip
        self.step = TrainStep(forward, optimizer, self.sparsifier, nn.CrossEntropyLoss(), recipe, Parallel(device=device))
        self.time = timer(device)

    def run(self, count: int) -> float:
        """Return milliseconds per step."""
        return self.time(lambda: [self.step(*self.data, 1e-4) for _ in range(count)]) / count

    def due(self, step: int) -> bool:
        return self.sparsifier.method.due(Clock(EPOCHS, self.work.steps_per_epoch, step))

    def cut(self) -> tuple[float, float]:
        """Return milliseconds of the two steps around a cut, and the number of cuts per training step."""
        clock, method = self.sparsifier.clock, self.sparsifier.method
        now, last = clock.step, int(0.74 * clock.total)
        found = [step for step in range(now + 2, last) if self.due(step)] if method.when == "during" else []
        if not found or len(found) == last - now - 2:  # no step cuts, or every step does
            return 0.0, 0.0
        times = []
        for step in found[:3]:
            clock.step = step - 1
            times.append(2 * self.run(2))  # RigL cuts one step later
        clock.step = now
        return statistics.median(times), len(found) / (last - now - 2)


def timer(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    def on_gpu(work: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def on_cpu(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3

    return on_gpu if device.type == "cuda" else on_cpu


def measure(name: str, mode: str, methods: Sequence[str], rounds: int, steps: int, device: str) -> list[dict[str, Any]]:
    work = WORKLOADS[name]
    torch.manual_seed(0)
    model, data = work.build().to(device), work.data(device)
    if len(work.shape) == 3:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    forward = model if mode == "eager" else torch.compile(model)
    dense = Trainer("dense", work, model, forward, data, mode)
    dense.run(WARMUP_STEPS + 3)
    rows, fresh = [], {name: t.clone() for name, t in model.state_dict().items()}
    for method in methods:
        model.load_state_dict(fresh)  # the zeros of the previous method would all tie
        other = Trainer(method, work, model, forward, data, mode)
        other.run(WARMUP_STEPS + 3)
        pairs = [(dense.run(steps), other.run(steps)) for _ in range(rounds)]
        base, own = (statistics.median(column) for column in zip(*pairs))
        around, share = other.cut()
        extra = max(around - 2 * own, 0.0) * share
        ratios = statistics.quantiles([b / a for a, b in pairs], n=4)
        rows.append(
            {
                "model": name, "mode": mode, "method": method, "dense_ms": base, "step_ms": own, "cut_ms": around - 2 * own,
                "cuts_per_step": share, "ratio": (own + extra) / base, "quartiles": [ratios[0], ratios[2]],
                "memory_MB": other.memory / 1e6,
            }
        )  # fmt: skip
        step = f"dense {base:8.3f} ms  step {own:8.3f} ms  cut {max(around - 2 * own, 0):7.2f} ms × {share:.4f}"
        spread = f"ratio {rows[-1]['ratio']:.4f}  ({ratios[0]:.4f} – {ratios[2]:.4f})  + {other.memory / 1e6:.0f} MB"
        print(f"{name:9} {mode:8} {method:10} {step}  {spread}", flush=True)
        other.sparsifier.finish()
        del other
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["resnet32"], choices=WORKLOADS)
    parser.add_argument("--mode", nargs="+", default=["eager"], choices=["eager", "compiled", "graph"])
    parser.add_argument("--methods", nargs="+", default=["optg"], choices=METHODS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="per method and round")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", help="file to append the rows to, one JSON object per line")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows = []
    for model in args.model:
        for mode in args.mode:
            rows += measure(model, mode, args.methods, args.rounds, args.steps, args.device)
            torch.compiler.reset()
    if args.output:
        with open(args.output, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
