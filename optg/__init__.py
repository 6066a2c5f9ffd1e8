"""optg: neural networks made sparse while they train.

sparsifier = optg.sparsify(model, optimizer, method="optg", sparsity=0.95, epochs=100, steps_per_epoch=len(loader))
"""

from optg import methods
from optg.sparsifier import Sparsifier, sparsify

__all__ = ["Sparsifier", "methods", "sparsify"]
__version__ = "0.1.0"
