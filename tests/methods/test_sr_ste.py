"""SR-STE against plain autograd."""

import torch

from tests.toy import attach, batches, entropy, mlp, step


def test_training_equals_the_rule_in_plain_autograd():
    """Forward keeps the 2 largest of 4. All weights get its gradient, removed ones λ·w more. Then SGD takes its step."""
    torch.manual_seed(0)
    model, plain = mlp().double(), mlp().double()
    plain.load_state_dict(model.state_dict())
    optimizer, sparsifier = attach(model, method="sr-ste", sparsity=None, structure="2:4")
    latent = [plain[i].weight.detach().clone() for i in (1, 3)]
    momenta = [torch.zeros_like(w) for w in latent]
    for batch in batches(20, dtype=torch.float64):
        step(model, optimizer, batch)
        masks = [two_of_four(w) for w in latent]
        for layer, w, mask in zip((1, 3), latent, masks):
            plain[layer].weight.data = w * mask
        plain.zero_grad()
        entropy(plain, batch).backward()
        for layer, w, mask, momentum in zip((1, 3), latent, masks, momenta):
            g = plain[layer].weight.grad + 2e-4 * (1 - mask.double()) * w + 1e-2 * w
            momentum.mul_(0.9).add_(g)
            w.sub_(0.05 * momentum)
    for layer, w in zip((1, 3), latent):
        assert torch.allclose(model[layer].weight, w * two_of_four(w), rtol=1e-10, atol=1e-14)
    for mine, w in zip(sparsifier.weights.latent, latent):
        assert torch.allclose(mine, w, rtol=1e-10, atol=1e-14)


def two_of_four(w: torch.Tensor) -> torch.Tensor:
    groups = w.abs().view(-1, 4)
    return (groups >= groups.sort(1).values[:, 2:3]).view(w.shape)
