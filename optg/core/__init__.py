"""Sparse weights, masks and time: all that methods and the sparsifier stand on. Needs torch and numpy only."""
