"""Reproduce the paper's tables and figures, declared in contents.toml as lists of runs; measure the independence paradox."""
