"""Trained models made small and fast: packed files, export, inference that skips the zeros, and its benchmarks."""
