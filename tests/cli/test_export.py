from tests.cli.calling import call, refusal


def test_a_run_is_written_as_a_packed_file(finished_run, tmp_path, monkeypatch, capsys):
    call(monkeypatch, "export", finished_run, "--output", tmp_path / "model.optg")
    assert (tmp_path / "model.optg").is_file() and str(tmp_path / "model.optg") in capsys.readouterr().out


def test_an_unknown_form_is_refused(finished_run, monkeypatch, capsys):
    assert "packed" in refusal(monkeypatch, capsys, "export", finished_run, "--to", "tflite")
