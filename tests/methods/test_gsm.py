"""GSM on literal numbers and against plain autograd."""

import math

import torch
from torch import nn

import optg
from tests.toy import batches, convnet, step

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}


def test_only_weights_with_the_largest_products_receive_their_gradient():
    model = nn.Linear(4, 1, bias=False).double()
    model.weight.data.copy_(torch.tensor([[1.0, -2.0, 3.0, 0.5]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.1)
    optg.sparsify(model, optimizer, "gsm", sparsity=0.5, epochs=1, steps_per_epoch=9)
    model(torch.tensor([1.0, 0.1, -1.0, 4.0]).double()).backward()
    optimizer.step()
    # |g·w| = 1, 0.2, 3, 2: the third and fourth learn, the others only decay. Momentum = 0.1, −0.2, −1 + 0.3, 4 + 0.05
    w = [1 - 0.01, -2 + 0.02, 3 + 0.07, 0.5 - 0.405]
    torch.testing.assert_close(model.weight.data, torch.tensor([w]).double())
    optimizer.zero_grad()
    model(torch.tensor([5.0, 0.0, 1.0, 0.0]).double()).backward()
    optimizer.step()
    # |g·w| = 4.95, 0, 3.07, 0: now the first and third. Momentum = 0.5 · momentum + 0.1 w + g
    m = [0.05 + 0.1 * w[0] + 5, -0.1 + 0.1 * w[1], -0.35 + 0.1 * w[2] + 1, 2.025 + 0.1 * w[3]]
    torch.testing.assert_close(model.weight.data, torch.tensor([[a - 0.1 * b for a, b in zip(w, m)]]).double())


def test_products_of_all_layers_are_ranked_together():
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False))
    for layer, weight in zip(model, [[1.0, 2.0], [3.0, 4.0]]):
        layer.weight.data.copy_(torch.tensor([weight]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optg.sparsify(model, optimizer, "gsm", sparsity=0.5, epochs=1, steps_per_epoch=9)
    model[0].weight.grad = torch.tensor([[9.0, 1.0]])  # products 9 and 2
    model[1].weight.grad = torch.tensor([[0.5, -1.0]])  # products 1.5 and 4
    optimizer.step()
    assert [layer.weight.tolist() for layer in model] == [[[-8.0, 2.0]], [[3.0, 5.0]]]


def test_training_is_dense_and_the_last_step_removes_the_smallest_magnitudes():
    """A whole run against plain autograd."""
    torch.manual_seed(0)
    plain = convnet().double()
    torch.manual_seed(0)
    model = convnet().double()
    optimizer, plain_optimizer = (torch.optim.SGD(m.parameters(), **SGD) for m in (model, plain))
    sparsifier = optg.sparsify(model, optimizer, "gsm", sparsity=0.9, epochs=3, steps_per_epoch=4)
    layers = [plain.get_parameter(name) for name in sparsifier.masks]
    size = sum(p.numel() for p in layers)

    def kept(values):
        """Return masks of the (1 − 0.9)·N largest values of all layers."""
        least_kept = torch.cat([v.flatten() for v in values]).sort(descending=True).values[size - math.ceil(0.9 * size) - 1]
        return [v >= least_kept for v in values]

    for t, (x, y) in enumerate(batches(12, dtype=torch.float64), 1):
        assert sparsifier.sparsity == 0.0 and all(mask.all() for mask in sparsifier.masks.values())
        plain_optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        for p, learns in zip(layers, kept([(p.grad * p.detach()).abs() for p in layers])):
            p.grad.mul_(learns)
        plain_optimizer.step()
        step(model, optimizer, (x, y))
        if t < 12:
            for a, b in zip(model.parameters(), plain.parameters()):
                assert torch.allclose(a, b, rtol=0, atol=1e-12)
    masks = kept([p.detach().abs() for p in layers])
    for (name, mask), p, expected in zip(sparsifier.masks.items(), layers, masks, strict=True):
        assert torch.equal(mask, expected)
        assert torch.allclose(model.get_parameter(name), p * expected, rtol=0, atol=1e-12)
    assert sum(int((~mask).sum()) for mask in masks) == 1736  # ⌈0.9 · 1928⌉
