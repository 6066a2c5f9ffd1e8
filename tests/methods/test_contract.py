"""The promises of every method in the registry. A new method is tested automatically."""

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn

import optg
from optg.core.ranking import zeros_at
from optg.methods import METHODS
from tests.toy import batches, convnet, entropy, goal, step

EPOCHS, STEPS = 5, 4
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
PRUNING = [name for name in METHODS if name != "dense"]


def short(name: str):
    """Return a method for a run of 20 steps: it cuts every 2 steps or more often, in few cycles or rounds."""
    method = METHODS[name]()
    shorter = {
        "every": lambda every: min(every, 2) if isinstance(every, int) else every,
        "fraction": lambda _: 0.6,
        "rounds": lambda _: 10,
    }
    fields = {field.name for field in dataclasses.fields(method)}
    return dataclasses.replace(method, **{f: change(getattr(method, f)) for f, change in shorter.items() if f in fields})


def attach(name: str, sparsity: float = 0.9, model: nn.Module | None = None, optimizer: str = "sgd"):
    if model is None:
        torch.manual_seed(0)
        model = convnet()
    opt = OPTIMIZERS[optimizer](model.parameters())
    target = goal(name, model, sparsity)
    data = {"loss": entropy, "batches": batches(3, seed=7)}
    return model, opt, optg.sparsify(model, opt, short(name), epochs=EPOCHS, steps_per_epoch=STEPS, **target, **data)


def training_state(model, optimizer, sparsifier) -> list[torch.Tensor]:
    """Return all tensors that training depends on."""
    states = [s for p in model.parameters() for s in optimizer.state[p].values() if isinstance(s, torch.Tensor)]
    saved = [t for layers in sparsifier.state_dict()["tensors"].values() for t in layers.values()]
    return [t.clone() for t in [*model.state_dict().values(), *states, *saved]]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", METHODS)
def test_at_sparsity_0_training_equals_dense_training_bit_for_bit(name, optimizer):
    model, opt, sparsifier = attach(name, sparsity=0.0, optimizer=optimizer)
    torch.manual_seed(0)
    plain = convnet()
    plain_opt = OPTIMIZERS[optimizer](plain.parameters())
    if name == "supermask":  # trains only scores, never the prunable weights
        for layer in sparsifier.masks:
            plain.get_parameter(layer).requires_grad_(False)
    if sparsifier.method.ham:  # the dense training to compare with has it too
        optg.sparsify(plain, plain_opt, METHODS["dense"](ham=sparsifier.method.ham), sparsity=0.0, steps=EPOCHS * STEPS)
    for batch in batches(EPOCHS * STEPS):
        assert step(model, opt, batch) == step(plain, plain_opt, batch)
    for a, b in zip(model.state_dict().values(), plain.state_dict().values()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.987])
@pytest.mark.parametrize("name", PRUNING)
def test_the_target_is_met_exactly(name, sparsity):
    model, opt, sparsifier = attach(name, sparsity)
    for batch in batches(EPOCHS * STEPS):
        step(model, opt, batch)
    size = sparsifier.weights.size
    zeros = sum(int((~m).sum()) for m in sparsifier.masks.values())
    if sparsifier.method.learns_sparsity:  # or takes it from the model: then the masks remove exactly the weights that are 0
        assert zeros == sum(int((v == 0).sum()) for v in sparsifier.weights.values)
    else:
        assert zeros == zeros_at(sparsity, size)
    assert sparsifier.sparsity == zeros / size
    with warnings.catch_warnings(action="error"):
        if sparsifier.method.learns_sparsity:
            warnings.filterwarnings("ignore", message=r"training ended .* learns it")
        sparsifier.finish()  # the target is met, so no other warning may appear


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", METHODS)
def test_parameters_are_effective_after_every_step(name, optimizer):
    model, opt, sparsifier = attach(name, optimizer=optimizer)
    for batch in batches(EPOCHS * STEPS):
        step(model, opt, batch)
        weights = sparsifier.weights
        for layer, (mask, value, latent) in enumerate(zip(weights.masks, weights.values, weights.latent or weights.values)):
            effective = sparsifier.method.effective(weights, layer, latent)
            assert torch.equal(value, torch.where(mask, effective, 0.0))
            assert not torch.signbit(value[~mask]).any()  # 0.0, not −0.0


@pytest.mark.parametrize("name", METHODS)
def test_kept_weights_are_trained_except_by_supermask(name):
    model, opt, sparsifier = attach(name)
    first = [v.clone() for v in sparsifier.weights.latent or sparsifier.weights.values]
    for batch in batches(EPOCHS * STEPS):
        step(model, opt, batch)
    now = sparsifier.weights.latent or sparsifier.weights.values
    for mask, a, b in zip(sparsifier.weights.masks, first, now):
        assert torch.equal(a, b) if name == "supermask" else not torch.equal(a[mask], b[mask]) or not mask.any()


