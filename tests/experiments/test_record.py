import fcntl
import json
import threading

import pytest

from optg.experiments import record
from optg.experiments.declaration import key_of, load
from tests.experiments.known import summary


def test_a_run_is_one_whole_line_and_stands_there_once(tmp_path):
    file = tmp_path / "results" / "a.jsonl"
    first, second = (summary(run) for run in load("dormant-decay").runs[:2])
    assert record.append(file, first) and record.append(file, second)
    elsewhere = json.loads(json.dumps(first))
    elsewhere["settings"]["folder"] = "/mnt/data"  # where the data was is no part of what a run is
    assert not record.append(file, elsewhere)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [json.loads(json.dumps(s)) for s in (first, second)]


def test_two_processes_take_turns(tmp_path):
    file = tmp_path / "a.jsonl"
    thread = threading.Thread(target=record.append, args=(file, summary(load("dormant-decay").runs[0])))
    with file.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive() and not file.read_text()
    thread.join(60)
    assert len(record.read(file)) == 1


def test_a_line_that_was_cut_off_gives_way(tmp_path):
    file = tmp_path / "a.jsonl"
    first, second = (summary(run) for run in load("dormant-decay").runs[:2])
    record.append(file, first)
    with file.open("a") as half:
        half.write(json.dumps(second)[:100])
    assert len(record.read(file)) == 1
    assert record.append(file, second)
    assert len(record.read(file)) == 2 and file.read_text().endswith("}\n")


def test_a_last_line_without_its_end_stays(tmp_path):
    file = tmp_path / "a.jsonl"
    first, second = (summary(run) for run in load("dormant-decay").runs[:2])
    file.write_text(json.dumps(first))
    assert record.append(file, second)
    assert [key_of(row) for row in record.read(file)] == [key_of(first), key_of(second)]


def test_what_is_no_record_is_passed_over_in_a_folder_and_refused_by_name(tmp_path):
    run = summary(load("dormant-decay").runs[0])
    record.append(tmp_path / "a.jsonl", run)
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "c.jsonl").mkdir()
    assert list(record.beside(tmp_path / "a.jsonl")) == list(record.within(tmp_path)) == [key_of(run)]
    with pytest.raises(ValueError, match=r"b\.jsonl, line 1: 'method' is missing; expected a str"):
        record.beside(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").write_text(f'{{"a": 1}}\n{json.dumps(run)}\n')  # one that is damaged is not passed over
    with pytest.raises(ValueError, match=r"b\.jsonl, line 1: 'method' is missing; expected a str"):
        record.beside(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"expected a file whose name ends in \.jsonl"):
        record.beside(tmp_path / "a.txt")


def test_a_damaged_line_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("{}}\n{}\n")
    with pytest.raises(ValueError, match="line 1, is not JSON"):
        record.read(file)
    file.write_text("[]\n")
    with pytest.raises(ValueError, match="line 1 holds a list"):
        record.read(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": None}, "'settings' is None; expected a dict"),
        ({"settings": {}}, "settings: 'model' is missing; expected a str"),
        ({"versions": {}}, "versions: 'torch' is missing"),
        ({"hardware": None}, "'hardware' is None; expected a str"),
        ({"accuracy": float("nan")}, "has a number that no run leaves"),
        ({"epochs": 0}, "has a number that no run leaves; expected finite ones, and at least one epoch"),
        ({"epochs": "3"}, "settings: 'epochs' is '3'; expected a int"),
        ({"milestones": 3}, "has settings that no run can have"),
    ],
)
def test_a_line_that_no_run_left_is_named(tmp_path, change, message):
    line = summary(load("dormant-decay").runs[0])
    for key, value in change.items():
        (line["settings"] if key in line["settings"] else line)[key] = value
    record_file = tmp_path / "a.jsonl"
    record_file.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=f"a.jsonl, line 1.*{message}"):
        record.read(record_file)
    assert record.within(tmp_path) == {}


def test_settings_that_an_older_run_did_not_know_had_their_default():
    run = load("dormant-decay").runs[0]
    older = summary(run)
    del older["settings"]["hold"], older["options"]["every_epochs"]
    assert key_of(older) == run.key
    other = summary(run, options={**run.options, "alpha": 0.7})
    assert key_of(other) != run.key
