"""Make trained models small and fast: packed files, export, inference that skips the zeros, and benchmarks."""