@pytest.mark.parametrize("name", METHODS)
def test_removed_weights_are_revived_only_if_the_method_declares_it(name):
    model, opt, sparsifier = attach(name)
    method, weights, revived = sparsifier.method, sparsifier.weights, 0
    with pytest.MonkeyPatch.context() as patch:
        record, before = weights.mask_set.record, [m.clone() for m in weights.masks]

        def watch(counts):
            nonlocal revived
            record(counts)
            for value, new, old in zip(weights.values, weights.masks, before):
                back = new & ~old
                revived += int(back.sum())
                if not method.keeps_pruned:
                    assert not value[back].any()
                old.copy_(new)

        patch.setattr(weights.mask_set, "record", watch)
        for batch in batches(EPOCHS * STEPS):
            step(model, opt, batch)
    assert (revived > 0) == method.revives or method.learns_sparsity


@pytest.mark.parametrize("name", METHODS)
def test_resume_from_any_step_is_bit_exact(name):
    data = batches(EPOCHS * STEPS)
    model, opt, sparsifier = attach(name)
    saved = []
    for batch in data:
        saved.append(copy.deepcopy((model.state_dict(), opt.state_dict(), sparsifier.state_dict())))
        step(model, opt, batch)
    expected = training_state(model, opt, sparsifier)
    for start, state in enumerate(saved):
        torch.manual_seed(start)
        model, opt, sparsifier = attach(name, model=convnet())
        for part, value in zip((model, opt, sparsifier), copy.deepcopy(state)):
            part.load_state_dict(value)
        for batch in data[start:]:
            step(model, opt, batch)
        for a, b in zip(training_state(model, opt, sparsifier), expected, strict=True):
            assert torch.equal(a, b), f"resumed at step {start}"


@pytest.mark.parametrize("name", METHODS)
def test_a_model_may_be_loaded_before_it_is_sparsified(name):
    """The first mask of the new sparsifier is undone before the saved masks are loaded."""
    data = batches(EPOCHS * STEPS)
    model, opt, sparsifier = attach(name)
    middle = len(data) // 2
    for batch in data[:middle]:
        step(model, opt, batch)
    state = copy.deepcopy((model.state_dict(), opt.state_dict(), sparsifier.state_dict()))
    for batch in data[middle:]:
        step(model, opt, batch)
    expected = training_state(model, opt, sparsifier)
    torch.manual_seed(1)
    loaded = convnet()
    loaded.load_state_dict(state[0])
    model, opt, sparsifier = attach(name, model=loaded)
    opt.load_state_dict(state[1])
    sparsifier.load_state_dict(state[2])
    for batch in data[middle:]:
        step(model, opt, batch)
    for a, b in zip(training_state(model, opt, sparsifier), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", METHODS)
def test_the_model_compiles_once(name):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = convnet()
    _, opt, sparsifier = attach(name, model=model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for batch in batches(EPOCHS * STEPS):
        step(compiled, opt, batch)
    assert len(graphs) == 1
    assert list(sparsifier.masks) == ["0.weight", "4.weight", "7.weight"]


@pytest.mark.parametrize("name", METHODS)
def test_an_interrupted_step_leaves_a_sparse_model(name):
    model, opt, sparsifier = attach(name)
    data = batches(EPOCHS * STEPS)
    for batch in data[:13]:
        step(model, opt, batch)
    before = [v.clone() for v in sparsifier.weights.values]
    latent = [v.clone() for v in sparsifier.weights.latent or []]

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = opt.register_step_pre_hook(interrupt)  # runs after our hook, while the parameters hold latent weights
    with pytest.raises(KeyboardInterrupt):
        step(model, opt, data[13])
    hook.remove()
    masks = sparsifier.masks.values()
    for value, mask, old in zip(sparsifier.weights.values, masks, before):
        assert torch.equal(value, torch.where(mask, old, 0.0))
    for a, b in zip(sparsifier.weights.latent or [], latent):
        assert torch.equal(a, b)
    for batch in data[13:]:
        step(model, opt, batch)
    assert sparsifier.clock.step == EPOCHS * STEPS
    sparsifier.finish()


@pytest.mark.parametrize("name", METHODS)
def test_options_are_plain_values_and_part_of_the_state(name):
    _, _, sparsifier = attach(name)
    options = sparsifier.state_dict()["options"]
    assert type(sparsifier.method)(**options) == sparsifier.method
    assert all(isinstance(v, (int, float, str, bool, type(None))) for v in options.values())


@pytest.mark.parametrize("name", METHODS)
def test_it_names_its_paper(name):
    assert METHODS[name].paper and METHODS[name].__module__.startswith("optg.methods")
