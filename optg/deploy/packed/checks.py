"""Checks of values that were read from a file."""

import math
from typing import Any


class PackedError(ValueError):
    """The file is not a packed model, is damaged, or contains impossible values."""


class TooLarge(PackedError):
    """The file asks for more than the limits or this machine's memory allow. It may be whole."""


def require(condition: bool, problem: str) -> None:
    """Raise PackedError unless the condition holds."""
    if not condition:
        raise PackedError(problem)


def is_name(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= 1000 and value.isprintable()


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def is_shape(value: Any) -> bool:
    if type(value) is not list or len(value) > 24 or not all(map(is_count, value)):
        return False
    return math.prod(max(1, n) for n in value) < 2**62


def is_real(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30


def is_plain(value: Any) -> bool:
    return value is None or type(value) is bool or is_real(value) or (type(value) is str and value.isprintable())
