"""Plain datasets: each is a module with a `load` that returns tensors."""
