import pytest

from optg.core.clock import Clock
from optg.training.rates import learning_rate
from optg.training.recipe import Recipe


def rates(steps=10, **settings):
    recipe = Recipe(lr=1.0, **{"epochs": 10, **settings})
    return [learning_rate(recipe, Clock(recipe.epochs, steps, step), steps) for step in range(recipe.epochs * steps)]


def test_cosine_falls_from_the_first_step_to_nearly_zero():
    values = rates()
    assert values[0] == 1.0 and values[50] == pytest.approx(0.5) and values[-1] == pytest.approx(0.000247, abs=1e-6)
    assert values == sorted(values, reverse=True)


def test_the_rate_can_change_once_per_epoch():
    values = rates(rate_per="epoch")
    assert len(set(values)) == 10 and values[0] == values[9] == 1.0 and values[50] == values[59] == pytest.approx(0.5)


def test_warmup_rises_to_the_peak():
    values = rates(warmup=2.0)
    assert values[0] == pytest.approx(1 / 21) and values[19] == pytest.approx(20 / 21) and values[20] == 1.0
    assert values[60] == pytest.approx(0.5)  # halfway through the rest


def test_each_cycle_restarts_the_schedule():
    values = rates(cycles=2)
    assert values[0] == values[50] == 1.0 and values[25] == values[75] == pytest.approx(0.5) and values[49] < 0.01
    uneven = rates(epochs=10, steps=1, cycles=3)  # 4 + 4 + 2 steps
    assert [i for i, v in enumerate(uneven) if v == 1.0] == [0, 4, 8]


def test_a_number_of_steps_need_not_be_whole_epochs():
    recipe, clock = Recipe(lr=1.0, warmup=0.5), Clock.of(None, None, 25)
    values = [learning_rate(recipe, clock.at(step), 10) for step in range(25)]
    assert values[0] == pytest.approx(1 / 6) and values[5] == 1.0 and values[15] == pytest.approx(0.5) and values[24] < 0.01


def test_multistep_and_hold():
    assert [rates(schedule="multistep")[i] for i in (0, 49, 50, 74, 75)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    held = rates(schedule="hold")
    assert held[:51] == [1.0] * 51 and held[75] == pytest.approx(0.5) and held[99] < 0.001
    assert set(rates(schedule="constant")) == {1.0}
