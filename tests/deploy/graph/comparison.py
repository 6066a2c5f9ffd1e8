"""Compare a graph's outputs with its model's."""

import json

import torch
from torch.utils import _pytree as pytree

from optg.deploy.graph import Graph, from_json, to_json


def through_json(graph: Graph) -> Graph:
    """Convert a graph to JSON text and back."""
    return from_json(json.loads(json.dumps(to_json(graph))), graph.tensors)


def assert_same_outputs(found: object, expected: object, **tolerance: float) -> None:
    (a, structure), (b, expected_structure) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    assert structure == expected_structure
    torch.testing.assert_close(a, b, **tolerance)
