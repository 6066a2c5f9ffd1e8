import pytest

from tests.cli.calling import call, refusal


def test_a_run_and_its_last_checkpoint_have_the_same_layers(finished_run, monkeypatch, capsys):
    newest = max((finished_run / "checkpoints").glob("step-*"))
    for path in (finished_run, newest):
        call(monkeypatch, "summary", path)
    first, second = (text.splitlines() for text in capsys.readouterr().out.split("all parameters")[:2])
    assert len(first) > 6 and [line for line in first if "weight" in line] == [line for line in second if "weight" in line]


@pytest.mark.parametrize("name", ["digits", "vgg19"])
def test_each_model_has_its_own_default_shape(name, monkeypatch, capsys):
    call(monkeypatch, "summary", name)
    assert "all parameters" in capsys.readouterr().out
    message = refusal(monkeypatch, capsys, "summary", name, "--shape", 2, 8, 8)
    assert f"{name} does not take images of 2×8×8; give another --shape" in message


def test_a_missing_folder_is_refused(monkeypatch, capsys):
    assert "there is no folder /nonexistent" in refusal(monkeypatch, capsys, "summary", "/nonexistent")
