"""DNW against plain autograd."""

import torch
from torch import nn

import optg
from optg.methods import DNW
from tests.toy import batches, convnet, step

TOTAL = 16
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}
# At 90 %, 192 of 72 + 576 + 1280 weights are kept: 7.17, 57.36 and 127.47. The largest remainder is rounded up.
ZEROS = {"0.weight": 72 - 7, "4.weight": 576 - 57, "7.weight": 1280 - 128}


def mask_of_largest(weight, zeros):
    kept = torch.ones(weight.numel(), dtype=weight.dtype)
    kept[weight.detach().abs().flatten().argsort()[:zeros]] = 0
    return kept.view_as(weight)


def oracle(model):
    """Run DNW in plain autograd. Yield masks and latent weights before the first step and after each."""
    latent = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(latent.values(), **SGD)
    masks = {n: mask_of_largest(latent[n], zeros) for n, zeros in ZEROS.items()}
    yield masks, latent
    for x, y in batches(TOTAL, dtype=torch.float64):
        seen = {n: w + (w * masks[n] - w).detach() if n in masks else w for n, w in latent.items()}
        optimizer.zero_grad()
        nn.functional.cross_entropy(torch.func.functional_call(model, seen, x), y).backward()
        optimizer.step()
        masks = {n: mask_of_largest(latent[n], zeros) for n, zeros in ZEROS.items()}
        yield masks, latent


def test_equals_the_oracle_at_every_step():
    torch.manual_seed(0)
    reference = convnet().double()
    torch.manual_seed(0)
    model = convnet().double()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    sparsifier = optg.sparsify(model, optimizer, "dnw", sparsity=0.9, epochs=4, steps_per_epoch=4)
    expected = oracle(reference)
    revived, before = 0, None
    for batch in [None, *batches(TOTAL, dtype=torch.float64)]:
        if batch is not None:
            step(model, optimizer, batch)
        masks, latent = next(expected)
        now = dict(zip(ZEROS, sparsifier.weights.latent))
        for n, p in model.named_parameters():
            assert torch.allclose(now.get(n, p), latent[n], rtol=0, atol=1e-12)
            if n in masks:
                assert torch.equal(sparsifier.masks[n], masks[n].bool())
                assert torch.allclose(p, latent[n] * masks[n], rtol=0, atol=1e-12)
                assert int((~sparsifier.masks[n]).sum()) == ZEROS[n]
                revived += 0 if before is None else int((masks[n] > before[n]).sum())
        before = masks
    assert revived > 100  # the masks do change


def test_removed_weights_receive_the_whole_gradient_and_decay():
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.copy_(torch.tensor([[4.0, 3.0, 2.0, 1.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    sparsifier = optg.sparsify(model, optimizer, DNW(), sparsity=0.5, epochs=1, steps_per_epoch=5)
    assert model.weight.tolist() == [[4.0, 3.0, 0.0, 0.0]]
    model(torch.tensor([1.0, 1.0, -16.0, 1.0])).backward()
    optimizer.step()
    # w − 0.1 · (g + 0.5 w): 3.7, 2.75, 3.5, 0.85
    torch.testing.assert_close(sparsifier.weights.latent[0], torch.tensor([[3.7, 2.75, 3.5, 0.85]]))
    torch.testing.assert_close(model.weight.data, torch.tensor([[3.7, 0.0, 3.5, 0.0]]))
