import json
import os

import pytest

from optg.training.errors import DamagedFile
from optg.training.metrics import Head, MetricsFile, Rows, read_rows


def row(epoch: int) -> dict[str, object]:
    return {"step": 10 * epoch, "epoch": epoch, "seconds": 0.1 * epoch, "accuracy": 1 / (epoch + 2), "note": "ä"}


@pytest.fixture
def metrics(tmp_path):
    file = MetricsFile(tmp_path)
    for epoch in range(1, 7):
        file.append(row(epoch))
    return file


def test_rows_are_read_as_they_were_appended(metrics):
    found = read_rows(metrics.path)
    assert [{k: v for k, v in r.items() if k != "checksum"} for r in found.intact] == [row(epoch) for epoch in range(1, 7)]
    assert found.head == metrics.head and found.head.rows == 6 and not found.problems and found.chained and not found.cut_off
    assert Head.parse(json.loads(json.dumps(found.head.to_json()))) == found.head


def test_every_changed_byte_and_every_lost_line_shows(metrics):
    content = metrics.path.read_bytes()
    for position in range(0, len(content)):
        broken = bytearray(content)
        broken[position] ^= 1
        metrics.path.write_bytes(broken)
        assert read_rows(metrics.path).head != metrics.head or read_rows(metrics.path).problems
    lines = content.splitlines(keepends=True)
    for lost in range(6):
        metrics.path.write_bytes(b"".join(lines[:lost] + lines[lost + 1 :]))
        assert read_rows(metrics.path).head != metrics.head
    metrics.path.write_bytes(b"".join([lines[1], lines[0], *lines[2:]]))
    assert read_rows(metrics.path).problems


def test_a_damaged_row_does_not_condemn_the_rows_after_it(metrics):
    text = metrics.path.read_text().replace('"epoch": 3', '"epoch": 9')
    metrics.path.write_text(text)
    found = read_rows(metrics.path)
    assert [r["epoch"] for r in found.intact] == [1, 2, 4, 5, 6]
    assert found.problems == ["line 3 is damaged, or the line before it is lost: its checksum is wrong"]


def test_rewinding_keeps_the_chain(metrics):
    heads = {epoch: Rows(metrics.rows[:epoch]).head for epoch in range(7)}
    for epoch in (6, 4, 2, 0):
        again = MetricsFile(metrics.path.parent)
        assert again.rewind(10 * epoch, heads[epoch]) is None and again.head == heads[epoch]
        again.append(row(epoch + 1))
        assert not read_rows(metrics.path).problems and read_rows(metrics.path).head == heads.get(epoch + 1, again.head)


def test_rewinding_touches_a_file_only_if_it_must(metrics):
    before = metrics.path.stat().st_ino
    assert MetricsFile(metrics.path.parent).rewind(60, metrics.head) is None
    assert metrics.path.stat().st_ino == before


@pytest.mark.parametrize("junk", [b'{"step": 70, "ep', b"\xff\xfe\n", b'{"step": 70}\n', b"[1]\n", b"[" * 100_000 + b"\n"])
def test_what_follows_the_rows_of_the_checkpoint_is_dropped(metrics, junk):
    content = metrics.path.read_bytes()
    with metrics.path.open("ab") as file:
        file.write(junk)
    assert MetricsFile(metrics.path.parent).rewind(60, metrics.head) is None
    assert metrics.path.read_bytes() == content


def test_lost_rows_are_said_and_the_file_is_kept(metrics, tmp_path):
    lines = metrics.path.read_bytes().splitlines(keepends=True)
    broken = b"".join([lines[0], *lines[2:]])
    metrics.path.write_bytes(broken)
    again = MetricsFile(tmp_path)
    said = again.rewind(60, metrics.head)
    assert said is not None and "4 of 6 rows before step 60 are intact" in said and "metrics.jsonl.damaged" in said
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == broken
    assert [r["epoch"] for r in read_rows(metrics.path).intact] == [1, 4, 5, 6] and not read_rows(metrics.path).problems
    metrics.path.unlink()
    assert "0 of 6 rows" in str(MetricsFile(tmp_path).rewind(60, metrics.head))


def test_rows_of_an_older_version_get_checksums(metrics):
    expected = metrics.path.read_bytes()
    plain = [{k: v for k, v in r.items() if k != "checksum"} for r in metrics.rows]
    metrics.path.write_text("".join(json.dumps(r) + "\n" for r in plain))
    assert not read_rows(metrics.path).chained and len(read_rows(metrics.path).intact) == 6
    MetricsFile(metrics.path.parent).upgrade()
    assert metrics.path.read_bytes() == expected


def test_a_link_is_not_appended_to(tmp_path):
    (tmp_path / "outside").write_text("precious")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError):
        MetricsFile(tmp_path).append(row(1))
    with pytest.raises(ValueError, match="is a symbolic link"):
        _ = MetricsFile(tmp_path).is_empty
    assert (tmp_path / "outside").read_text() == "precious"


@pytest.mark.parametrize("value", [3, [], {"rows": "6", "checksum": ""}, {"rows": 6}])
def test_an_impossible_head_is_damage(value):
    with pytest.raises(DamagedFile):
        Head.parse(value)


def test_a_read_error_is_no_damage(metrics, monkeypatch):
    real = os.open

    def failing(path, *args):
        if os.fspath(path) == str(metrics.path):
            raise OSError(5, "Input/output error")
        return real(path, *args)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(OSError, match=r"Input/output error: '.*metrics\.jsonl'"):
        read_rows(metrics.path)
