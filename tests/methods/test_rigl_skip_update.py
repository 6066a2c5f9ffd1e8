"""RigL(skip_update_on_exchange=True): no weight moves in a step with an exchange."""

import pytest
import torch

import optg
from optg.methods import RigL
from optg.training.recipe import build_method, load
from tests.toy import batches, convnet, step

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=1e-2),
}
TOTAL, EXCHANGES = 20, (4, 8, 12)  # steps taken before each exchange: every 4, until 0.75 of training


def run(optimizer: str, skip: bool):
    """Yield masks, parameters and optimizer states before and after each step of a run."""
    torch.manual_seed(0)
    model = convnet()
    opt = OPTIMIZERS[optimizer](model.parameters())
    sparsifier = optg.sparsify(
        model, opt, RigL(every=4, skip_update_on_exchange=skip), sparsity=0.8, epochs=4, steps_per_epoch=5
    )

    def snapshot():
        states = {n: {k: v.clone() for k, v in opt.state.get(p, {}).items()} for n, p in model.named_parameters()}
        masks = {n: m.clone() for n, m in sparsifier.masks.items()}
        return masks, {n: p.detach().clone() for n, p in model.named_parameters()}, states

    for batch in batches(TOTAL):
        before = snapshot()
        step(model, opt, batch)
        yield before, snapshot()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_move_in_every_step_except_those_with_an_exchange(optimizer):
    grown = 0
    for taken, ((masks, values, states), (new_masks, new_values, new_states)) in enumerate(run(optimizer, skip=True)):
        for name, value in values.items():
            new, state = new_values[name], new_states[name]
            if taken not in EXCHANGES:
                assert not torch.equal(value, new), (taken, name)
                continue
            mask, new_mask = (m.get(name, torch.ones_like(value, dtype=torch.bool)) for m in (masks, new_masks))
            assert torch.equal(new, value.where(new_mask, 0.0)), (
                taken,
                name,
            )  # kept weights are unchanged, dropped ones 0 …
            assert not new[new_mask & ~mask].any()  # … and so are grown ones
            grown += int((new_mask & ~mask).sum())
            for key, old in states[name].items():  # momentum, moments and Adam's count of steps
                kept = ~(new_mask & ~mask) if old.shape == value.shape else torch.ones_like(old, dtype=torch.bool)
                assert torch.equal(state[key], old.where(kept, 0.0)), (taken, name, key)
    assert grown > 20


def test_exchanges_happen_after_the_listed_steps():
    changed = [
        taken
        for taken, ((masks, *_), (new_masks, *_)) in enumerate(run("sgd", skip=True))
        if any(not torch.equal(masks[n], new_masks[n]) for n in masks)
    ]
    assert tuple(changed) == EXCHANGES


def test_by_default_weights_move_in_steps_with_an_exchange_too():
    for taken, ((masks, values, _), (new_masks, new_values, _)) in enumerate(run("sgd", skip=False)):
        if taken in EXCHANGES:
            for name in values:
                stayed = masks[name] & new_masks[name] if name in masks else ...
                assert not torch.equal(values[name][stayed], new_values[name][stayed])


def test_states_with_the_old_option_name_can_be_loaded():
    model = convnet()
    opt = OPTIMIZERS["sgd"](model.parameters())
    method = RigL(every=4, skip_update_on_exchange=True)
    sparsifier = optg.sparsify(model, opt, method, sparsity=0.8, epochs=4, steps_per_epoch=5)
    state = sparsifier.state_dict()
    state["options"]["hold"] = state["options"].pop("skip_update_on_exchange")
    sparsifier.load_state_dict(state)
    state["options"]["hold"] = False
    with pytest.raises(ValueError, match="saved with options="):
        sparsifier.load_state_dict(state)


def test_recipes_with_the_old_option_name_can_be_read(tmp_path):
    (tmp_path / "old.toml").write_text('data = "digits"\nmodel = "digits"\nmethod = "rigl"\n[methods.rigl]\nhold = true\n')
    method = build_method(load(str(tmp_path / "old.toml")))
    assert method == RigL(skip_update_on_exchange=True)
