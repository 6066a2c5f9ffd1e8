"""Inference that skips the zeros.

lower.py    a captured graph -> a Net: convolutions with norms, additions and activations folded into them
layout.py   how a value lies in memory: which part of which image is in which lane of a vector
plan.py     a Net and a batch size -> a Program: layouts, memory, tiles, the steps that the C code runs
tune.py     which tile suits a layer, by timing, remembered
build.py    the C code, compiled at first use and cached
engine.c    the kernels and the threads
"""
