"""Check two claims of docs/phoenix.md on the bundled digits, on a CPU in about a minute:

1. Under straight-through SGD, w²/2 of a latent weight accumulates OptG's criterion, Σ −η·g·w.
2. Removed weights come back with the other sign, and the model uses them.

    python benchmarks/latent_magnitude.py
"""

import argparse

import torch
from torch import Tensor, nn

import optg
from optg.data import digits
from optg.methods import DPF, Method, OptG, Phoenix
from optg.models import build

BATCH = 64


def batches(images: Tensor, labels: Tensor, epochs: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for part in torch.randperm(len(images), generator=generator).split(BATCH)[:-1]:
            yield images[part], labels[part]


def spearman(a: Tensor, b: Tensor) -> float:
    """Return the rank correlation."""
    ranks = torch.stack([t.argsort().argsort().double() for t in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def accumulate(
    train: tuple[Tensor, Tensor], epochs: int, lr: float, momentum: float, decay: float, seed: int
) -> dict[str, float]:
    """Train with straight-through gradients and a hard mask; compare the growth of w²/2 with OptG's accumulated criterion."""
    torch.manual_seed(seed)
    model = build("digits", 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
    sparsifier = optg.sparsify(model, optimizer, DPF(), sparsity=0.9, steps=epochs * (len(train[0]) // BATCH))
    first = [w.clone() for w in sparsifier.weights.latent]
    scores = [torch.zeros_like(w) for w in first]
    dormant = [torch.zeros_like(w) for w in first]
    for x, y in batches(*train, epochs, seed):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for score, p, w in zip(scores, sparsifier.weights.parameters, sparsifier.weights.latent):
            score -= lr * p.grad * w
        optimizer.step()
        for steps, mask in zip(dormant, sparsifier.weights.masks):
            steps += ~mask
    growth, score, old, slept = (
        torch.cat([t.flatten() for t in tensors])
        for tensors in ([(w**2 - f**2) / 2 for w, f in zip(sparsifier.weights.latent, first)], scores, first, dormant)
    )
    chosen = slept > slept.max() / 2
    return {
        "rank correlation": spearman(growth, score),
        "of weights dormant for half of the time": spearman(growth[chosen], score[chosen]),
        "of w² itself": spearman(growth + old**2 / 2, score),
    }


def returns(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], method: Method, epochs: int, seed: int
) -> dict[str, float]:
    """Train; then zero the kept weights that once were removed and came back with the other sign, and as many other ones."""
    torch.manual_seed(seed)
    model = build("digits", 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=2e-3)
    total = epochs * (len(train[0]) // BATCH)
    sparsifier = optg.sparsify(model, optimizer, method, sparsity=0.98, steps=total)
    weights = sparsifier.weights
    before = [m.clone() for m in weights.masks]
    signs = [w.sign() for w in weights.latent]  # with which each weight was last kept
    turned = [torch.zeros_like(m) for m in weights.masks]
    revivals = turns = 0
    for step, (x, y) in enumerate(batches(*train, epochs, seed)):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 + torch.cos(torch.tensor(torch.pi * max(2 * step / total - 1, 0.0)))).item() / 2
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        for mask, old, sign, w, back in zip(weights.masks, before, signs, weights.latent, turned):
            now, revived = w.sign(), mask & ~old
            revivals += int(revived.sum())
            turns += int((revived & (now != sign)).sum())
            back.copy_(torch.where(revived, now != sign, back & mask))
            sign.copy_(torch.where(mask, now, sign))
            old.copy_(mask)
    sparsifier.finish()
    model.eval()
    loss = loss_of(model, test)
    count, kept = sum(int(t.sum()) for t in turned), sum(int(m.sum()) for m in weights.masks)
    generator = torch.Generator().manual_seed(seed)
    without, control = loss_without(model, weights.values, turned, test), []
    for _ in range(10):  # as many other kept weights of every layer, chosen at random
        chosen = [pick(v, t, generator) for v, t in zip(weights.values, turned)]
        control.append(loss_without(model, weights.values, chosen, test))
    rise = {"loss": loss, "without them": without, "without as many others": sum(control) / len(control)}
    return {"revivals": revivals, "with the other sign": turns, "kept": kept, "of these with the other sign": count} | rise


def pick(values: Tensor, turned: Tensor, generator: torch.Generator) -> Tensor:
    """Choose as many other kept weights at random."""
    others = ((values != 0) & ~turned).flatten().nonzero().flatten()
    chosen = torch.zeros_like(turned).flatten()
    chosen[others[torch.randperm(len(others), generator=generator)[: int(turned.sum())]]] = True
    return chosen.view_as(turned)


@torch.no_grad()
def loss_of(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    return float(nn.functional.cross_entropy(model(test[0]), test[1]))


@torch.no_grad()
def loss_without(model: nn.Module, values: list[Tensor], where: list[Tensor], test: tuple[Tensor, Tensor]) -> float:
    """Return the loss with some weights set to 0."""
    saved = [v.clone() for v in values]
    for value, mask in zip(values, where):
        value.masked_fill_(mask, 0.0)
    loss = loss_of(model, test)
    for value, old in zip(values, saved):
        value.copy_(old)
    return loss


def show(title: str, numbers: dict[str, float]) -> None:
    print(
        f"{title}: " + ", ".join(f"{key} {value:.3f}" if value % 1 else f"{key} {value:,.0f}" for key, value in numbers.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, test = digits.load()
    for lr, momentum, decay in ((0.05, 0.0, 0.0), (0.5, 0.0, 0.0), (0.05, 0.9, 0.0), (0.05, 0.9, 2e-3)):
        found = accumulate(train, options.epochs, lr, momentum, decay, options.seed)
        show(f"SGD, lr {lr}, momentum {momentum}, weight decay {decay}", found)
    for name, method in (("phoenix", Phoenix(reopen=0.0)), ("phoenix without HAM", Phoenix(ham=0.0)), ("optg", OptG())):
        show(name, returns(train, test, method, options.epochs, options.seed))


if __name__ == "__main__":
    main()
