import json

import pytest

from tests.campaign import driver
from tests.campaign.driver import PLAN, PlannedPart, State

KILLS = next(part for part in PLAN if part.name == "kills")
FAULTS = next(part for part in PLAN if part.name == "faults")


def piece(part: str, seed: int, cases: int, total: int | None = None, failures: tuple[str, ...] = (), **counts: int):
    facts: dict[str, object] = {"date": "2030-01-02", "revision": "abc", "hardware": "a CPU, 2 cores", "seconds": 5.0}
    facts |= {"part": part, "seed": seed, "next": seed + cases, "total": total}
    return facts | {"counts": {"cases": cases, **counts}, "failures": [*failures]}


@pytest.fixture
def state(tmp_path):
    return State(tmp_path / "campaign" / "state.json")


def test_a_part_continues_after_its_last_case(state):
    assert state.next_seed(KILLS) == 0 and state.share(KILLS) == 0
    state.add(piece("kills", 0, 300, kills=250))
    state.add(piece("kills", 300, 100, kills=90))
    again = State(state.path)
    assert again.next_seed(KILLS) == 400 and again.share(KILLS) == 0.34 and again.next_seed(FAULTS) == 0
    again.forget(["kills"])
    assert State(state.path).pieces == []


def test_an_enumeration_is_complete_when_every_case_was_tried(state):
    state.add(piece("faults", 0, 30, total=40))
    assert state.share(FAULTS) == 0.75
    state.add(piece("faults", 30, 10, total=40))
    assert state.share(FAULTS) == 1


def test_the_table_has_recorded_results_only(state, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{driver.BEGIN}\nearlier table\n{driver.END}\nafter\n")
    monkeypatch.setattr(driver, "PAGE", page)
    state.add(piece("kills", 0, 300, kills=250, failures=("seed 7, rigl: model differs",)))
    driver.write_page(state)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "earlier table" not in text
    row = next(line for line in text.splitlines() if line.startswith("| `kills`"))
    assert row.endswith("| 250 | 1,000 | 1 | 0 – 299 | abc | 2030-01-02 |")
    assert "- `kills`: seed 7, rigl: model differs" in text and "a CPU, 2 cores" in text
    assert next(line for line in text.splitlines() if line.startswith("| `soak`")).count("–") == 4 + 4


def test_the_result_is_the_last_line():
    line = {"seed": 3, "next": 8, "seconds": 1.5, "counts": {"cases": 5}, "failures": [], "growth_bytes": 7}
    found = driver.parse("noise\n" + json.dumps(line))
    assert found == {"next": 8, "seconds": 1.5, "counts": {"cases": 5}, "failures": [], "total": None}


def test_a_part_that_breaks_is_a_failure(state):
    found = driver.run_piece(PlannedPart("no_such_part", "", 1), state, 1.0)
    assert found["counts"] == {} and "ended with status 1" in found["failures"][0]
    json.dumps(found)
