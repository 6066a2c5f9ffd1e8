"""One optimizer step: eager, or replayed from a CUDA graph, which saves the CPU about a thousand kernel launches."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from optg.sparsifier import Sparsifier
from optg.training.parallel import Parallel
from optg.training.recipe import Recipe

WARMUP_STEPS = 8  # eager steps before the graph is captured: libraries choose their kernels, the optimizer creates its state


class TrainStep:
    """Train on one batch at the given learning rate, and return the loss without waiting for it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sparsifier: Sparsifier,
        criterion: Callable[[Tensor, Tensor], Tensor],
        recipe: Recipe,
        parallel: Parallel,
    ) -> None:
        self.model, self.optimizer, self.sparsifier = model, optimizer, sparsifier
        self.criterion, self.recipe = criterion, recipe
        self.use_graph = recipe.graph and parallel.device.type == "cuda" and parallel.world == 1
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0

    def __call__(self, images: Tensor, labels: Tensor, rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.calls += 1
        images = images.contiguous(memory_format=torch.channels_last if self.recipe.channels_last else torch.contiguous_format)
        if not self.use_graph or self.calls <= WARMUP_STEPS or not self.sparsifier.capturable:
            return self.eager(images, labels)
        if self.graph is None:
            self.capture(images, labels)
        assert self.graph is not None
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.graph.replay()
        self.sparsifier.advance()
        return self.loss.clone()

    def call(self, model: nn.Module) -> None:
        """Train another form of the model, with the same Parameters, from now on: eagerly."""
        self.model, self.use_graph, self.graph = model, False, None

    def eager(self, images: Tensor, labels: Tensor) -> Tensor:
        """Run the step without a graph."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=images.device)
        for x, y in zip(images.chunk(self.recipe.accumulate), labels.chunk(self.recipe.accumulate)):
            with torch.autocast(
                x.device.type, torch.bfloat16, enabled=self.recipe.precision == "bfloat16", cache_enabled=False
            ):
                loss = self.criterion(self.model(x), y) * (len(x) / len(images))  # parts may differ in size
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        return total

    def capture(self, images: Tensor, labels: Tensor) -> None:
        """Record a step on fixed input buffers. Recording executes nothing; each replay is one step."""
        self.images, self.labels = images.clone(), labels.clone()
        self.optimizer.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.eager(self.images, self.labels)
