"""To prune, or not to prune: exploring the efficacy of pruning for model compression. Zhu & Gupta, 2017 (arXiv:1710.01878).

Remove the weights of least magnitude, a few more at each cut: s(t) = P · (1 − (1 − (t − t₀) / (t₁ − t₀))³).
Removed weights stay removed.
"""

from dataclasses import dataclass
from typing import ClassVar

from optg.methods.base import Gradual


@dataclass
class GMP(Gradual):
    paper: ClassVar[str] = "Zhu & Gupta 2017"
    revives: ClassVar[bool] = False

    every: int | str = 100
