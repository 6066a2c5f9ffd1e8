from tests.cli.calling import optg, refusal


def test_images_or_the_test_set_must_be_given(finished_run, monkeypatch, capsys):
    assert "--data test" in refusal(monkeypatch, capsys, "predict", finished_run)


def test_the_old_name_works_and_says_the_new_one():
    old, new = optg("run", "/nonexistent", "--data", "test"), optg("predict", "/nonexistent", "--data", "test")
    assert old.returncode == new.returncode == 2 and old.stdout == new.stdout
    assert old.stderr == "optg: `optg run` is now called `optg predict`\n" + new.stderr
