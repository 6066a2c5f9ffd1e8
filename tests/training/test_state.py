import torch
from torch import nn

import optg
from optg.training import state


def begin() -> tuple[nn.Module, torch.optim.Optimizer, optg.Sparsifier]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return model, optimizer, optg.sparsify(model, optimizer, "optg", sparsity=0.5, epochs=2, steps_per_epoch=2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3, 6, 6)).square().sum().backward()
    optimizer.step()


def test_restored_state_has_the_memory_layout_of_the_weights() -> None:
    """Fused GPU optimizers require it, although files hold contiguous copies."""
    first = begin()
    step(*first[:2])
    tensors, values = state.gather(*first, keep=True)
    second = begin()
    state.restore(*second, {name: t.contiguous() for name, t in tensors.items()}, values)
    for p in second[0].parameters():
        assert second[1].state[p]["momentum_buffer"].stride() == p.stride()
    for name, scores in second[2].state_dict()["tensors"]["scores"].items():
        assert scores.stride() == second[0].get_parameter(name).stride()
    for model, optimizer, _ in (first, second):
        step(model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(first[0].parameters(), second[0].parameters()))
