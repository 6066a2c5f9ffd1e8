"""Remove more and more weights at once, and compare the loss with its prediction.

    predicted   −Σ g·w over the removed weights, g being the gradient of the whole model        Eq. 4, summed
    true        L(without them) − L(with them), on the batches that g was taken on
    tuned       the same after some steps of training of what is left; the whole model is trained as long

and for one weight of them at a time, in the mean over a sample:

    alone       |L(without it) − L(with it)|, all others in place                               Eq. 7
    among       |the same|, the others removed and what is left trained on                      Eq. 8
    gap         |Eq. 8 − Eq. 7|: the error that the paper calls the independence paradox

Losses are means over the batches in float64, since one weight of a million moves a loss by less than float32 can tell. Batch
norm uses the batches' own statistics, as in training; dropout is off.
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

Masks = list[Tensor]  # True: kept
Endless = Iterator[Any]  # batches to train on


@dataclass
class Row:
    """So many weights, chosen by a criterion and removed at once."""

    criterion: str
    removed: int
    share: float  # of the weights that the model had
    loss: float  # of the whole model
    predicted: float
    true: float
    tuned: float | None
    alone: float
    among: float
    gap: float


class Subject:
    """A model, its loss and its data, with all that criteria need to know of them. The model given is left as it was."""

    def __init__(self, model: nn.Module, loss: Loss, batches: Sequence[Any]) -> None:
        if not batches:
            raise ValueError("there is no batch; expected at least one")
        self.model, self.loss = copy.deepcopy(model).double(), loss
        self.batches = [tree_map(doubled, batch) for batch in batches]
        self.names = list(find_prunable(self.model, None, ()))
        if not self.names:
            raise ValueError("the model has no prunable weight: expected a Linear, convolution or attention layer")
        self.dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)  # to train in
        self.weights = [p.detach() for p in find_prunable(self.model, None, ()).values()]
        self.before = [w.clone() for w in self.weights]
        self.present = [w != 0 for w in self.weights]
        self.size = sum(int(here.sum()) for here in self.present)
        self.gradient, self.squares = self.differentiate()
        self.whole = self.value()

    def differentiate(self) -> tuple[list[Tensor], list[Tensor]]:
        """The mean gradient, and Σ (g·w)² over the batches."""
        mean, squares = [torch.zeros_like(w) for w in self.weights], [torch.zeros_like(w) for w in self.weights]
        parameters = list(find_prunable(self.model, None, ()).values())
        with preserve_model(self.model), torch.enable_grad():
            in_training(self.model)
            for batch in self.batches:
                value = self.loss(self.model, batch)
                grads = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
                for total, square, grad, w in zip(mean, squares, grads, self.weights):
                    total.add_(grad / len(self.batches))
                    square.add_((grad * w).square())
        return mean, squares

    @torch.no_grad()
    def value(self) -> float:
        """The loss of what stands in the model now."""
        with preserve_model(self.model):
            in_training(self.model)
            return sum(float(self.loss(self.model, batch)) for batch in self.batches) / len(self.batches)

    def show(self, values: Sequence[Tensor], masks: Masks) -> None:
        for w, value, mask in zip(self.weights, values, masks):
            w.copy_(value.double().where(mask, 0.0))

    @property
    def everything(self) -> Masks:
        return [torch.ones_like(here) for here in self.present]

    def predicted(self, masks: Masks) -> float:
        """−Σ g·w over what the masks remove."""
        products = (-(g * w)[~mask].sum() for g, w, mask in zip(self.gradient, self.before, masks))
        return float(sum(products))

    def true(self, masks: Masks) -> float:
        self.show(self.before, masks)
        change = self.value() - self.whole
        self.show(self.before, self.everything)
        return change

    def trained(self, masks: Masks, batches: Endless, steps: int, lr: float) -> dict[str, Tensor]:
        """What is left under the masks, after some steps of SGD with momentum 0.9."""
        self.show(self.before, masks)
        model = copy.deepcopy(self.model).to(self.dtype)
        self.show(self.before, self.everything)
        in_training(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
        layers = list(find_prunable(model, None, ()).values())
        keep = [(mask & here) for mask, here in zip(masks, self.present)]
        with torch.enable_grad():
            for batch in itertools.islice(batches, steps):
                optimizer.zero_grad()
                self.loss(model, batch).backward()
                optimizer.step()
                with torch.no_grad():
                    for layer, mask in zip(layers, keep):
                        layer.mul_(mask)
        return {name: t.detach().double() if t.is_floating_point() else t for name, t in model.state_dict().items()}


def doubled(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def in_training(model: nn.Module) -> None:
    """As in training, but for what is random: batch norm by the batch, dropout off."""
    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train()


def measure(
    subject: Subject,
    wanted: Iterable[tuple[str, Callable[[Subject, int], Masks], int]],
    further: Callable[[], Iterable[Any]],
    *,
    steps: int,
    lr: float,
    samples: int,
    seed: int,
) -> Iterator[Row]:
    """A row for each criterion's name, criterion and count. `further` gives batches to train on, the same ones at each call."""
    state = {name: t.clone() for name, t in subject.model.state_dict().items()}

    def tuned(masks: Masks) -> dict[str, Tensor]:
        return subject.trained(masks, iter(further()), steps, lr) if steps else state

    def value(tensors: dict[str, Tensor], masks: Masks) -> float:
        """The loss of a trained state under masks."""
        subject.model.load_state_dict(tensors)
        subject.show([w.clone() for w in subject.weights], masks)
        loss = subject.value()
        subject.model.load_state_dict(state)
        return loss

    rest = value(tuned(subject.everything), subject.everything) if steps else 0.0
    for name, choose, count in wanted:
        masks = choose(subject, count)
        random = torch.Generator().manual_seed(seed)
        picked = pick(masks, samples, random)
        alone = [subject.true(without(subject.everything, [one])) for one in picked]
        others = with_(masks, picked)  # what goes before the sampled weights do
        after = tuned(others)
        gone = value(after, masks)
        among = [gone - value(after, with_(masks, [one])) for one in picked]
        yield Row(
            name, count, count / subject.size, subject.whole, subject.predicted(masks), subject.true(masks),
            value(tuned(masks), masks) - rest if steps else None, mean(map(abs, alone)), mean(map(abs, among)),
            mean(abs(a - b) for a, b in zip(among, alone)),
        )  # fmt: skip


Place = tuple[int, int]  # layer, index


def pick(masks: Masks, samples: int, random: torch.Generator) -> list[Place]:
    """Some of the removed weights."""
    sizes = [int((~mask).sum()) for mask in masks]
    chosen = (
        torch.randperm(sum(sizes), generator=random)[:samples].tolist()
        if sum(sizes) < 1 << 24
        else torch.randint(sum(sizes), (samples,), generator=random).unique().tolist()
    )
    places = []
    for number in chosen:
        layer = 0
        while number >= sizes[layer]:
            number -= sizes[layer]
            layer += 1
        places.append((layer, int((~masks[layer]).flatten().nonzero()[number])))
    return places


def without(masks: Masks, places: list[Place]) -> Masks:
    return changed(masks, places, False)


def with_(masks: Masks, places: list[Place]) -> Masks:
    return changed(masks, places, True)


def changed(masks: Masks, places: list[Place], kept: bool) -> Masks:
    out = list(masks)
    for layer in {layer for layer, _ in places}:
        out[layer] = masks[layer].clone()
        for other, index in places:
            if other == layer:
                out[layer].view(-1)[index] = kept
    return out


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
