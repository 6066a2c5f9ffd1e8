"""Names of run folders."""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from optg.training.recipe import Plan


def folder_name(plan: Plan) -> str:
    """Return the default name of a run's folder: recipe, method, sparsity, all other changes of the recipe, and seed."""
    start, end = f"{plan.name.replace(':', '-')}-{plan.method}-{plan.recipe.sparsity:g}", f"seed{plan.recipe.seed}"
    return file_name("-".join([start, *as_assignments(plan.changes), end])) if plan.changes else f"{start}-{end}"


def as_assignments(changes: dict[str, Any]) -> Iterator[str]:
    """Yield "key=value" for each change, and "model.key=value" for each option of the model."""
    for key, value in changes.items():
        if key == "model_options":
            yield from (f"model.{option}={chosen}" for option, chosen in value.items())
        else:
            yield f"{key}={value}"


def file_name(text: str) -> str:
    """Return a text without characters that are unusual in file names. The end of a long one is replaced by a hash."""
    safe = re.sub(r"[^\w.=-]+", "_", text, flags=re.ASCII)
    return safe if len(safe) < 200 else f"{safe[:180]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
