import json

from tests.cli.calling import call, refusal


def test_a_run_and_its_last_checkpoint_have_the_recorded_accuracy(finished_run, monkeypatch, capsys):
    newest = max((finished_run / "checkpoints").glob("step-*"))
    for path in (finished_run, newest):
        call(monkeypatch, "evaluate", path, "--device", "cpu")
    first, second = capsys.readouterr().out.splitlines()
    accuracy = json.loads((finished_run / "summary.json").read_text())["accuracy"]
    assert first == second and first.startswith(f"accuracy {accuracy:.2%}  loss")


def test_a_missing_or_wrong_folder_is_refused(tmp_path, monkeypatch, capsys):
    assert "there is no folder /nonexistent; expected" in refusal(monkeypatch, capsys, "evaluate", "/nonexistent")
    assert f"{tmp_path} is neither the folder of a run" in refusal(monkeypatch, capsys, "evaluate", tmp_path)
