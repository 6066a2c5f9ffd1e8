"""The header's JSON, and its description of the model."""

import json
from dataclasses import dataclass, field, fields
from typing import Any

from optg.deploy.packed.checks import PackedError, is_count, is_name, is_plain, is_real, is_shape, require


@dataclass(frozen=True)
class About:
    """What a model is, which images it expects, and where it came from."""

    name: str
    classes: int
    shape: tuple[int, ...]  # of one image: channels, height, width
    mean: tuple[float, ...] | None = None  # per channel, for pixels in [0, 1]; None if unknown
    std: tuple[float, ...] | None = None
    centre: float = 1.0  # size of the centre square that is cropped and resized, relative to the image's shorter side
    labels: tuple[str, ...] | None = None  # names of the classes
    account: dict[str, int] = field(default_factory=dict)  # parameters, nonzero, flops, dense_flops
    origin: dict[str, str | int | float | bool | None] = field(default_factory=dict)  # recipe, method, accuracy, versions, …


def parse_json(text: bytes) -> Any:
    """Parse the header. Refuse duplicate keys, NaN and infinities."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        require(len(dict(pairs)) == len(pairs), "the header has a field twice")
        return dict(pairs)

    def refuse_constant(text: str) -> None:
        raise PackedError(f"the header contains {text}; expected finite numbers")

    try:
        return json.loads(text.decode(), object_pairs_hook=without_duplicates, parse_constant=refuse_constant)
    except RecursionError:
        raise PackedError("the header is nested too deeply") from None
    except PackedError:
        raise
    except ValueError as error:  # not UTF-8, not JSON, or a number with thousands of digits
        raise PackedError(f"the header is not JSON: {error}") from None


def parse_about(data: Any) -> About:
    """Check the header's description of the model and return it."""
    known = {f.name for f in fields(About)}
    require(
        type(data) is dict and set(data) == known, f'header: "about" must have exactly the fields {", ".join(sorted(known))}'
    )
    require(is_name(data["name"]), 'header: "name" must be a printable text')
    require(is_count(data["classes"]), 'header: "classes" must be a count')
    shape = data["shape"]
    require(is_shape(shape) and len(shape) > 0, 'header: "shape" must be a list of sizes')
    for key in ("mean", "std"):
        valid = data[key] is None or (type(data[key]) is list and len(data[key]) == shape[0] and all(map(is_real, data[key])))
        require(valid, f'header: "{key}" must be null or one number for each of {shape[0]} channels')
    require(data["std"] is None or all(value > 0 for value in data["std"]), 'header: "std" must be above 0')
    require(is_real(data["centre"]) and 0 < data["centre"] <= 1, 'header: "centre" must be above 0 and at most 1')
    labels = data["labels"]
    named = labels is None or (type(labels) is list and len(labels) == data["classes"] and all(map(is_name, labels)))
    require(named, f'header: "labels" must be null or one name for each of {data["classes"]} classes')
    account, origin = data["account"], data["origin"]
    counts = type(account) is dict and all(map(is_name, account)) and all(map(is_count, account.values()))
    require(counts, 'header: "account" must map names to counts')
    plain = type(origin) is dict and all(map(is_name, origin)) and all(map(is_plain, origin.values()))
    require(plain, 'header: "origin" must map names to plain values')
    values: dict[str, Any] = {key: tuple(value) if type(value) is list else value for key, value in data.items()}
    return About(**values)
