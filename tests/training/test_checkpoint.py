import errno
import json
import os
import random
import shutil
import subprocess
import warnings

import pytest
import torch

from optg.training import checkpoint
from optg.training.errors import DamagedFile


def example(seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    tensors = {
        "weight": torch.randn(5, 7, generator=g),
        "last": torch.randn(2, 3, 4, 4, generator=g).to(memory_format=torch.channels_last),
        "half": torch.randn(3, generator=g).bfloat16(),
        "mask": torch.rand(3, 5, generator=g) > 0.5,
        "scalar": torch.tensor(3.0),
        "count": torch.tensor(7),
    }
    return tensors, {"epoch": seed, "note": "ä", "list": [1, 2.5, None, True]}


def same(a, b):
    return set(a) == set(b) and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def test_a_checkpoint_loads_as_it_was_saved(tmp_path):
    tensors, values = example()
    path = checkpoint.save(tmp_path, 12, tensors, values, keep=2)
    found, got, said = checkpoint.load_newest(tmp_path)
    assert found == path == tmp_path / "step-000000012"
    assert same(got, tensors) and said == values


def test_masks_take_one_bit_per_weight(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"mask": torch.ones(1000, 1000, dtype=torch.bool)}, {}, keep=1)
    assert (path / "tensors.safetensors").stat().st_size < 126_000


def test_only_the_last_checkpoints_are_kept(tmp_path):
    for step in (1, 5, 20, 100):
        checkpoint.save(tmp_path, step, *example(step), keep=2)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-000000020", "step-000000100"]
    for step in (30, 40):  # a save deletes no later checkpoint
        checkpoint.save(tmp_path, step, *example(step), keep=2)
    assert [checkpoint.step_of(p) for p in checkpoint.list_checkpoints(tmp_path)] == [30, 40, 100]


