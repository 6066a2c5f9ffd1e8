"""FLOPs of a whole training."""

import pytest

from optg.core.accounting import Account, Layer
from optg.core.clock import Clock
from optg.methods import ACDC, DPF, GMP, Dense, Feather, OptG, RigL
from optg.training.cost import training_flops

LAYERS = [Layer("a", (10, 10), 5, 50, 250, 500), Layer("b", (4, 5), 1, 20, 20, 20)]  # 520 dense FLOPs
ROWS = [{"step": 10, "layers": {"a": [0, 0, 0], "b": [0, 0, 0]}}, {"step": 16, "layers": {"a": [60, 60, 0], "b": [10, 10, 0]}}]
SPARSE = 520 - 60 * 5 - 10


@pytest.mark.parametrize(
    "method, dense_gradients",
    [
        (Dense(), 0), (GMP(), 0), (ACDC(), 0), (OptG(), 6), (DPF(), 6),
        (RigL(every=4, end=1.0), 1),  # of steps 10 to 15, the exchange is at step 12
    ],
)  # fmt: skip
def test_a_step_costs_three_times_the_sparse_model_or_reads_dense_gradients(method, dense_gradients):
    total = training_flops(Account(120, 70, LAYERS), method, Clock(1, 16), ROWS, batch_size=2)
    assert total == 2 * (3 * 520 * 10 + 3 * SPARSE * 6 + (520 - SPARSE) * dense_gradients)


def test_a_share_of_dormant_gradients_needs_all_of_them():
    method = Feather()
    method.share = 0.5
    assert method.reads_removed(Clock(1, 16))
