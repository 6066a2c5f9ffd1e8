import shutil

import pytest
import torch

from optg.training.saved import SavedRun


@pytest.fixture
def run(undisturbed, tmp_path):
    """A copy of a finished run, to be damaged."""
    return shutil.copytree(undisturbed, tmp_path / "run")


def newest(run):
    return max((run / "checkpoints").glob("step-*"))


def test_a_run_and_its_last_checkpoint_open_as_the_same_model(run):
    first, second = SavedRun.open(run), SavedRun.open(str(newest(run)))
    assert (first.is_checkpoint, second.is_checkpoint) == (False, True)
    assert first.home == second.home == run and first.plan == second.plan
    assert (first.classes, first.shape) == (second.classes, second.shape) == (4, (1, 8, 8))
    first_model, second_model = first.model(), second.model()
    for name, tensor in first_model.state_dict().items():
        assert torch.equal(tensor, second_model.state_dict()[name])


def test_a_relative_path_of_a_checkpoint_finds_its_run(run, monkeypatch):
    monkeypatch.chdir(newest(run))
    assert SavedRun.open(".").home == run


def test_a_run_folder_may_be_named_like_a_checkpoint(run, tmp_path):
    renamed = run.rename(tmp_path / "step-by-step")
    assert not SavedRun.open(renamed).is_checkpoint


def test_the_newest_checkpoint_is_found(run):
    found = SavedRun.open(run).newest_checkpoint()
    assert found is not None and found.path == newest(run) and found.newest_checkpoint() is found
    shutil.rmtree(run / "checkpoints")
    assert SavedRun.open(run).newest_checkpoint() is None


def test_an_unfinished_run_points_to_its_checkpoint(run):
    (run / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"has no model.safetensors: the run has not finished.* checkpoint {newest(run)}"):
        SavedRun.open(run).model()
    (run / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"has no summary\.json: the run has not finished"):
        _ = SavedRun.open(run).classes


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"classes": 0, "shape": [1, 8, 8]}', '{"classes": 4, "shape": "x"}'])
def test_a_damaged_summary_is_named(run, content):
    (run / "summary.json").write_text(content)
    with pytest.raises(ValueError, match=r"summary\.json is damaged, or from another version of optg"):
        SavedRun.open(run).model()


def test_damaged_weights_are_named(run):
    (run / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        SavedRun.open(run).model()
    (newest(run) / "tensors.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=rf"checkpoint .*{newest(run).name} is damaged .*; others: step-"):
        SavedRun.open(newest(run)).model()


def test_weights_that_do_not_fit_the_model_are_refused(run):
    with pytest.raises(ValueError, match=r"do not fit the model tests.training.user_code:model: .*size mismatch"):
        SavedRun.open(run).model(classes=7)


def test_a_folder_without_a_recipe_is_refused(run, tmp_path):
    for path in (tmp_path, run / "checkpoints", tmp_path.root):
        with pytest.raises(ValueError, match="is neither the folder of a run"):
            SavedRun.open(path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        SavedRun.open(tmp_path / "nothing")