@pytest.mark.parametrize("file", ["tensors.safetensors", "values.json"])
@pytest.mark.parametrize("harm", ["truncate", "flip", "empty", "remove"])
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(tmp_path, file, harm):
    checkpoint.save(tmp_path, 1, *example(1), keep=2)
    path = checkpoint.save(tmp_path, 2, *example(2), keep=2) / file
    content = bytearray(path.read_bytes())
    rng = random.Random(0)
    for _ in range(20 if harm == "flip" else 1):
        broken = bytearray(content)
        if harm == "flip":
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        path.write_bytes(broken[: len(broken) // 2] if harm == "truncate" else broken if harm == "flip" else b"")
        if harm == "remove":
            path.unlink()
        with pytest.warns(UserWarning, match="checkpoint step-000000002 is damaged"):
            found, tensors, values = checkpoint.load_newest(tmp_path)
        assert found.name == "step-000000001" and same(tensors, example(1)[0]) and values["epoch"] == 1


def test_damaged_checkpoints_alone_are_an_error_and_stay(tmp_path):
    for step in (1, 2):
        path = checkpoint.save(tmp_path, step, *example(), keep=2)
        (path / "values.json").write_text(json.dumps({"body": "{}", "checksum": "0"}))
    with pytest.raises(DamagedFile, match=r"no checkpoint in .* is whole: .*step-000000002 .*step-000000001"):
        checkpoint.load_newest(tmp_path)
    assert len(checkpoint.list_checkpoints(tmp_path)) == 2


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("file", ["tensors.safetensors", "values.json"])
def test_a_read_error_is_not_taken_for_damage(tmp_path, monkeypatch, file, code):
    checkpoint.save(tmp_path, 1, *example(1), keep=2)
    path = checkpoint.save(tmp_path, 2, *example(2), keep=2) / file
    real = os.open

    def failing(name, *args, **kwargs):
        if os.fspath(name) == str(path):
            raise OSError(code, os.strerror(code))
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(OSError, match=f"{os.strerror(code)}: '{path}'") as error:
        checkpoint.load_newest(tmp_path)
    assert error.value.errno == code
    monkeypatch.undo()
    assert checkpoint.load_newest(tmp_path)[0] == path.parent


def test_a_whole_checkpoint_of_the_same_step_is_left_alone(tmp_path):
    path = checkpoint.save(tmp_path, 1, *example(1), keep=1)
    before = {file: ((path / file).stat().st_ino, (path / file).read_bytes()) for file in os.listdir(path)}
    assert checkpoint.save(tmp_path, 1, *example(2), keep=1) == path
    assert before == {file: ((path / file).stat().st_ino, (path / file).read_bytes()) for file in os.listdir(path)}


def test_a_damaged_checkpoint_of_the_same_step_is_set_aside(tmp_path):
    for seed in (1, 2, 3):
        path = checkpoint.save(tmp_path, 1, *example(seed), keep=1)
        (path / "values.json").write_text(f"damaged {seed}")
    assert checkpoint.save(tmp_path, 1, *example(4), keep=1) == path and checkpoint.load(path)[1]["epoch"] == 4
    aside = sorted(tmp_path.glob("*.damaged*"))
    assert [p.name for p in aside] == [f"step-000000001.damaged{end}" for end in ("", "-1", "-2")]
    assert [(p / "values.json").read_text() for p in aside] == ["damaged 1", "damaged 2", "damaged 3"]


def test_names_that_are_not_exactly_a_checkpoint_do_not_count(tmp_path):
    newest = checkpoint.save(tmp_path, 132, *example(), keep=2)
    shutil.copytree(newest, tmp_path / "step-000000200.backup")
    shutil.copytree(newest, tmp_path / "step-5")
    (tmp_path / "step-000000300").symlink_to(newest)
    (tmp_path / "step-000000400").write_text("a file")
    (tmp_path / "step-999999999").mkdir()
    (tmp_path / "step-999999999" / "thesis.txt").write_text("years of work")
    assert checkpoint.list_checkpoints(tmp_path) == [newest] and checkpoint.load_newest(tmp_path)[0] == newest
    for step in (133, 134, 135):
        checkpoint.save(tmp_path, step, *example(), keep=1)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-000000135"]
    left = {"step-000000200.backup", "step-5", "step-000000300", "step-000000400", "step-999999999"}
    assert left < {p.name for p in tmp_path.iterdir()}
    assert (tmp_path / "step-999999999" / "thesis.txt").read_text() == "years of work"


def test_a_checkpoint_with_a_file_that_is_not_ours_is_not_deleted(tmp_path):
    (checkpoint.save(tmp_path, 1, *example(), keep=1) / "thesis.txt").write_text("years of work")
    checkpoint.save(tmp_path, 2, *example(), keep=1)
    assert (tmp_path / "step-000000001" / "thesis.txt").exists() and (tmp_path / "step-000000001" / "values.json").exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_something_in_the_way_does_not_stop_a_save(tmp_path, kind):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "tensors.safetensors").write_text("precious")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in (".partial-9", ".partial-8", "step-000000009"):
        if kind == "file":
            (folder / name).write_text("in the way")
        elif kind == "folder":
            (folder / name).mkdir()
            (folder / name / "notes.txt").write_text("in the way")
        else:
            (folder / name).symlink_to(outside)
    assert checkpoint.load(checkpoint.save(folder, 9, *example(), keep=1))[1] == example()[1]
    assert (folder / ".partial-9").exists() and (outside / "tensors.safetensors").read_text() == "precious"
    assert os.path.lexists(folder / "step-000000009.damaged")


def test_a_fifo_in_a_checkpoint_is_refused_instead_of_waited_for(tmp_path):
    path = checkpoint.save(tmp_path, 1, *example(), keep=1)
    (path / "values.json").unlink()
    os.mkfifo(path / "values.json")
    with pytest.raises(OSError, match="Not a regular file"):
        checkpoint.load(path)


def test_a_mask_of_another_size_than_its_bits_is_damage(tmp_path):
    path = checkpoint.save(tmp_path, 1, *example(), keep=1)
    body = json.loads(json.loads((path / "values.json").read_text())["body"])
    body["masks"]["mask"] = [10**6, 10**7]
    text = json.dumps(body)
    (path / "values.json").write_text(json.dumps({"checksum": checkpoint.checksum(text), "body": text}))
    with pytest.raises(DamagedFile, match="does not describe the masks"):
        checkpoint.load(path)


def test_a_half_written_checkpoint_is_ignored_and_deleted(tmp_path):
    checkpoint.save(tmp_path, 1, *example(1), keep=2)
    (tmp_path / ".partial-2").mkdir()
    (tmp_path / ".partial-2" / "tensors.safetensors").write_bytes(b"half")
    with warnings.catch_warnings(action="error"):
        assert checkpoint.load_newest(tmp_path)[0].name == "step-000000001"
    checkpoint.save(tmp_path, 3, *example(3), keep=2)
    assert not list(tmp_path.glob(".partial-*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_leaves_earlier_checkpoints_intact(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        checkpoint.save(tmp_path / "c", 1, *example(1), keep=2)
        with pytest.raises(OSError):
            checkpoint.save(tmp_path / "c", 2, {"large": torch.randn(200_000)}, {}, keep=2)
        assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-000000001"]
        assert checkpoint.load_newest(tmp_path / "c")[0].name == "step-000000001"
    finally:
        subprocess.run(["umount", tmp_path], check=True)
