"""The bundled digits, and the example that is trained on them."""

import subprocess
import sys
from pathlib import Path

import torch

from optg.data import digits

ROOT = Path(__file__).parent.parent


def test_shapes_and_types() -> None:
    (train_images, train_labels), (test_images, test_labels) = digits.load()
    assert train_images.shape == (1437, 1, 8, 8) and train_labels.shape == (1437,)
    assert test_images.shape == (360, 1, 8, 8) and test_labels.shape == (360,)
    assert train_images.dtype == test_images.dtype == torch.float32
    assert train_labels.dtype == test_labels.dtype == torch.int64


def test_scale() -> None:
    (images, _), _ = digits.load()
    assert abs(images.mean().item()) < 1e-3
    assert abs(images.std().item() - 1) < 1e-3
    pixels = images * digits.STD + digits.MEAN
    assert torch.allclose(pixels, pixels.round(), atol=1e-4)
    assert (pixels.round().min(), pixels.round().max()) == (0, 16)


def test_every_class_is_in_both_parts() -> None:
    (_, train_labels), (_, test_labels) = digits.load()
    assert train_labels.bincount().tolist() == [147, 147, 138, 150, 137, 153, 141, 139, 146, 139]
    assert test_labels.bincount().tolist() == [31, 35, 39, 33, 44, 29, 40, 40, 28, 41]


def test_the_split_is_fixed() -> None:
    torch.manual_seed(1)
    first = digits.load()
    torch.manual_seed(2)
    for part, again in zip(first, digits.load()):
        assert torch.equal(part[0], again[0]) and torch.equal(part[1], again[1])
    (_, train_labels), (_, test_labels) = first
    assert train_labels[:10].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5]
    assert test_labels[:10].tolist() == [7, 9, 4, 7, 0, 2, 6, 1, 3, 1]


def test_a_digit_by_eye() -> None:
    (images, labels), _ = digits.load()
    pixels = (images[0, 0] * digits.STD + digits.MEAN).round().int()
    assert ["".join(" .:-=+*#%@"[v * 9 // 16] for v in row) for row in pixels.tolist()] == [
        "  *@%.  ",
        " :@**#  ",
        " .# :%  ",
        "    **  ",
        "    @-  ",
        "   +%   ",
        "  *@@*  ",
        "  ##=#@=",
    ]
    assert labels[0] == 2


def run_example(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=300, cwd=ROOT)


def test_example(tmp_path: Path) -> None:
    done = run_example("--epochs", "2", "--output", str(tmp_path / "new"))
    assert done.returncode == 0, done.stderr
    rows = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    names, accuracies, sparsities, nonzero, _, _ = zip(*([cell.strip() for cell in row[1:-1]] for row in rows))
    assert names == ("dense", "optg 90%", "optg 95%", "optg 98%")
    assert sparsities == ("0.00%", "90.00%", "95.00%", "98.00%")
    assert nonzero == ("97,568", "9,756", "4,878", "1,951")
    assert float(accuracies[0].rstrip("%")) > 80  # it learns
    assert (tmp_path / "new" / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert not done.stderr


def test_example_says_how_many_epochs_it_needs(tmp_path: Path) -> None:
    done = run_example("--epochs", "1", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "at least 2" in done.stderr.splitlines()[-1]
