import shutil

import pytest

from tests.cli.calling import call, refusal


def verify(monkeypatch, capsys, *runs) -> tuple[int, str]:
    with pytest.raises(SystemExit) as exit:
        call(monkeypatch, "verify", *runs)
    return exit.value.code, capsys.readouterr().out


def test_whole_runs_exit_with_0_and_damaged_ones_with_1(finished_run, tmp_path, monkeypatch, capsys):
    copy = shutil.copytree(finished_run, tmp_path / "copy")
    call(monkeypatch, "export", copy)
    capsys.readouterr()
    status, text = verify(monkeypatch, capsys, finished_run, copy)
    assert status == 0 and text.count("nothing is damaged\n") == 2 and "  whole         model.optg\n" in text
    content = bytearray((copy / "model.optg").read_bytes())
    content[-1] ^= 1
    (copy / "model.optg").write_bytes(content)
    status, text = verify(monkeypatch, capsys, finished_run, copy)
    assert status == 1 and f"{copy}: damaged\n" in text and "  damaged       model.optg: the tensors are damaged" in text
    assert f"  recoverable: model.optg; export the run again: optg export {copy}\n" in text


def test_a_packed_file_beyond_the_limits_is_not_damaged(finished_run, tmp_path, monkeypatch, capsys):
    copy = shutil.copytree(finished_run, tmp_path / "copy")
    call(monkeypatch, "export", copy)
    capsys.readouterr()
    monkeypatch.setenv("OPTG_LIMITS", "1e-6")
    status, text = verify(monkeypatch, capsys, copy)
    assert status == 0 and "  unverifiable  model.optg: " in text and "If you trust the file, raise the limits" in text


def test_a_folder_that_is_no_run_is_refused(tmp_path, monkeypatch, capsys):
    assert f"{tmp_path} is not the folder of a run" in refusal(monkeypatch, capsys, "verify", tmp_path)


@pytest.mark.parametrize("command", [("evaluate",), ("export",), ("predict", "--data", "test"), ("summary",), ("report",)])
def test_every_command_refuses_a_changed_weight(finished_run, tmp_path, monkeypatch, capsys, command):
    """A flipped exponent bit in the model used to change the accuracy without a word."""
    copy = shutil.copytree(finished_run, tmp_path / "copy")
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 64
    (copy / "model.safetensors").write_bytes(content)
    name, *options = command
    output = ["--output", tmp_path / "out"] if name in ("export", "report") else []
    message = refusal(monkeypatch, capsys, name, copy, *options, *output)
    assert "model.safetensors is damaged: its SHA-256 differs from the one in manifest.json" in message
    assert message.endswith("; optg verify RUN says what can be recovered\n") and message.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_runs_must_be_given(monkeypatch, capsys):
    assert "no run was given" in refusal(monkeypatch, capsys, "verify")
