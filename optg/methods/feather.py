"""Feather: An Elegant Solution to Effective DNN Sparsification. Glentis Georgoulakis et al., 2023 (arXiv:2310.02448).

Forward sees sign(w) · (|w|ᵖ − tᵖ)^(1/p) above a global magnitude threshold t: with p = 3 this is close to w itself, yet
continuous at t. Every latent weight receives the gradient of the pruned model, dormant ones a share θ of it.
"""

from dataclasses import dataclass
from typing import ClassVar

from optg.methods.soft import Soft


@dataclass
class Feather(Soft):
    paper: ClassVar[str] = "Glentis Georgoulakis et al. 2023"

    end: float = 0.5
