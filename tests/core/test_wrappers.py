"""Models inside wrappers of other libraries: masks and states have the names of the bare model."""

import pytest
import torch
from torch import nn

import optg
from tests.toy import batches, convnet, entropy


def wrapper(class_name, attribute):
    """Return a wrapper like those of Fabric, opacus or timm, which keep the model in an attribute."""

    def forward(self, *args):
        return getattr(self, attribute)(*args)

    def init(self, model):
        nn.Module.__init__(self)
        setattr(self, attribute, model)

    return type(class_name, (nn.Module,), {"__init__": init, "forward": forward})


@pytest.mark.parametrize(
    ("class_name", "attribute"),
    [
        ("_FabricModule", "_forward_module"),
        ("GradSampleModule", "_module"),
        ("ModelEmaV3", "module"),
        ("DeepSpeedEngine", "module"),
    ],
)
def test_names_are_those_of_the_bare_model(class_name, attribute):
    model = convnet()
    wrapped = wrapper(class_name, attribute)(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    sparsifier = optg.sparsify(wrapped, optimizer, "gmp", sparsity=0.5, steps=4)
    assert list(sparsifier.masks) == ["0.weight", "4.weight", "7.weight"]
    entropy(wrapped, batches(1)[0]).backward()
    optimizer.step()
    plain = convnet()
    other = optg.sparsify(plain, torch.optim.SGD(plain.parameters(), lr=0.1), "gmp", sparsity=0.5, steps=4)
    other.load_state_dict(sparsifier.state_dict())


def test_masks_are_applied_to_a_wrapped_average():
    model = convnet()
    sparsifier = optg.sparsify(model, torch.optim.SGD(model.parameters(), lr=0.1), "rigl", sparsity=0.5, steps=400)
    average = wrapper("ModelEmaV3", "module")(convnet())
    sparsifier.apply_masks(average)
    for name, mask in sparsifier.masks.items():
        assert not average.module.get_parameter(name)[~mask].any()


def test_an_average_that_is_not_a_module_is_refused_with_the_way_out():
    class EMAModel:
        shadow_params: list = []  # noqa: RUF012

    model = convnet()
    sparsifier = optg.sparsify(model, torch.optim.SGD(model.parameters(), lr=0.1), "gmp", sparsity=0.5, steps=4)
    with pytest.raises(TypeError, match=r"EMAModel is not an nn\.Module.*ema\.copy_to"):
        sparsifier.apply_masks(EMAModel())
