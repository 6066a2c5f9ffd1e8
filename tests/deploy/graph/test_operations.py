"""The table of operations that a packed file may use, against torch's own signatures."""

import pytest
import torch

from optg.deploy.graph.domains import domain
from optg.deploy.graph.operations import DOMAINS_OF, is_permitted, resolve

TENSOR_DOMAINS = {"real", "float", "index", "mask", "single", "bytes", "signed"}
DATA_DEPENDENT = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


@pytest.mark.parametrize("op", DOMAINS_OF)
def test_operation_fits_its_signature_and_has_no_side_effects(op: str) -> None:
    found = resolve(op)
    random = torch.Tag.nondeterministic_seeded in found.tags and "attention" not in op  # its dropout must be 0
    assert not found._schema.is_mutable and not random
    assert op == "aten.index.Tensor" or not set(DATA_DEPENDENT) & set(found.tags)  # its indices must be integers
    parameters = {parameter.name: parameter for parameter in found._schema.arguments}
    assert set(DOMAINS_OF[op]) <= set(parameters)
    for name, text in DOMAINS_OF[op].items():
        domain(text)
        is_tensor = str(parameters[name].real_type).removeprefix("Optional[").startswith("Tensor")
        assert not is_tensor or text.rstrip("?") in {*TENSOR_DOMAINS, "operand"}, name
    required = {name for name, parameter in parameters.items() if not parameter.has_default_value()}
    assert required <= set(DOMAINS_OF[op])


@pytest.mark.parametrize(
    "op",
    """
    aten.from_file.default aten.relu_.default aten.add.out aten.set_.source_Storage aten.rand.default aten.relu.__call__
    aten.relu.default.x aten.relu os.system operator.attrgetter prims.add.default aten.grid_sampler.default
    aten.grid_sampler_2d.default aten.floor_divide.default aten.remainder.Tensor aten.fmod.Tensor aten.empty.memory_format
    aten.nonzero.default aten.as_strided.default aten.repeat_interleave.Tensor aten.masked_select.default aten.item.default
    """.split(),  # noqa: SIM905
)
def test_operation_is_not_permitted(op: str) -> None:
    assert not is_permitted(op)


def test_the_list_is_short() -> None:
    assert len(DOMAINS_OF) < 200
