"""The estimated cost of planned runs."""

from optg.experiments.cost import CostEstimate
from optg.experiments.declaration import Selection, load_experiment
from tests.experiments.fake_summaries import fake_summary


def test_cost_is_estimated_from_the_most_similar_runs():
    selections = [Selection(only=(method,), seeds=(0,), columns=("99",)) for method in ("optg", "gmp")]
    optg, gmp = (load_experiment("extreme", selection).runs[0] for selection in selections)
    cost = CostEstimate([fake_summary(optg, seconds=80.0), fake_summary(gmp, seconds=160.0)])
    assert cost.seconds(optg) == 80 and cost.seconds(gmp) == 160
    rigl = load_experiment("extreme", Selection(only=("rigl",))).runs[0]
    assert cost.seconds(rigl) == 120  # another method of the same model: the mean
    resnet50 = load_experiment("resnet50").runs[0]
    assert cost.seconds(resnet50) is None and cost.hours([optg, resnet50]) == "unknown"
    assert cost.hours([optg, rigl]) == f"{200 / 3600:.1f}"
    supermask = load_experiment("supermasks", Selection(only=("trained weights",))).runs[-1]
    assert cost.seconds(supermask) == 120  # the model that it starts from counts
