import json

import pytest

from tests.campaign import driver, page
from tests.campaign.record import PLAN, RESULTS, PlannedPart, Record

KILLS = next(part for part in PLAN if part.name == "kills")
FAULTS = next(part for part in PLAN if part.name == "faults")


def piece(seed: int, cases: int, total: int | None = None, failures: tuple[str, ...] = (), **counts: int):
    facts: dict[str, object] = {"date": "2030-01-02", "revision": "abc", "hardware": "a CPU, 2 cores", "seconds": 5.0}
    facts |= {"seed": seed, "next": seed + cases, "total": total}
    return facts | {"counts": {"cases": cases, **counts}, "failures": [*failures]}


@pytest.fixture
def record(tmp_path):
    return Record(tmp_path / "results")


def test_a_part_continues_after_its_last_case(record):
    assert record.next_seed(KILLS) == 0 and record.share(KILLS) == 0
    record.add("kills", piece(0, 300, kills=250))
    record.add("kills", piece(300, 100, kills=90))
    again = Record(record.folder)
    assert again.next_seed(KILLS) == 400 and again.share(KILLS) == 0.34 and again.next_seed(FAULTS) == 0
    again.forget(["kills"])
    assert Record(record.folder).of(KILLS) == []


def test_pieces_that_continue_each_other_become_one_entry(record):
    record.add("kills", piece(0, 300, kills=250, failures=("seed 7",)))
    record.add("kills", piece(300, 100, kills=90))
    record.add("kills", piece(5000, 10, kills=9))
    record.add("kills", piece(400, 1) | {"revision": "def"})
    first = piece(0, 400, kills=340, failures=("seed 7",)) | {"seconds": 10}
    assert record.of(KILLS)[0] == first and [entry["seed"] for entry in record.of(KILLS)] == [0, 5000, 400]
    assert record.next_seed(KILLS, 5000) == 5010 and record.next_seed(KILLS, 9000) == 9000


def test_results_of_another_machine_are_added_once(record, tmp_path):
    other = Record(tmp_path / "other")
    other.add("kills", piece(0, 300, kills=250) | {"hardware": "another CPU"})
    record.add("kills", piece(300, 100, kills=90))
    record.merge(other)
    record.merge(Record(other.folder))
    assert record.counts(KILLS)["kills"] == 340


def test_an_enumeration_is_complete_when_every_case_was_tried(record):
    record.add("faults", piece(0, 30, total=40))
    assert record.share(FAULTS) == 0.75
    record.add("faults", piece(30, 10, total=40))
    assert record.share(FAULTS) == 1


def test_the_table_has_recorded_results_only(record, tmp_path, monkeypatch):
    path = tmp_path / "page.md"
    path.write_text(f"before\n{page.BEGIN}\nearlier table\n{page.END}\nafter\n")
    monkeypatch.setattr(page, "PAGE", path)
    record.add("kills", piece(0, 300, kills=250, failures=("seed 7, rigl: model differs",)))
    record.add("kills", piece(1000, 1) | {"mended": ["seed 1000: fixed"], "revision": "def"})
    page.write_page(record)
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "earlier table" not in text
    row = next(line for line in text.splitlines() if line.startswith("| `kills`"))
    assert row.endswith("| 250 | 1,000 | 1 (1 fixed) | 0 – 299, 1,000 – 1,000 | abc – def | 2030-01-02 |")
    assert "- `kills`: seed 7, rigl: model differs" in text and "- `kills`: seed 1000: fixed" in text
    assert "a CPU, 2 cores" in text
    assert next(line for line in text.splitlines() if line.startswith("| `soak`")).count("–") == 4 + 4


def test_the_page_shows_what_is_recorded():
    assert page.table(Record(RESULTS)) in page.PAGE.read_text()


def test_the_result_is_the_last_line():
    line = {"seed": 3, "next": 8, "seconds": 1.5, "counts": {"cases": 5}, "failures": [], "growth_bytes": 7}
    found = driver.parse("noise\n" + json.dumps(line))
    assert found == {"next": 8, "seconds": 1.5, "counts": {"cases": 5}, "failures": [], "total": None}


def test_a_part_that_breaks_is_a_failure(record):
    found = driver.run_piece(PlannedPart("no_such_part", "", 1), record, 1.0)
    assert found["counts"] == {} and "ended with status 1" in found["failures"][0]
    json.dumps(found)
