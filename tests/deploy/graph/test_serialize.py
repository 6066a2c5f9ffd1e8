"""JSON of a graph: a modified one is refused. (test_capture.py sends every graph through JSON and back.)"""

import copy
import math
from functools import cache

import pytest
import torch

from optg.deploy.graph import Graph, GraphError, capture, from_json, to_json
from tests.toy import convnet

X = {"ref": "input"}


@cache
def small_graph() -> Graph:
    return capture(convnet().eval(), torch.randn(1, 1, 8, 8))


def modifications():
    """Yield a modification of the JSON, and part of the error."""
    yield (lambda d: d.pop("nodes"), "expected exactly the fields")
    yield (lambda d: d.update(more=1), "expected exactly the fields")
    yield (lambda d: d["kinds"].pop("0.weight"), '"kinds" must have one entry for each tensor')
    yield (lambda d: d["kinds"].update({"0.weight": "code"}), "kind must be one of")
    yield (lambda d: d["aliases"].update({"x": "nothing"}), '"aliases" must map names to names of parameters')
    yield (lambda d: d["aliases"].update({"0.weight": "4.weight"}), "an alias has the name of a tensor")
    yield (lambda d: d.update(inputs=[]), '"inputs" must be a list with at least one')
    yield (lambda d: d["inputs"][0].append(1), "an input must be")
    yield (lambda d: d["inputs"][0].__setitem__(1, "float"), "unknown dtype")
    yield (lambda d: d["inputs"][0].__setitem__(2, [None, -1]), "an invalid shape")
    yield (lambda d: d["inputs"][0].__setitem__(0, "0.weight"), "used twice")
    yield (lambda d: d["nodes"].reverse(), "which is not defined before it")
    yield (lambda d: d["nodes"].append(d["nodes"][0]), "used twice")
    yield (lambda d: d["nodes"][0].__setitem__(0, "a\nb"), "is not a valid name")
    yield (lambda d: d["nodes"][0].__setitem__(1, "aten.from_file.default"), "is not permitted in a packed file")
    yield (lambda d: d["nodes"][0].__setitem__(1, "os.system"), "is not permitted in a packed file")
    yield (lambda d: d["nodes"][0].__setitem__(1, 3), "is not permitted in a packed file")
    yield (lambda d: d["nodes"][0].__setitem__(2, {"ref": "x"}), "expected a list and a dict of arguments")
    yield (lambda d: d["nodes"][0][2].__setitem__(0, {"ref": "x", "tuple": []}), "a dict with one tag")
    yield (lambda d: d["nodes"][0][2].__setitem__(0, {"eval": "1 + 1"}), "the unknown value")
    yield (lambda d: d["nodes"][0][2].__setitem__(0, {"dtype": "os"}), "the unknown value")
    yield (lambda d: d["nodes"][0][2].__setitem__(0, 2**70), "out of range")
    yield (lambda d: d["nodes"][0][2].__setitem__(0, math.inf), "not finite")
    # torch 2.13 crashes on each of these five
    yield (
        lambda d: d["nodes"][0].__setitem__(slice(1, 4), ["aten._to_copy.default", [X], {"dtype": -1}]),
        "dtype is -1; expected",
    )
    yield (
        lambda d: d["nodes"][0].__setitem__(slice(1, 4), ["aten.clone.default", [X], {"memory_format": 4}]),
        "memory_format is 4; expected",
    )
    yield (
        lambda d: d["nodes"][0].__setitem__(slice(1, 4), ["aten.to.prim_dtype", [X, None, True, True], {}]),
        "is not permitted in a packed file",
    )
    yield (lambda d: d["nodes"][0].__setitem__(slice(1, 4), ["aten.max_pool1d.default", [X, [2**63 - 1]], {}]), "not permitted")
    yield (
        lambda d: d["nodes"][0].__setitem__(slice(1, 4), ["aten.max_pool2d.default", [X, [2**63 - 1]], {}]),
        "kernel_size is .* expected 1 to 2 values, each an integer from 1 to 4096",
    )
    yield (
        lambda d: d["nodes"][0].__setitem__(slice(1, 4), ["aten.max_pool2d.default", [X, [X]], {}]),
        "kernel_size is .* expected",
    )
    yield (lambda d: d["nodes"][0][3].update(more=1), "the argument 'more' is not permitted")
    yield (lambda d: d.update(outputs={"ref": "nothing"}), '"outputs" must refer to values of the graph')
    yield (lambda d: d.update(outputs=[1, 2]), '"outputs" must refer to values of the graph')
    yield (lambda d: d.update(outputs={"dtype": "float32"}), "the model returns")


@pytest.mark.parametrize("number", range(33))
def test_modified_json_is_refused(number: int) -> None:
    cases = list(modifications())
    assert len(cases) == 33
    modify, message = cases[number]
    data = copy.deepcopy(to_json(small_graph()))
    modify(data)
    with pytest.raises(GraphError, match=message):
        from_json(data, small_graph().tensors)
