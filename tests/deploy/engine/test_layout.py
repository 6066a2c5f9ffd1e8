"""Layouts against tables written by hand."""

from optg.deploy.engine.layout import Grid, Halo, Layout, best_grid


def test_halo_of_an_image_in_two_lanes() -> None:
    """A 3 × 4 image in two lanes, left and right; its halo of one column repeats the neighbour's edge."""
    layout = Layout(1, 3, 4, Grid(1, 1, 2), 3, 2, 2, Halo(0, 0, 1, 1), 0.0)
    assert layout.pixels.tolist() == [[[0, 2], [1, 3]], [[4, 6], [5, 7]], [[8, 10], [9, 11]]]
    edges, masks = layout.edges
    table = {tuple(edge[:2].tolist()): masks[edge[2]].tolist() for edge in edges[:2]}
    # Before the first column: the second, one lane earlier, for the right block only. After the last: the first, one later.
    assert table == {(-8, 8 - 4): [0, -1], (16, 0 + 4): [-1, 0]}


def test_best_grid_has_the_fewest_vectors() -> None:
    assert best_grid(56, 56, 1, 16) == Grid(1, 4, 4)
    assert best_grid(7, 7, 1, 16)[0] == 1
    assert best_grid(7, 7, 16, 16) == Grid(16, 1, 1)
    assert best_grid(1, 1, 1, 16) == Grid(1, 1, 1)
