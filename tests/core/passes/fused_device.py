"""Where the tests of fused passes run: on a GPU, or in Triton's interpreter on CPU tensors (TRITON_INTERPRET=1).

Importing this module skips the test file where neither is available.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("needs a CUDA GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("optg.core.passes.fused")

DEVICE = "cpu" if INTERPRETED else "cuda"
needs_cuda = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
