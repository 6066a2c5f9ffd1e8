"""Small graphs and descriptions that the tests of packed files share."""

import torch
from torch import Tensor

from optg.deploy.graph import Graph, Ref
from optg.deploy.packed import About

ABOUT = About(
    "small",
    3,
    (1, 6, 6),
    (0.5,),
    (0.25,),
    0.875,
    ("a", "b", "ç"),
    {"parameters": 9},
    {"accuracy": 0.5, "method": "optg", "seed": None},
)


def graph_with(**tensors: Tensor) -> Graph:
    """Return a graph that holds these tensors and returns its input."""
    return Graph(["x"], [(None, 3)], [torch.float32], [], Ref("x"), tensors, dict.fromkeys(tensors, "parameter"))
