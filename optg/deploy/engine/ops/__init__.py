"""The engine's operations, one kind per file.

To add one: write a file like these, import it here, and put its C function into c/ops/.
"""

from optg.deploy.engine.ops import concat, convolution, mean, pointwise, pool, reshape, softmax  # noqa: F401 (fills RULES)
from optg.deploy.engine.ops.base import RULES

__all__ = ["RULES"]
