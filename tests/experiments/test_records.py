"""Record files: reading, appending, and damaged ones."""

import fcntl
import json
import threading

import pytest

from optg.experiments.declaration import load_experiment
from optg.experiments.planned_run import run_key
from optg.experiments.records import append_record, read_records, records_beside, records_in
from tests.experiments.fake_summaries import fake_summary


def test_a_run_is_recorded_once_as_one_whole_line(tmp_path):
    file = tmp_path / "results" / "a.jsonl"
    first, second = (fake_summary(run) for run in load_experiment("dormant-decay").runs[:2])
    assert append_record(file, first) and append_record(file, second)
    elsewhere = json.loads(json.dumps(first))
    elsewhere["settings"]["folder"] = "/mnt/data"  # the folder of the data does not make it another run
    assert not append_record(file, elsewhere)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [json.loads(json.dumps(s)) for s in (first, second)]


def test_two_processes_take_turns(tmp_path):
    file = tmp_path / "a.jsonl"
    thread = threading.Thread(target=append_record, args=(file, fake_summary(load_experiment("dormant-decay").runs[0])))
    with file.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive() and not file.read_text()
    thread.join(60)
    assert len(read_records(file)) == 1


def test_a_last_line_that_was_cut_off_is_replaced(tmp_path):
    file = tmp_path / "a.jsonl"
    first, second = (fake_summary(run) for run in load_experiment("dormant-decay").runs[:2])
    append_record(file, first)
    with file.open("a") as half:
        half.write(json.dumps(second)[:100])
    assert len(read_records(file)) == 1
    assert append_record(file, second)
    assert len(read_records(file)) == 2 and file.read_text().endswith("}\n")


def test_a_last_line_without_a_newline_is_kept(tmp_path):
    file = tmp_path / "a.jsonl"
    first, second = (fake_summary(run) for run in load_experiment("dormant-decay").runs[:2])
    file.write_text(json.dumps(first))
    assert append_record(file, second)
    assert [run_key(row) for row in read_records(file)] == [run_key(first), run_key(second)]


def test_a_file_that_is_no_record_is_skipped_in_a_folder_and_refused_by_name(tmp_path):
    run = fake_summary(load_experiment("dormant-decay").runs[0])
    append_record(tmp_path / "a.jsonl", run)
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "c.jsonl").mkdir()
    assert list(records_beside(tmp_path / "a.jsonl")) == list(records_in(tmp_path)) == [run_key(run)]
    with pytest.raises(ValueError, match=r"b\.jsonl, line 1: 'method' is missing; expected a str"):
        records_beside(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").write_text(f'{{"a": 1}}\n{json.dumps(run)}\n')  # a damaged record is not skipped
    with pytest.raises(ValueError, match=r"b\.jsonl, line 1: 'method' is missing; expected a str"):
        records_beside(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"expected a file whose name ends in \.jsonl"):
        records_beside(tmp_path / "a.txt")


def test_a_damaged_line_is_reported_with_its_number(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("{}}\n{}\n")
    with pytest.raises(ValueError, match="line 1, is not JSON"):
        read_records(file)
    file.write_text("[]\n")
    with pytest.raises(ValueError, match="line 1 holds a list"):
        read_records(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": None}, "'settings' is None; expected a dict"),
        ({"settings": {}}, "settings: 'model' is missing; expected a str"),
        ({"versions": {}}, "versions: 'torch' is missing"),
        ({"hardware": None}, "'hardware' is None; expected a str"),
        ({"accuracy": float("nan")}, "has an impossible number"),
        ({"epochs": 0}, "has an impossible number; expected finite numbers and at least one epoch"),
        ({"epochs": "3"}, "settings: 'epochs' is '3'; expected a int"),
        ({"milestones": 3}, "has impossible settings"),
    ],
)
def test_an_impossible_summary_is_reported_with_its_line(tmp_path, change, message):
    line = fake_summary(load_experiment("dormant-decay").runs[0])
    for key, value in change.items():
        (line["settings"] if key in line["settings"] else line)[key] = value
    record_file = tmp_path / "a.jsonl"
    record_file.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=f"a.jsonl, line 1.*{message}"):
        read_records(record_file)
    assert records_in(tmp_path) == {}


@pytest.mark.parametrize("line", ["[" * 100_000, '{"a": ' * 100_000, "1" * 5000])
def test_a_hostile_line_is_refused(tmp_path, line):
    file = tmp_path / "a.jsonl"
    append_record(file, fake_summary(load_experiment("dormant-decay").runs[0]))
    file.write_text(f"{line}\n{file.read_text()}")
    for read in (read_records, lambda file: records_in(file.parent)):
        with pytest.raises(ValueError, match=r"a\.jsonl, line 1"):
            read(file)


def test_an_integer_of_400_digits_is_refused(tmp_path):
    summary = fake_summary(load_experiment("dormant-decay").runs[0])
    for change in ({"flops": 10**400}, {"seconds": 10**400}, {"settings": {**summary["settings"], "epochs": 10**400}}):
        (tmp_path / "a.jsonl").write_text(json.dumps(summary | change) + "\n")
        with pytest.raises(ValueError, match=r"a\.jsonl, line 1"):
            read_records(tmp_path / "a.jsonl")
