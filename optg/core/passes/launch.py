"""How a Triton kernel of the passes is launched."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from optg.core.passes.tables import BLOCK, Table

STEP = 1 << 11  # entries that a program reads at once
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}  # types of weights


def gpu_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU current: Triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def launch(kernel: Any, table: Table, *args: Any, step: int = STEP, **constants: Any) -> None:
    programs, tensors = table.blocks.shape[1], table.addresses.shape[1]
    if programs:
        with gpu_of(table.blocks):
            kernel[(programs,)](
                table.blocks, table.addresses, programs, tensors, *args, ALIGN=table.align, BLOCK=BLOCK, STEP=step, **constants
            )
