"""What each layer keeps, as data and as a table."""

import torch
from torch import nn, optim

import optg
from optg.core.prunable import Axes
from optg.core.summary import LayerSummary, as_table
from tests.toy import EPOCHS, STEPS, batches, printed, sparse_convnet, step


def test_layers_count_kept_weights_and_the_last_change_of_the_mask():
    model, optimizer, sparsifier = sparse_convnet("optg")
    before, changes = [], 0
    for batch in batches(EPOCHS * STEPS):
        masks = [m.clone() for m in sparsifier.masks.values()]
        step(model, optimizer, batch)
        if not all(map(torch.equal, masks, sparsifier.masks.values())):
            before, changes = masks, changes + 1
    assert changes == 3  # the mask changes at the start of epochs 2, 3 and 4
    layers = sparsifier.layers()
    assert [(layer.name, layer.shape, layer.weights) for layer in layers] == [
        ("0.weight", (8, 1, 3, 3), 72),
        ("4.weight", (8, 8, 3, 3), 576),
        ("7.weight", (10, 128), 1280),
    ]
    for layer, old, new in zip(layers, before, sparsifier.masks.values(), strict=True):
        counts = int(new.sum()), int((old & ~new).sum()), int((new & ~old).sum())
        assert (layer.kept, layer.removed, layer.revived) == counts
        assert layer.density == layer.kept / layer.weights
    assert sum(layer.kept for layer in layers) == 1928 - 1736
    assert sum(layer.removed for layer in layers) >= sum(layer.revived for layer in layers) > 0


def test_the_summary_prints_every_layer():
    model, optimizer, sparsifier = sparse_convnet("optg")
    for batch in batches(EPOCHS * STEPS):
        step(model, optimizer, batch)
    shown = printed(sparsifier.summary())
    assert shown.splitlines()[0].strip() == "optg, step 20 of 20"
    rows = [line.replace("│", " ").split() for line in shown.splitlines() if "%" in line]
    expected = []
    for x in sparsifier.layers():
        shape = "×".join(map(str, x.shape))
        expected.append([x.name, shape, f"{x.weights:,}", f"{x.kept}", f"{x.density:.2%}", f"{x.removed}", f"{x.revived}"])
    removed, revived = sparsifier.weights.counts.sum(0)[1:].tolist()
    assert rows == [*expected, ["all", "1,928", "192", "9.96%", f"{removed}", f"{revived}"]]


def test_the_table_on_literal_numbers():
    layers = [
        LayerSummary("stem", (8, 1, 3, 3), weights=72, kept=18, removed=50, revived=3, axes=Axes()),
        LayerSummary("head", (10, 128), weights=1280, kept=64, removed=1200, revived=0, axes=Axes()),
    ]
    table = [line.rstrip() for line in printed(as_table(layers, "optg, step 3 of 5")).splitlines()]
    assert table == [
        "optg, step 3 of 5",
        "┏━━━━━━━┳━━━━━━━━━┳━━━━━━━━━┳━━━━━━┳━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━┓",
        "┃ layer ┃   shape ┃ weights ┃ kept ┃ density ┃ removed ┃ revived ┃",
        "┡━━━━━━━╇━━━━━━━━━╇━━━━━━━━━╇━━━━━━╇━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━┩",
        "│ stem  │ 8×1×3×3 │      72 │   18 │  25.00% │      50 │       3 │",
        "│ head  │  10×128 │   1,280 │   64 │   5.00% │   1,200 │       0 │",
        "├───────┼─────────┼─────────┼──────┼─────────┼─────────┼─────────┤",
        "│ all   │         │   1,352 │   82 │   6.07% │   1,250 │       3 │",
        "└───────┴─────────┴─────────┴──────┴─────────┴─────────┴─────────┘",
    ]


def test_a_layer_without_weights():
    model = nn.Sequential(nn.Linear(0, 3), nn.Linear(3, 4))
    sparsifier = optg.sparsify(model, optim.SGD(model.parameters(), 0.1), "gmp", sparsity=0.5, steps=10)
    empty = sparsifier.layers()[0]
    assert (empty.weights, empty.kept, empty.density) == (0, 0, 1.0)
    assert sparsifier.summary().columns[4]._cells[0] == "–"
