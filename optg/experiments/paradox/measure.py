"""Remove more and more weights at once, and compare the change of the loss with its prediction.

For all removed weights together:

    predicted   −Σ g·w over the removed weights, where g is the gradient of the whole model      Eq. 4, summed
    true        L(without them) − L(with them), on the batches that g was computed on
    tuned       the same after training the remaining weights for some steps; the whole model is trained for as many

For one of them at a time, averaged over a sample:

    alone       |L(without it) − L(with it)|, with all others in place                           Eq. 7
    among       the same, with the others removed and the remaining weights trained              Eq. 8
    gap         |Eq. 8 − Eq. 7|: the error that the paper calls the independence paradox

Losses are float64 means over the batches, because one weight in a million changes a loss by less than float32 resolves. Batch
norm uses the statistics of the batch, as in training; dropout is off.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from optg.core.preserve import preserve_model
from optg.core.probe import Loss
from optg.core.prunable import find_prunable

Masks = list[Tensor]  # one for each layer; True: kept
WeightIndex = tuple[int, int]  # layer, and index into its flattened weights


@dataclass
class Row:
    """The effect of removing the weights that a criterion chose."""

    criterion: str
    removed: int
    share: float  # removed / number of nonzero weights
    loss: float  # before weights are removed
    predicted: float
    true: float
    tuned: float | None
    alone: float
    among: float
    gap: float


class MeasuredModel:
    """A model, its loss function and batches, with what the criteria need. Works on a float64 copy of the model."""

    def __init__(self, model: nn.Module, loss: Loss, batches: Sequence[Any]) -> None:
        if not batches:
            raise ValueError("there is no batch; expected at least one")
        self.model, self.loss = copy.deepcopy(model).double(), loss
        self.batches = [tree_map(to_double, batch) for batch in batches]
        self.names = list(find_prunable(self.model, None, ()))
        if not self.names:
            raise ValueError("the model has no prunable weight; expected a Linear, convolution or attention layer")
        self.training_dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        self.weights = [p.detach() for p in find_prunable(self.model, None, ()).values()]
        self.original = [w.clone() for w in self.weights]
        self.nonzero = [w != 0 for w in self.weights]
        self.size = sum(int(mask.sum()) for mask in self.nonzero)
        self.gradient, self.squares = self.differentiate()
        self.original_loss = self.current_loss()

    def differentiate(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the mean gradient, and Σ (g·w)² over the batches."""
        mean, squares = [torch.zeros_like(w) for w in self.weights], [torch.zeros_like(w) for w in self.weights]
        parameters = list(find_prunable(self.model, None, ()).values())
        with preserve_model(self.model), torch.enable_grad():
            set_deterministic_training(self.model)
            for batch in self.batches:
                value = self.loss(self.model, batch)
                grads = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
                for total, square, grad, w in zip(mean, squares, grads, self.weights):
                    total.add_(grad / len(self.batches))
                    square.add_((grad * w).square())
        return mean, squares

    @torch.no_grad()
    def current_loss(self) -> float:
        """Return the mean loss of the model with its current weights."""
        with preserve_model(self.model):
            set_deterministic_training(self.model)
            return sum(float(self.loss(self.model, batch)) for batch in self.batches) / len(self.batches)

    def set_weights(self, values: Sequence[Tensor], masks: Masks) -> None:
        for w, value, mask in zip(self.weights, values, masks):
            w.copy_(value.double().where(mask, 0.0))

    @property
    def all_kept(self) -> Masks:
        return [torch.ones_like(mask) for mask in self.nonzero]

    def predicted_change(self, masks: Masks) -> float:
        """Return −Σ g·w over the removed weights."""
        products = (-(g * w)[~mask].sum() for g, w, mask in zip(self.gradient, self.original, masks))
        return float(sum(products))

    def true_change(self, masks: Masks) -> float:
        """Return how the loss changes if the weights are removed."""
        self.set_weights(self.original, masks)
        change = self.current_loss() - self.original_loss
        self.set_weights(self.original, self.all_kept)
        return change

    def train_kept(self, masks: Masks, batches: Iterator[Any], steps: int, lr: float) -> dict[str, Tensor]:
        """Return the state of the masked model after some steps of SGD with momentum 0.9."""
        self.set_weights(self.original, masks)
        model = copy.deepcopy(self.model).to(self.training_dtype)
        self.set_weights(self.original, self.all_kept)
        set_deterministic_training(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
        layers = list(find_prunable(model, None, ()).values())
        kept = [mask & nonzero for mask, nonzero in zip(masks, self.nonzero)]
        with torch.enable_grad():
            for batch in itertools.islice(batches, steps):
                optimizer.zero_grad()
                self.loss(model, batch).backward()
                optimizer.step()
                with torch.no_grad():
                    for layer, mask in zip(layers, kept):
                        layer.mul_(mask)
        return {name: t.detach().double() if t.is_floating_point() else t for name, t in model.state_dict().items()}


def to_double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def set_deterministic_training(model: nn.Module) -> None:
    """Switch batch norm to the statistics of the batch, as in training, and everything else (dropout) to evaluation."""
    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train()


def measure(
    subject: MeasuredModel,
    wanted: Iterable[tuple[str, Callable[[MeasuredModel, int], Masks], int]],
    training_batches: Callable[[], Iterable[Any]],
    *,
    steps: int,
    lr: float,
    samples: int,
    seed: int,
) -> Iterator[Row]:
    """Yield a row for each (name, criterion, count). `training_batches` must return the same batches at each call."""
    original_state = {name: t.clone() for name, t in subject.model.state_dict().items()}

    def train(masks: Masks) -> dict[str, Tensor]:
        return subject.train_kept(masks, iter(training_batches()), steps, lr) if steps else original_state

    def loss_of(state: dict[str, Tensor], masks: Masks) -> float:
        subject.model.load_state_dict(state)
        subject.set_weights([w.clone() for w in subject.weights], masks)
        loss = subject.current_loss()
        subject.model.load_state_dict(original_state)
        return loss

    whole_trained = loss_of(train(subject.all_kept), subject.all_kept) if steps else 0.0
    for name, criterion, count in wanted:
        masks = criterion(subject, count)
        sample = sample_removed(masks, samples, torch.Generator().manual_seed(seed))
        alone = [subject.true_change(with_mask(subject.all_kept, [one], False)) for one in sample]
        state = train(with_mask(masks, sample, True))  # all removed weights except the sampled ones are gone
        without_all = loss_of(state, masks)
        among = [without_all - loss_of(state, with_mask(masks, [one], True)) for one in sample]
        yield Row(
            criterion=name,
            removed=count,
            share=count / subject.size,
            loss=subject.original_loss,
            predicted=subject.predicted_change(masks),
            true=subject.true_change(masks),
            tuned=loss_of(train(masks), masks) - whole_trained if steps else None,
            alone=mean(map(abs, alone)),
            among=mean(map(abs, among)),
            gap=mean(abs(a - b) for a, b in zip(among, alone)),
        )


def sample_removed(masks: Masks, samples: int, generator: torch.Generator) -> list[WeightIndex]:
    """Return the indices of some removed weights."""
    sizes = [int((~mask).sum()) for mask in masks]
    chosen = (
        torch.randperm(sum(sizes), generator=generator)[:samples].tolist()
        if sum(sizes) < 1 << 24
        else torch.randint(sum(sizes), (samples,), generator=generator).unique().tolist()
    )
    indices = []
    for number in chosen:
        layer = 0
        while number >= sizes[layer]:
            number -= sizes[layer]
            layer += 1
        indices.append((layer, int((~masks[layer]).flatten().nonzero()[number])))
    return indices


def with_mask(masks: Masks, indices: list[WeightIndex], kept: bool) -> Masks:
    """Return a copy of the masks in which some weights are kept, or removed."""
    changed = list(masks)
    for layer in {layer for layer, _ in indices}:
        changed[layer] = masks[layer].clone()
        for other, index in indices:
            if other == layer:
                changed[layer].view(-1)[index] = kept
    return changed


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
