"""One small file for a sparse model: its graph, its masks and its values. It contains data only; nothing in it can run.

    prefix      magic bytes, version, length and SHA-256 of the header
    header      JSON: the graph, a table of tensors, a description of the model, and the SHA-256 of the blobs
    blobs       for each tensor of the table, without gaps: the mask's quotients, its remainders, the values

A tensor with zeros is stored as a mask and its non-zero values. The mask is the run of zeros before each value in a Rice code
(rice.py), which takes 0.14 bits per weight at 98 % sparsity. An element counts as zero only if all its bits are: −0.0 is a
value, and every tensor is read back bit for bit. The one exception is chosen by the user: float32 weights of matrices and
convolutions may be stored as bfloat16, and are then read back as the rounded float32 values.
"""

from optg.deploy.packed.checks import PackedError, TooLarge
from optg.deploy.packed.file import load, pack, unpack, write_packed
from optg.deploy.packed.header import About
from optg.deploy.packed.model import PackedModel
from optg.deploy.packed.tensors import Values

__all__ = ["About", "PackedError", "PackedModel", "TooLarge", "Values", "load", "pack", "unpack", "write_packed"]
