import shutil

import pytest
import torch

from optg.training.manifest import Manifest
from optg.training.saved import SavedRun
from tests.report.fake_runs import make_old


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
    manifest = Manifest.read(run)
    Manifest({"recipe.toml": manifest.files["recipe.toml"]}).write(run)
    (run / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"has no model.safetensors: the run has not finished.* checkpoint {newest(run)}"):
        SavedRun.open(run).model()
    (run / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"has no summary\.json: the run has not finished"):
        _ = SavedRun.open(run).classes
    manifest.write(run)
    with pytest.raises(ValueError, match=r"has no summary\.json: manifest\.json lists it, so it was lost"):
        _ = SavedRun.open(run).classes


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"classes": 0, "shape": [1, 8, 8]}', '{"classes": 4, "shape": "x"}'])
def test_a_damaged_summary_is_named(run, content):
    (run / "summary.json").write_text(content)
    with pytest.raises(ValueError, match=r"summary\.json is damaged: it has .* bytes; manifest\.json lists"):
        SavedRun.open(run).model()
    make_old(run)
    with pytest.raises(ValueError, match=r"summary\.json is damaged(, or from another version of optg|: Expecting)"):
        SavedRun.open(run).model()


def test_an_impossible_shape_is_refused_before_memory_is_allocated(run):
    make_old(run)
    (run / "summary.json").write_text('{"classes": 4, "shape": [1, 100000, 100000]}')
    with pytest.raises(ValueError, match=r"summary\.json states images of 1×100000×100000; expected at most 67,108,864"):
        _ = SavedRun.open(run).shape


@pytest.mark.parametrize("file", ["recipe.toml", "summary.json", "model.safetensors", "manifest.json"])
def test_a_changed_bit_in_any_file_is_noticed(run, file):
    size = (run / file).stat().st_size
    for position in range(0, size, max(1, size // 40)):
        content = bytearray((run / file).read_bytes())
        content[position] ^= 1 << position % 8
        (run / file).write_bytes(content)
        with pytest.raises(ValueError, match=f"{file} is damaged"):
            SavedRun.open(run).model()
        content[position] ^= 1 << position % 8
        (run / file).write_bytes(content)
    SavedRun.open(run).model()


def test_a_run_of_an_older_version_opens_with_one_warning(run):
    make_old(run)
    with pytest.warns(UserWarning, match=r"has no manifest\.json: an older version wrote it") as caught:
        SavedRun.open(run).model()
    assert len(caught) == 1


def test_a_lost_manifest_is_noticed(run):
    (run / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"has lost its manifest\.json"):
        SavedRun.open(run)


def test_a_file_that_the_manifest_does_not_list_yet_is_unfinished(run):
    manifest = Manifest.read(run)
    del manifest.files["model.safetensors"]
    manifest.write(run)
    with pytest.raises(ValueError, match=r"has no model\.safetensors: the run has not finished"):
        SavedRun.open(run).model()


@pytest.mark.parametrize("name", ["step-5", "step-000000001.damaged", "step-000000001-copy"])
def test_a_folder_named_almost_like_a_checkpoint_is_refused(run, name):
    copy = shutil.copytree(newest(run), run / "checkpoints" / name)
    with pytest.raises(ValueError, match="is neither the folder of a run"):
        SavedRun.open(copy)


def test_a_run_opened_as_the_current_folder_has_its_name(run, monkeypatch):
    monkeypatch.chdir(run)
    assert SavedRun.open(".").plan.name == "run"


def test_damaged_weights_are_named(run):
    (run / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        SavedRun.open(run).model()
    make_old(run)
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
