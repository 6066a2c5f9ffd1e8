"""AC/DC: its phases, and training against a plain loop."""

import math

import torch
from torch import nn

import optg
from optg.core.clock import Clock
from optg.methods import ACDC
from tests.toy import batches, convnet, sgd, sparse_convnet, step

METHOD = ACDC(start=0.1, phase=0.1, final=0.3, spare_neurons=False)
TABLE = "dd ss dd ss dd ss dd ssssss".replace(" ", "")  # the phase of each of 20 steps: dense or sparse


def phases(method: ACDC, steps: int) -> str:
    clock = Clock(1, steps)
    table = ""
    for clock.step in range(steps):
        table += "s" if method.sparse(clock) else "d"
    return table


def test_phases_follow_the_options():
    assert phases(METHOD, 20) == TABLE
    assert phases(ACDC(start=0.3, phase=0.2, final=0.3), 10) == "dddssddsss"
    assert phases(ACDC(), 40).startswith("dddd" + "ssdd" * 6) and phases(ACDC(), 40).endswith("ssssss")


def test_each_step_runs_on_the_model_of_its_phase():
    model, optimizer, sparsifier = sparse_convnet(METHOD, dtype=torch.float64)
    for phase, batch in zip(TABLE, batches(20, dtype=torch.float64), strict=True):
        zeros = sum(int((~mask).sum()) for mask in sparsifier.masks.values())
        assert zeros == {"s": 1736, "d": 0}[phase]  # ⌈0.9 · 1928⌉
        step(model, optimizer, batch)
    assert sparsifier.sparsity == 1736 / 1928


def test_equals_a_plain_loop_with_cuts_and_revivals():
    """Before a sparse phase the smallest magnitudes are cut; after it all weights are revived, with value and momentum 0."""
    model, optimizer, sparsifier = sparse_convnet(METHOD, dtype=torch.float64)
    torch.manual_seed(0)
    plain = convnet().double()
    plain_optimizer = sgd(plain.parameters())
    layers = [plain.get_parameter(name) for name in sparsifier.masks]
    masks = [torch.ones_like(p) for p in layers]
    cuts = revivals = 0
    for t, (x, y) in enumerate(batches(20, dtype=torch.float64)):
        if TABLE[t] == "s" and TABLE[t - 1] == "d":
            magnitudes = torch.cat([p.detach().abs().flatten() for p in layers])
            threshold = magnitudes.sort().values[math.ceil(0.9 * len(magnitudes)) - 1]
            masks = [(p.detach().abs() > threshold).double() for p in layers]
            for p, mask in zip(layers, masks):
                p.data.mul_(mask)
            cuts += 1
        elif TABLE[t] == "d" and t > 0 and TABLE[t - 1] == "s":
            for p, mask in zip(layers, masks):
                plain_optimizer.state[p]["momentum_buffer"].mul_(mask)
            masks = [torch.ones_like(p) for p in layers]
            revivals += 1
        for (name, ours), p, mask in zip(sparsifier.masks.items(), layers, masks):
            assert torch.equal(ours, mask.bool())  # the mask does not change within a sparse phase
            assert torch.allclose(model.get_parameter(name), p, rtol=0, atol=1e-12)
        step(model, optimizer, (x, y))
        plain_optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        for p, mask in zip(layers, masks):
            p.grad.mul_(mask)
        plain_optimizer.step()
        for p, mask in zip(layers, masks):
            p.data.mul_(mask)
    for a, b in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    assert (cuts, revivals) == (4, 3)


def test_revived_weights_start_at_0_without_momentum_and_kept_ones_keep_theirs():
    model, optimizer, sparsifier = sparse_convnet(METHOD, dtype=torch.float64)
    for batch in batches(3, dtype=torch.float64):
        step(model, optimizer, batch)
    masks = {name: mask.clone() for name, mask in sparsifier.masks.items()}
    step(model, optimizer, batches(1, seed=1, dtype=torch.float64)[0])
    for name, before in masks.items():
        p = model.get_parameter(name)
        momentum = optimizer.state[p]["momentum_buffer"]
        assert sparsifier.masks[name].all() and not before.all()
        assert not p[~before].any() and not momentum[~before].any()
        assert p[before].all() and momentum[before].all()


def test_a_mask_is_fixed_within_its_phase():
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.copy_(torch.tensor([[1.0, 4.0, 3.0, 2.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = optg.sparsify(model, optimizer, METHOD, sparsity=0.5, epochs=1, steps_per_epoch=20)
    for phase in "dds":
        assert sparsifier.masks["weight"].tolist() == [[True] * 4 if phase == "d" else [False, True, True, False]]
        model.weight.data.mul_(phase == "d")  # zeroes kept weights in the sparse phase: a second cut would remove others
        model.weight.grad = torch.zeros(1, 4)
        optimizer.step()
    assert sparsifier.masks["weight"].tolist() == [[False, True, True, False]]


def test_phases_scale_with_the_length_of_training():
    for times in range(1, 20):
        assert phases(METHOD, 20 * times) == "".join(phase * times for phase in TABLE)


def test_training_may_start_sparse():
    method = ACDC(start=0.0, phase=0.2, final=0.2)
    assert phases(method, 10) == "ssddssddss"
    _, _, sparsifier = sparse_convnet(method, dtype=torch.float64, sparsity=0.5, epochs=2)
    assert sparsifier.sparsity == 0.5


def test_phases_of_the_published_run_of_100_epochs():
    """Peste et al. prune at epochs 10, 20 … 70 and 85, and revive all weights at 15, 25 … 75."""
    assert phases(ACDC(), 100) == "d" * 10 + ("s" * 5 + "d" * 5) * 7 + "d" * 5 + "s" * 15


# ---- neurons


def grow_back(spare_neurons):
    """Remove a filter with small weights, then revive it. Return how many weights it kept, and its largest weight afterwards.

    The largest weight of the other filters is about 1.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    )
    nn.init.normal_(model[0].weight, std=0.4)
    nn.init.normal_(model[4].weight, std=0.4)
    model[0].weight.data[3].clamp_(-0.1, 0.1)
    nn.init.constant_(model[1].bias, 0.5)  # else ReLU would stop the gradient of a filter that is 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    method = ACDC(start=0.0, phase=0.25, final=0.25, spare_neurons=spare_neurons)
    sparsifier = optg.sparsify(model, optimizer, method, sparsity=0.5, steps=20)
    kept = int(sparsifier.masks["0.weight"][3].sum())
    for batch in batches(10):  # 5 sparse steps, 5 dense ones
        step(model, optimizer, batch)
    assert sparsifier.sparsity == 0.0 and 0.8 < float(model[0].weight[:3].abs().max()) < 2
    return kept, float(model[0].weight[3].abs().max())


def test_a_neuron_that_lost_all_weights_explodes_when_it_is_revived_at_0():
    kept, largest = grow_back(spare_neurons=False)
    assert kept == 0 and largest > 10


def test_a_neuron_that_kept_a_weight_does_not():
    kept, largest = grow_back(spare_neurons=True)
    assert kept == 1 and largest < 3


def test_states_saved_before_neurons_were_spared_resume_with_the_published_rule():
    _, _, sparsifier = sparse_convnet(METHOD)
    state = sparsifier.state_dict()
    state["options"] = {k: v for k, v in state["options"].items() if k in ("start", "phase", "final")}
    sparsifier.load_state_dict(state)
