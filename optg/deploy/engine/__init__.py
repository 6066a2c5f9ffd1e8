"""Inference that skips the zeros.

net.py      the operations that the engine has
lower.py    a captured graph -> these operations: norms, additions and activations folded into convolutions
layout.py   how a value lies in memory: which part of which image is in which lane of a vector
plan.py     operations and a batch size -> a Program: layouts, memory, tiles, the steps that the C code runs
tune.py     which tile suits a layer, by timing, remembered
build.py    the C code, compiled at first use and cached
structs.py  the structs that both sides share
engine.c    the kernels and the threads
"""
