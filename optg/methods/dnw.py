"""Discovering Neural Wirings (DNW). Wortsman et al., 2019 (arXiv:1906.00586).

DPF with a cut at every step and the target from the start: each layer keeps its largest weights, all receive the gradient.
"""

from dataclasses import dataclass
from typing import ClassVar

from optg.methods.dpf import DPF


@dataclass
class DNW(DPF):
    paper: ClassVar[str] = "Wortsman et al. 2019"

    schedule: str = "constant"
    every: int | str = 1
    budget: str = "uniform"
