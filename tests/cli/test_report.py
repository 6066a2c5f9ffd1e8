from tests.cli.calling import call, refusal


def test_the_page_is_written_and_its_path_printed(finished_run, tmp_path, monkeypatch, capsys):
    call(monkeypatch, "report", finished_run, "--output", tmp_path)
    assert capsys.readouterr().out.strip() == str(tmp_path / "index.html") and (tmp_path / "index.html").is_file()


def test_runs_must_be_given(monkeypatch, capsys):
    assert "nothing to report" in refusal(monkeypatch, capsys, "report")
