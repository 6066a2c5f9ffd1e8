import shutil

import optg
from tests.cli.calling import call, refusal


def test_a_run_is_written_as_a_packed_file(finished_run, tmp_path, monkeypatch, capsys):
    call(monkeypatch, "export", finished_run, "--output", tmp_path / "model.optg")
    assert (tmp_path / "model.optg").is_file() and str(tmp_path / "model.optg") in capsys.readouterr().out


def test_an_unknown_form_is_refused(finished_run, monkeypatch, capsys):
    assert "packed" in refusal(monkeypatch, capsys, "export", finished_run, "--to", "tflite")


def test_a_run_is_exported_from_inside_its_folder(finished_run, tmp_path, monkeypatch, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(finished_run, copy)
    monkeypatch.chdir(copy)
    call(monkeypatch, "export", ".")
    assert (copy / "model.optg").is_file() and optg.load(copy / "model.optg").about.name == "copy"
    newest = max((copy / "checkpoints").glob("step-*"))
    before = sorted(newest.iterdir())
    monkeypatch.chdir(newest)
    call(monkeypatch, "export", ".")
    assert (copy / f"{newest.name}.optg").is_file() and sorted(newest.iterdir()) == before
