"""Open image files that may come from strangers: regular files of a few formats, none of which starts another program."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow's names of the formats with these extensions. Without a list it would also try formats such as EPS, for which it
# starts Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")


@contextmanager
def open_image(path: str | Path) -> "Iterator[Image]":
    """Open an image. Raise if it is not a regular file, has another format, or has too many pixels."""
    from PIL import Image, UnidentifiedImageError  # not at the top: most datasets do without Pillow

    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:  # a FIFO must not block
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        try:
            with Image.open(file, formats=FORMATS) as image:
                yield image
        except UnidentifiedImageError:
            raise ValueError(f"it is damaged, or its format is not one of {', '.join(FORMATS)}") from None
        except Image.DecompressionBombError:
            raise ValueError(f"it has more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels") from None


def is_image_name(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def find_images(folder: Path, elsewhere: set[tuple[int, int]]) -> list[str]:
    """Return the paths of all images below a folder, relative to it.

    Links are followed, but no folder is visited twice, and none in `elsewhere` (device and inode numbers) is visited at all.
    """
    found, visited, waiting = [], {*elsewhere, inode(folder)}, [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(folder / below) as entries:
            for entry in entries:
                path = os.path.join(below, entry.name)
                with suppress(OSError):  # a link that leads to itself
                    if entry.is_dir():
                        if (place := inode(entry.path)) not in visited:
                            visited.add(place)
                            waiting.append(path)
                    elif is_image_name(entry.name) and entry.is_file():  # not a FIFO, a device or a broken link
                        found.append(path)
    return found


def inode(path: str | Path) -> tuple[int, int]:
    """Return the device and inode number, which are the same for all names of a file or folder."""
    found = os.stat(path)
    return found.st_dev, found.st_ino
