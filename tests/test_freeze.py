"""sparsifier.freeze(): the masks stay, kept weights are trained, and a frozen run resumes."""

import copy

import pytest
import torch

import optg
from optg.methods import METHODS
from tests.toy import attach, batches, convnet, entropy, goal, sparse_convnet, step

EPOCHS, STEPS = 10, 4
FROZEN = 36  # of 40 steps
LATE = {"gsm", "imp"}  # they reach the target later
OPTIONS = {"optg": {"end": 0.9}, "set": {"end": 0.9, "every": 4}, "granet": {"until": 0.9, "every": 4}}


def start(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, optg.Sparsifier]:
    torch.manual_seed(0)
    model = convnet()
    options = {"sparsity": 0.8, **goal(name, model, 0.8)} if name != "keep" else {"sparsity": None, **goal(name, model, 0.8)}
    method = METHODS[name](**OPTIONS.get(name, {}))
    return model, *attach(model, None, method, epochs=EPOCHS, steps=STEPS, loss=entropy, batches=batches(2), **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in METHODS if name not in LATE])
def test_the_masks_of_every_method_stay_and_a_frozen_run_resumes(name: str) -> None:
    model, optimizer, sparsifier = start(name)
    data = batches(EPOCHS * STEPS)
    for batch in data[:FROZEN]:
        step(model, optimizer, batch)
    before = copy.deepcopy(model.state_dict())
    sparsifier.freeze()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    masks = {key: mask.clone() for key, mask in sparsifier.masks.items()}
    step(model, optimizer, data[FROZEN])
    states = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, sparsifier)]
    for batch in data[FROZEN + 1 :]:
        step(model, optimizer, batch)
    assert sparsifier.verify().ok and all(torch.equal(mask, masks[key]) for key, mask in sparsifier.masks.items())
    assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items() if key in masks)

    again, resumed, loaded = start(name)
    for part, state in zip((again, resumed, loaded), states):
        part.load_state_dict(state)
    for batch in data[FROZEN + 1 :]:
        step(again, resumed, batch)
    assert loaded.frozen and loaded.clock.step == EPOCHS * STEPS
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items())
    sparsifier.finish()
    assert all(torch.equal(mask, masks[key]) for key, mask in sparsifier.masks.items())


def test_ham_goes_on() -> None:
    weights = []
    for ham in (0.0, 50.0):
        torch.manual_seed(0)
        model, optimizer, sparsifier = sparse_convnet(optg.methods.SNIP(ham=ham), loss=entropy, batches=batches(1))
        sparsifier.freeze()
        assert sparsifier.method == optg.methods.Keep(ham=ham)
        step(model, optimizer, batches(1)[0])
        weights.append(model[0].weight.detach().clone())
    assert not torch.equal(*weights)


def test_a_mask_short_of_its_target_is_refused() -> None:
    model, optimizer, sparsifier = sparse_convnet(optg.methods.GMP(every=1, end=0.5))
    step(model, optimizer, batches(1)[0])
    with pytest.raises(
        ValueError, match=r"the sparsity is 0\.\d+ at step 1 of 20; expected 0.9 before freeze\(\): gmp reaches"
    ):
        sparsifier.freeze()
    assert not sparsifier.frozen


def test_a_frozen_sparsifier_takes_no_earlier_state() -> None:
    model, optimizer, sparsifier = sparse_convnet(optg.methods.GMP(every=1, end=0.5))
    for batch in batches(12):
        step(model, optimizer, batch)
    early = sparsifier.state_dict()
    sparsifier.freeze()
    sparsifier.freeze()  # once more changes nothing
    with pytest.raises(ValueError, match=r"saved before freeze\(\)"):
        sparsifier.load_state_dict(early)


def test_trials_of_dormant_weights_end() -> None:
    model, optimizer, sparsifier = sparse_convnet(optg.methods.Phoenix(every=1, end=0.3, reopen=0.99))
    for batch in batches(10):
        step(model, optimizer, batch)
    sparsifier.freeze()
    before = copy.deepcopy(model[0].weight)
    model(batches(1)[0][0])
    assert torch.equal(before, model[0].weight)
