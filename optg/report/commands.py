"""The command, versions and hardware of each run."""

import shlex
from dataclasses import asdict
from functools import cache
from typing import Any

from optg.core.assignment import implied_sparsity
from optg.methods import METHODS
from optg.report.figures import RunGroup
from optg.report.markup import escape, missing_note, plural
from optg.report.plot import MAX_NAMED
from optg.report.runs import RunRecord, as_json
from optg.training import recipe
from optg.training.quantization import SCHEDULE_ENDS
from optg.training.recipe import EXECUTION_SETTINGS, build_method, flag


def commands_section(groups: list[RunGroup]) -> str:
    parts = ['<section id="commands">', "<h2>Commands and versions</h2>"]
    for group in groups:
        listed = "\n".join(command_block(run) for run in group.runs)
        if len(group.runs) > MAX_NAMED:
            listed = f"<details><summary>{plural(len(group.runs), 'command')}</summary>{listed}</details>"
        parts.append(f"<h3>{escape(group.name)}</h3>\n{environments(group.runs)}\n{listed}")
    return "\n".join([*parts, "</section>"])


def environments(runs: list[RunRecord]) -> str:
    """Return versions and hardware, once for all runs that share them."""
    shared: dict[str, list[str]] = {}
    for run in runs:
        if facts := environment(run):
            shared.setdefault(facts, []).append(run.label)
    named = [(facts, f"{', '.join(labels)}: " if len(shared) > 1 else "") for facts, labels in shared.items()]
    return "\n".join(f'<p class="note">{escape(labels)}{escape(facts)}</p>' for facts, labels in named)


def environment(run: RunRecord) -> str:
    versions, hardware, revision = (run.summary.get(key) for key in ("versions", "hardware", "revision"))
    facts = [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
    facts += [f"revision {str(revision)[:12]}"] if revision else []
    return " · ".join([*facts, *([str(hardware)] if hardware else [])])


def command_block(run: RunRecord) -> str:
    typed = run.summary.get("command")
    line = f"<pre>{escape(typed)}</pre>" if typed else missing_note("The command is recorded when a run finishes.")
    if typed and (flags := changed_defaults(run)):
        line += missing_note(f"Defaults have changed since this run. To repeat it today, add {escape(shlex.join(flags))}.")
    name = f' <span class="quiet">{escape(run.name)}</span>' if run.name not in run.label else ""
    return f'<div class="command"><h4>{escape(run.label)}{name}</h4>{line}</div>'


def changed_defaults(run: RunRecord) -> list[str]:
    """Return the flags that the command needs today because defaults of the recipe or the method have changed."""
    typed = {word.partition("=")[0].replace("_", "-") for word in str(run.summary.get("command")).split()}
    settings, options = current_defaults(str(run.summary.get("recipe")), run.method)
    implied, flags = sparsity_of(str(run.settings.get("structure", "unstructured"))), list[str]()
    for prefix, then, now in (("", run.settings, settings), ("method.", run.options, options)):
        for key, value in then.items():
            if key not in now or value == now[key] or (key == "sparsity" and value == implied):
                continue
            if run.settings.get("quantize") and key in SCHEDULE_ENDS and value == run.settings.get("quantize_from"):
                continue  # --quantize has changed it
            given = (value,) if key == "model_options" else (value, True, False)
            if typed.isdisjoint(word for v in given for word in flag(prefix, key, v)[:1]):
                flags += flag(prefix, key, value)
    return flags


def sparsity_of(structure: str) -> float | None:
    """Return the sparsity that a structure implies; None if none follows, or if a summary from elsewhere names no structure."""
    try:
        return implied_sparsity(structure)
    except ValueError:
        return None


@cache
def current_defaults(name: str, method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a recipe and a method's options say today, without seeds and execution settings."""
    if name not in recipe.names() or method not in METHODS:
        return {}, {}
    plan = recipe.load(name)
    plan.method = method
    settings, options = as_json(asdict(plan.recipe)), as_json(asdict(build_method(plan)))
    if METHODS[method].when == "never" or not METHODS[method].needs_target:
        settings["sparsity"] = 0.0
    ignored = ("seed", *EXECUTION_SETTINGS)
    return {k: v for k, v in settings.items() if k not in ignored}, {k: v for k, v in options.items() if k not in ignored}
