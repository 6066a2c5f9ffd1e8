"""IMP: cycles, rewinding and lottery tickets."""

import copy

import pytest
import torch
from torch import nn

import optg
from optg.core.clock import Clock
from optg.methods import IMP
from tests.toy import batches, convnet, sgd, sparse_convnet, step

# 1 − 0.4³ = 0.936 is the first to exceed 0.9, so there are 4 cycles of 5 steps, at sparsity 0, 0.6, 0.84 and 0.9.
FRACTION, TARGET, CYCLE, TOTAL = 0.6, 0.9, 5, 20
OPTIMIZERS = {"sgd": sgd, "adam": lambda p: torch.optim.Adam(p, lr=0.01)}


def attach(method: IMP, optimizer: str = "sgd", sparsity: float = TARGET, steps: int = TOTAL, seed: int = 0):
    return sparse_convnet(method, OPTIMIZERS[optimizer], seed, sparsity=sparsity, epochs=1, steps=steps)


def optimizer_state(model, optimizer) -> list[dict[str, torch.Tensor]]:
    return [{k: v.clone() for k, v in optimizer.state.get(p, {}).items() if v is not None} for p in model.parameters()]


def equal_states(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> bool:
    return [set(x) for x in a] == [set(x) for x in b] and all(torch.equal(x[k], y[k]) for x, y in zip(a, b) for k in x)


def count_cycles(sparsity: float, fraction: float) -> int:
    return attach(IMP(fraction=fraction), sparsity=sparsity, steps=1000)[2].method.cycles


@pytest.mark.parametrize(
    "sparsity, fraction, count",
    [
        (0.0, 0.2, 1),
        (0.2, 0.2, 2),
        (0.5, 0.2, 5),  # 0.8³ = 0.512, 0.8⁴ = 0.41: dense and four more
        (0.9, 0.2, 12),  # 0.8¹⁰ = 0.107, 0.8¹¹ = 0.086
        (0.95, 0.2, 15),  # 0.8¹³ = 0.055, 0.8¹⁴ = 0.044
        (0.75, 0.5, 3),
        (0.9, 0.6, 4),
    ],
)
def test_the_number_of_cycles(sparsity, fraction, count):
    assert count_cycles(sparsity, fraction) == count


@pytest.mark.parametrize("sparsity, fraction, count", [(0.36, 0.2, 3), (0.488, 0.2, 4), (0.936, 0.6, 4)])
def test_the_number_of_cycles_if_a_cycle_meets_the_target_exactly(sparsity, fraction, count):
    assert count_cycles(sparsity, fraction) == count


def test_sparsity_after_each_cycle():
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = optg.sparsify(model, optimizer, IMP(), sparsity=0.5, epochs=5, steps_per_epoch=3)
    zeros = []
    for _ in range(15):
        model.weight.grad = torch.randn(10, 10)
        optimizer.step()
        zeros.append(int((~sparsifier.masks["weight"]).sum()))
    # 1 − 0.8 = 0.2, 1 − 0.8² = 0.36, 1 − 0.8³ = 0.488, then the target, at which the last cycle trains
    assert zeros == [0, 0, 20, 20, 20, 36, 36, 36, 49, 49, 49, 50, 50, 50, 50]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rewind, point", [(0.0, 0), (0.4, 2), (1.0, 5)])
def test_weights_buffers_and_optimizer_state_are_rewound_bit_for_bit(optimizer, rewind, point):
    model, opt, sparsifier = attach(IMP(FRACTION, rewind), optimizer)
    saved, rewound = None, []
    for t, batch in enumerate(batches(TOTAL)):
        if t == point:
            saved = copy.deepcopy(model.state_dict()), optimizer_state(model, opt)
        step(model, opt, batch)
        if t + 1 == point:  # the rewind point itself, saved before the cut
            continue
        if (t + 1) % CYCLE == 0 and t + 1 < TOTAL:
            weights, state = saved
            for name, value in model.state_dict().items():
                mask = sparsifier.masks.get(name)
                assert torch.equal(value, weights[name] if mask is None else weights[name].where(mask, 0.0)), name
            assert equal_states(optimizer_state(model, opt), state)
            rewound.append(t + 1)
        elif saved:
            assert not torch.equal(model[4].weight, saved[0]["4.weight"])
            assert not torch.equal(model[1].running_mean, saved[0]["1.running_mean"])
            assert not equal_states(optimizer_state(model, opt), saved[1])
    assert rewound == [t for t in (5, 10, 15) if t != point]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_last_cycle_equals_plain_training_of_the_ticket(optimizer):
    """Plain training, without a sparsifier, starts from the first weights under the last mask."""
    data = batches(TOTAL)
    model, opt, sparsifier = attach(IMP(FRACTION), optimizer)
    torch.manual_seed(0)
    plain = convnet()
    plain_opt = OPTIMIZERS[optimizer](plain.parameters())
    for batch in data:
        step(model, opt, batch)
    ticket = [(plain.get_parameter(name), mask) for name, mask in sparsifier.masks.items()]
    assert sum(int((~mask).sum()) for _, mask in ticket) == 1736  # ⌈0.9 · 1928⌉
    for x, y in data[-CYCLE:]:
        for p, mask in ticket:
            p.data.mul_(mask)
        plain_opt.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        for p, mask in ticket:
            p.grad.mul_(mask)
        plain_opt.step()
    for p, mask in ticket:
        p.data.mul_(mask)
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_removed_weights_stay_removed():
    model, opt, sparsifier = attach(IMP(FRACTION))
    for t, batch in enumerate(batches(TOTAL), 1):
        before = {name: mask.clone() for name, mask in sparsifier.masks.items()}
        step(model, opt, batch)
        for name, mask in sparsifier.masks.items():
            assert not (mask & ~before[name]).any() and not model.get_parameter(name)[~mask].any()
            assert torch.equal(mask, before[name]) or t in (5, 10, 15)


def test_a_cycle_removes_the_smallest_magnitudes_at_its_end():
    model, opt, sparsifier = attach(IMP(FRACTION))
    torch.manual_seed(0)
    plain = convnet()
    plain_opt = OPTIMIZERS["sgd"](plain.parameters())
    for batch in batches(CYCLE):
        step(model, opt, batch)
        step(plain, plain_opt, batch)
    magnitudes = {name: plain.get_parameter(name).abs() for name in sparsifier.masks}
    last_removed = torch.cat([m.flatten() for m in magnitudes.values()]).sort().values[1157 - 1]  # ⌈0.6 · 1928⌉
    for name, mask in sparsifier.masks.items():
        assert torch.equal(mask, magnitudes[name] > last_removed)


def restarts_and_cuts(steps: int) -> tuple[list[int], list[int]]:
    """Return the steps after which the documented scheduler restarts, and those after which the mask changes."""
    model, opt, sparsifier = attach(IMP(FRACTION), steps=steps)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=sparsifier.method.cycle(sparsifier.clock))
    restarts, cuts = [], []
    for t, batch in enumerate(batches(steps), 1):
        zeros = sparsifier.sparsity
        step(model, opt, batch)
        scheduler.step()
        if opt.param_groups[0]["lr"] == 0.05 and t < steps:
            restarts.append(t)
        if sparsifier.sparsity > zeros:
            cuts.append(t)
    return restarts, cuts


