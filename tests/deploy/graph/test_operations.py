"""The list of operations that a packed file may use."""

import torch

from optg.deploy.graph.operations import PERMITTED_ATEN, is_permitted


def test_permitted_operations_have_no_side_effects_and_no_randomness() -> None:
    for name in PERMITTED_ATEN:
        packet = getattr(torch.ops.aten, name)
        assert any(is_permitted(f"aten.{name}.{overload}") for overload in packet.overloads()), name
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if is_permitted(f"aten.{name}.{overload}"):
                random = torch.Tag.nondeterministic_seeded in op.tags and name != "scaled_dot_product_attention"  # its dropout
                assert not op._schema.is_mutable and not random, op
    for name in (
        *("aten.from_file.default", "aten.relu_.default", "aten.add.out", "aten.set_.source_Storage", "aten.rand.default"),
        *(
            "aten.relu.__call__",
            "aten.relu.default.x",
            "os.system",
            "operator.attrgetter",
            "prims.add.default",
            "aten.relu",
            "",
        ),
    ):
        assert not is_permitted(name)
