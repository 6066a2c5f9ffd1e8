"""S-STE against its formula."""

import torch

from optg.methods import METHODS
from tests.toy import attach, batches, mlp, step


def soft(w: torch.Tensor) -> torch.Tensor:
    """Return w̃: the magnitude minus the second smallest of four, at least 0."""
    groups = w.view(-1, 4)
    t = groups.abs().sort(1).values[:, 1:2]
    return (groups.sign() * (groups.abs() - t).clamp(min=0)).view(w.shape)


def test_forward_sees_the_soft_weights_times_a_factor_that_stays():
    torch.manual_seed(0)
    model = mlp().double()
    before = [model[i].weight.detach().clone() for i in (1, 3)]
    optimizer, sparsifier = attach(model, method="s-ste", sparsity=None, structure="2:4")
    factors = [(w * soft(w)).sum() / soft(w).square().sum() for w in before]
    assert all(factor > 1.2 for factor in factors)  # a soft threshold shrinks every weight
    for batch in [None, *batches(20, dtype=torch.float64)]:
        if batch:
            step(model, optimizer, batch)
        for layer, w, factor in zip((1, 3), sparsifier.weights.latent, factors):
            assert torch.allclose(model[layer].weight, factor * soft(w), rtol=1e-9, atol=1e-12)


def test_without_a_structure_it_is_a_soft_threshold_per_layer():
    torch.manual_seed(0)
    model = mlp().double()
    optimizer, sparsifier = attach(model, method="s-ste", sparsity=0.75)
    step(model, optimizer, batches(1, dtype=torch.float64)[0])
    for layer, w, scale in zip((1, 3), sparsifier.weights.latent, sparsifier.method.scales):
        t = w.abs().flatten().kthvalue(-(-w.numel() * 3 // 4)).values
        assert torch.allclose(model[layer].weight, scale * w.sign() * (w.abs() - t).clamp(min=0), rtol=1e-9, atol=1e-12)


def test_every_weight_gets_the_gradient_of_the_sparse_model():
    assert METHODS["s-ste"]().theta == 1.0
    torch.manual_seed(0)
    model = mlp().double()
    optimizer, sparsifier = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "s-ste", None, structure="2:4")
    before = [w.clone() for w in sparsifier.weights.latent]
    batch = batches(1, dtype=torch.float64)[0]
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    grads = [model[i].weight.grad.clone() for i in (1, 3)]
    optimizer.step()
    for new, old, grad in zip(sparsifier.weights.latent, before, grads):
        assert torch.allclose(new, old - 0.1 * grad, rtol=1e-12, atol=1e-15)
