"""Image files and folders of strangers."""

import os
import threading
from pathlib import Path

import pytest
from PIL import Image

from optg.data import imagenet
from optg.data.images import EXTENSIONS, FORMATS, find_images, open_image


def save(path: Path, kind: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), "red").save(path, kind)
    return path


def test_every_format_with_its_extension(tmp_path):
    Image.init()
    for extension in EXTENSIONS:
        with open_image(save(tmp_path / f"image{extension}")) as image:
            assert image.size == (8, 8)
    assert {Image.EXTENSION[extension] for extension in EXTENSIONS} == set(FORMATS)


@pytest.mark.parametrize("kind", ["EPS", "PDF", "ICO", "TGA"])
def test_other_formats_are_not_even_tried(tmp_path, monkeypatch, kind):
    """Pillow starts Ghostscript to read EPS."""
    path = save(tmp_path / "image.png", kind)
    Image.init()
    started = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args, **kwargs: started.append(args))
    with pytest.raises(ValueError, match="its format is not one of JPEG, PNG, WEBP"), open_image(path) as image:
        image.load()
    assert not started


def test_too_many_pixels(tmp_path, monkeypatch):
    path = save(tmp_path / "image.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 31)
    with pytest.raises(ValueError, match="it has more than 62 pixels"), open_image(path):
        pass


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "folder.png").mkdir()
    for path in (tmp_path / "fifo.png", tmp_path / "folder.png", Path("/dev/zero")):
        with pytest.raises((ValueError, IsADirectoryError), match=r"it is not a regular file|Is a directory"), open_image(path):
            pass


@pytest.fixture
def dataset(tmp_path) -> Path:
    """Two classes of three images, for training and for testing."""
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            for i in range(3):
                save(tmp_path / split / label / f"{i}.png")
    return tmp_path


def names(folder: Path) -> list[str]:
    _, train, _ = imagenet.scan(folder)
    return [os.fsdecode(name) for name in train.names]


USUAL = [f"{label}/{i}.png" for label in ("cat", "dog") for i in range(3)]


def test_loops_of_links_are_visited_once(dataset):
    cat, dog = dataset / "train" / "cat", dataset / "train" / "dog"
    (cat / "loop").symlink_to(".")
    (cat / "other loop").symlink_to(cat)
    (cat / "up").symlink_to("..")  # from here, dogs would become cats
    (cat / "dogs").symlink_to(dog)
    (cat / "itself.png").symlink_to("itself.png")
    (cat / "broken.png").symlink_to("nowhere")
    assert names(dataset) == USUAL


def test_links_to_images_and_folders_elsewhere_are_followed(dataset, tmp_path):
    save(tmp_path / "elsewhere" / "more" / "9.png")
    (dataset / "train" / "cat" / "linked").symlink_to(tmp_path / "elsewhere")
    (dataset / "train" / "cat" / "8.png").symlink_to(tmp_path / "elsewhere" / "more" / "9.png")
    assert names(dataset) == [*USUAL[:3], "cat/8.png", "cat/linked/more/9.png", *USUAL[3:]]


def test_a_fifo_among_the_images_does_not_block(dataset):
    os.mkfifo(dataset / "train" / "cat" / "fifo.png")
    found: list[list[str]] = []
    reader = threading.Thread(target=lambda: found.append(names(dataset)), daemon=True)
    reader.start()
    reader.join(20)
    assert found == [USUAL]


def test_names_that_begin_with_a_dot_are_no_images(tmp_path):
    save(tmp_path / ".hidden.png", "PNG")
    assert find_images(tmp_path, set()) == []
