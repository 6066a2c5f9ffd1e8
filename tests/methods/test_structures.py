"""Every method with every structure: the structure holds exactly, and resuming is bit-exact; or the pair is refused."""

import copy
import warnings

import pytest
import torch
from torch import Tensor

import optg
from optg.core.channels import shrink
from optg.core.layer_kinds import Axes
from optg.core.structures import STRUCTURES
from optg.methods import METHODS
from tests.core.test_structures import check_structure
from tests.methods.test_contract import EPOCHS, OPTIMIZERS, STEPS, short, training_state
from tests.toy import batches, convnet, entropy, step

EXAMPLE = torch.zeros(2, 1, 8, 8)
GOALS = {"2:4": None, "1:4": None, "1x4": 0.8, "4x1": 0.7, "channel": 0.5, "0.*=unstructured, *=1x4": 0.75}
REFUSED = {
    **{(name, text): METHODS[name].single_weights for name in ("dense", "str", "keep") for text in GOALS},
    **{(name, "channel"): "a channel of zeros receives no gradient" for name in ("set", "rigl", "granet", "acdc")},
}
PAIRS = [(name, text) for name in METHODS for text in GOALS]


def attach(name: str, text: str):
    torch.manual_seed(0)
    model = convnet()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    options = {"sparsity": GOALS[text], "epochs": EPOCHS, "steps_per_epoch": STEPS, "structure": text, "example": EXAMPLE}
    data = {"loss": entropy, "batches": batches(3, seed=7)}
    return model, optimizer, optg.sparsify(model, optimizer, short(name), **options, **data)


def check(sparsifier: optg.Sparsifier) -> None:
    """Check the masks of every layer against its structure."""
    kinds = sparsifier.weights.assignment.structures
    for mask, axes, structure in zip(sparsifier.weights.masks, sparsifier.weights.axes, kinds):
        if type(structure) in STRUCTURES[:3]:
            check_structure(mask, axes, structure, final=True)
        else:
            rows: Tensor = mask.flatten(1) if mask.ndim > 1 else mask[:, None]
            assert axes == Axes() and (rows.all(1) | ~rows.any(1)).all()  # whole channels


@pytest.mark.parametrize(("name", "text"), [pair for pair in PAIRS if pair not in REFUSED])
def test_the_structure_holds_exactly(name, text):
    model, optimizer, sparsifier = attach(name, text)
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    assert set(sparsifier.weights.missing_zeros()) == {0}
    check(sparsifier)
    with warnings.catch_warnings(action="error"):  # no last cut was needed
        sparsifier.finish()
    for value, mask in zip(sparsifier.weights.values, sparsifier.weights.masks):
        assert not value[~mask].any()
    if text == "channel":
        model.eval()
        x = batches(1)[0][0]
        assert torch.allclose(shrink(model, EXAMPLE).eval()(x), model(x), atol=1e-5)


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_a_pair_that_cannot_work_is_refused_with_a_reason(name, text):
    with pytest.raises(ValueError, match=f"{name} does not support structure .*: .*{REFUSED[name, text]}. Use another method"):
        attach(name, text)


@pytest.mark.parametrize(
    ("name", "text"), [pair for pair in PAIRS if pair not in REFUSED and pair[1] in ("2:4", "1x4", "channel")]
)
def test_resume_is_bit_exact(name, text):
    if (name, text) in REFUSED:
        return
    data = batches(EPOCHS * STEPS)
    model, optimizer, sparsifier = attach(name, text)
    saved = {}
    for i, batch in enumerate(data):
        if i in (3, 11):
            saved[i] = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()))
        step(model, optimizer, batch)
    expected = training_state(model, optimizer, sparsifier)
    for start, state in saved.items():
        model, optimizer, sparsifier = attach(name, text)
        for part, value in zip((model, optimizer, sparsifier), state):
            part.load_state_dict(value)
        for batch in data[start:]:
            step(model, optimizer, batch)
        for a, b in zip(training_state(model, optimizer, sparsifier), expected, strict=True):
            assert torch.equal(a, b), f"resumed at step {start}"


@pytest.mark.parametrize("text", ["2:4", "1x4", "channel"])
def test_a_state_of_another_structure_is_refused(text):
    state = attach("gmp", text)[2].state_dict()
    with pytest.raises(ValueError, match=f"saved with structure='{text}', here it is '4x1'"):
        attach("gmp", "4x1")[2].load_state_dict(state)
    model = convnet()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    plain = optg.sparsify(model, optimizer, short("gmp"), sparsity=0.5, epochs=EPOCHS, steps_per_epoch=STEPS)
    with pytest.raises(ValueError, match=f"saved with structure='{text}', here it is 'unstructured'"):
        plain.load_state_dict(state)


def test_the_factor_of_st3_leaves_norms_of_kept_channels_alone():
    """It makes up for removed weights of a filter. A channel that stays has lost none."""
    model, optimizer, sparsifier = attach("st3", "channel")
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    weights = sparsifier.weights
    norm = weights.names.index("1.weight")
    kept = weights.masks[norm]
    assert 0 < int(kept.sum()) < len(kept)
    assert (weights.values[norm][kept].abs() <= 1.02 * weights.latent[norm][kept].abs()).all()
