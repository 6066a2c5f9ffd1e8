"""Places in the arena: which of them may overlap, on literal examples."""

from optg.deploy.engine.build import library
from optg.deploy.engine.layout import Halo
from optg.deploy.engine.memory import Part, Place, Places, allocate
from optg.deploy.engine.step import Step

SHAPES = dict.fromkeys("abcd", (2, 4, 4))


def make_places(names: str) -> tuple[Places, list[Place]]:
    places = Places(SHAPES, library("scalar"))
    return places, [places.want(name, 1, places.best_form(name, 1)) for name in names]


def step(output: Place, *inputs: Place, reusable: Place | None = None) -> Step:
    return Step("copy", "", output.layout, output, list(inputs), reusable=reusable)


def test_places_that_are_needed_at_the_same_time_do_not_overlap() -> None:
    places, (a, b, c, d) = make_places("abcd")
    size = allocate(places, [step(b, a), step(c, b), step(d, c)])
    assert [(p.born, p.dies) for p in (a, b, c, d)] == [(0, 0), (0, 1), (1, 2), (2, 2)]
    assert a.offset == c.offset == 0 and b.offset == d.offset > a.layout.size - 1
    assert size == b.offset + b.layout.size


def test_an_output_overwrites_an_input_that_nothing_needs_later() -> None:
    places, (a, b, c, d) = make_places("abcd")
    allocate(places, [step(c, a, b, reusable=b), step(d, c)])
    assert c.overwrites is b and c.view().start == b.view().start

    places, (a, b, c, d) = make_places("abcd")
    allocate(places, [step(c, a, b, reusable=b), step(d, b)])
    assert c.overwrites is None and c.offset != b.offset


def test_a_place_that_is_filled_image_by_image_lives_from_the_start() -> None:
    places, (a, b, c, d) = make_places("abcd")
    gather = Step("copy", "", c.layout, Part(c, per_image=4), [b])
    allocate(places, [step(b, a), gather, step(d, c)])
    assert c.born == 0 and len({a.offset, b.offset, c.offset}) == 3


def test_a_larger_halo_changes_the_existing_place_and_another_padding_makes_a_new_one() -> None:
    places, (a, *_) = make_places("a")
    form = places.form("a", 1)
    assert places.want("a", 1, form, Halo(1, 0, 1, 0), 0.0) is a
    assert places.want("a", 1, form, Halo(0, 2, 0, 0)) is a
    assert a.layout.halo == Halo(1, 2, 1, 0) and a.layout.fill == 0.0
    assert places.want("a", 1, form, Halo(1, 1, 1, 1), float("-inf")) is not a
