"""CPU inference that skips zero weights.

lower.py      a captured graph -> segments of operations, and nodes that are left to torch
ops/          one file per kind of operation: its torch operations, layout, memory and C struct
int8/         the same for quantized graphs, on bytes
layout.py     how a value lies in memory: which part of which image is in which lane of a vector
memory.py     the copies of each value, and where they lie in the arena
step.py       one call of a C function
plan.py       a segment and a number of images -> a Program: steps, in the order in which C runs them
tune.py       chooses tiles and cuts by timing, and remembers the choices
runner.py     threads and memory to run programs with
build.py      compiles the C code at first use and caches it
structs.py    the structs that Python and C share
c/            vectors.h, bytes.h, program.h, engine.c (threads), and one file per operation in ops/
"""