def test_the_documented_scheduler_restarts_with_the_cycles():
    assert restarts_and_cuts(20) == ([5, 10, 15], [5, 10, 15])


def test_the_documented_scheduler_does_not_restart_within_a_shorter_last_cycle():
    assert restarts_and_cuts(22) == ([6, 12, 18], [6, 12, 18])


def test_the_last_cycle_is_at_least_half_as_long_as_the_others():
    for steps in range(8, 60):
        length = attach(IMP(FRACTION), steps=steps)[2].method.cycle(Clock(1, steps))
        assert 2 * (steps - 3 * length) >= length, steps


def test_a_run_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="12 cycles of training do not fit into 23 steps; expected at least 2 steps each"):
        attach(IMP(), steps=23)


def test_two_steps_per_cycle_are_enough():
    assert attach(IMP(), steps=24)[2].method.cycles == 12
    with pytest.raises(ValueError, match="12 cycles of training do not fit into 12 steps; expected at least 2 steps each"):
        attach(IMP(), steps=12)


@pytest.mark.parametrize("options", [{"rewind": 1.5}, {"rewind": -0.1}, {"fraction": 0.0}, {"fraction": 1.0}])
def test_options_out_of_range_are_refused(options):
    [name] = options
    with pytest.raises(ValueError, match=name):
        attach(IMP(**{"fraction": FRACTION, **options}))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_in_the_third_cycle(optimizer):
    data, at = batches(TOTAL), 13
    model, opt, sparsifier = attach(IMP(FRACTION, rewind=0.4), optimizer)
    for batch in data[:at]:
        step(model, opt, batch)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict(), sparsifier.state_dict()))
    for batch in data[at:]:
        step(model, opt, batch)
    model2, opt2, sparsifier2 = attach(IMP(FRACTION, rewind=0.4), optimizer, seed=1)
    for part, state in zip((model2, opt2, sparsifier2), saved):
        part.load_state_dict(state)
    for batch in data[at:]:  # includes the last rewind, at step 15
        step(model2, opt2, batch)
    for a, b in zip(model.state_dict().values(), model2.state_dict().values()):
        assert torch.equal(a, b)
    assert equal_states(optimizer_state(model, opt), optimizer_state(model2, opt2))
    assert all(torch.equal(a, b) for a, b in zip(sparsifier.masks.values(), sparsifier2.masks.values()))


def test_a_module_may_have_state_other_than_tensors():
    class ExtraState(nn.Module):
        def get_extra_state(self):
            return {"seen": 3}

        def set_extra_state(self, state):
            pass

        def forward(self, x):
            return x

    torch.manual_seed(0)
    model = nn.Sequential(*convnet(), ExtraState())
    opt = OPTIMIZERS["sgd"](model.parameters())
    sparsifier = optg.sparsify(model, opt, IMP(fraction=FRACTION), sparsity=TARGET, epochs=1, steps_per_epoch=TOTAL)
    for batch in batches(TOTAL):
        step(model, opt, batch)
    assert sparsifier.sparsity >= TARGET


def test_weights_of_another_optimizer_are_not_rewound():
    torch.manual_seed(0)
    model = convnet()
    head = model[-1]
    others = [p for p in model.parameters() if all(p is not h for h in head.parameters())]
    mine, theirs = OPTIMIZERS["sgd"](head.parameters()), OPTIMIZERS["adam"](others)
    sparsifier = optg.sparsify(
        model, mine, IMP(fraction=FRACTION), sparsity=TARGET, epochs=1, steps_per_epoch=TOTAL, include="7"
    )
    for i, batch in enumerate(batches(CYCLE)):
        before = [p.detach().clone() for p in others]
        step(model, mine, batch)  # the last of these steps rewinds
        assert all(torch.equal(a, b) for a, b in zip(before, others)), i
        theirs.step()
    assert sparsifier.sparsity > 0
