import json
import os
import random
import subprocess
import warnings

import pytest
import torch

from optg.training import checkpoint


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
    checkpoint.save(tmp_path, 30, *example(30), keep=2)  # the run resumed at step 20 because 100 was damaged
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-000000020", "step-000000030"]


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


def test_training_starts_over_if_all_checkpoints_are_damaged(tmp_path):
    path = checkpoint.save(tmp_path, 1, *example(), keep=2)
    (path / "values.json").write_text(json.dumps({"body": "{}", "checksum": "0"}))
    with pytest.warns(UserWarning, match="there is no older one, so training starts over"):
        assert checkpoint.load_newest(tmp_path) is None


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
