"""Inference on bytes: u8 activations, s8 weights, i32 sums. docs/int8.md defines the arithmetic.

lower.py       quantize and dequantize nodes, and what lies between them -> operations on bytes
rules.py       a rule for each operation between them
base.py        what every operation is made of
convolution.py, pool.py, pointwise.py, copy.py    the operations
taps.py        the weights of a convolution in the order in which the kernel reads them
planes.py      how a value lies in memory, and where
segment.py     operations and a number of images -> a program
"""
