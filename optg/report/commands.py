"""What was typed for each run, and what it ran on."""

import shlex
from dataclasses import asdict
from functools import cache
from typing import Any

from optg.methods import METHODS
from optg.report.figures import Group
from optg.report.markup import counted, missing, text
from optg.report.plot import MANY
from optg.report.runs import Run, as_json
from optg.training import recipe
from optg.training.recipe import EXECUTION_SETTINGS, build_method, flag


def commands(groups: list[Group]) -> str:
    parts = ['<section id="commands">', "<h2>Commands and versions</h2>"]
    for group in groups:
        made = "\n".join(command(run) for run in group.runs)
        if len(group.runs) > MANY:
            made = f"<details><summary>{counted(len(group.runs), 'command')}</summary>{made}</details>"
        parts.append(f"<h3>{text(group.name)}</h3>\n{environments(group.runs)}\n{made}")
    return "\n".join([*parts, "</section>"])


def environments(runs: list[Run]) -> str:
    """Versions and hardware, once for all the runs that share them."""
    shared: dict[str, list[str]] = {}
    for run in runs:
        if facts := environment(run):
            shared.setdefault(facts, []).append(run.label)
    named = [(facts, f"{', '.join(labels)}: " if len(shared) > 1 else "") for facts, labels in shared.items()]
    return "\n".join(f'<p class="note">{text(labels)}{text(facts)}</p>' for facts, labels in named)


def environment(run: Run) -> str:
    versions, hardware, revision = (run.summary.get(key) for key in ("versions", "hardware", "revision"))
    facts = [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
    facts += [f"revision {str(revision)[:12]}"] if revision else []
    return " · ".join([*facts, *([str(hardware)] if hardware else [])])


def command(run: Run) -> str:
    typed = run.summary.get("command")
    line = f"<pre>{text(typed)}</pre>" if typed else missing("The command is recorded when a run ends.")
    if typed and (lacking := since(run)):
        line += missing(f"Defaults have changed since: to train the same today, add {text(shlex.join(lacking))}.")
    name = f' <span class="quiet">{text(run.name)}</span>' if run.name not in run.label else ""
    return f'<div class="command"><h4>{text(run.label)}{name}</h4>{line}</div>'


def since(run: Run) -> list[str]:
    """What its command lacks today: recipes and defaults of methods may have changed."""
    typed = {word.partition("=")[0].replace("_", "-") for word in str(run.summary.get("command")).split()}
    settings, options = today(str(run.summary.get("recipe")), run.method)
    lacking = []
    for prefix, then, now in (("", run.settings, settings), ("method.", run.options, options)):
        for key, value in then.items():
            words = {flag(prefix, key, given)[0] for given in (True, False)}
            if key in now and value != now[key] and typed.isdisjoint(words):
                lacking += flag(prefix, key, value)
    return lacking


@cache
def today(name: str, method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a recipe says now, and the options of a method in it: what makes a run what it is, but for its seed."""
    if name not in recipe.names() or method not in METHODS:
        return {}, {}
    plan = recipe.load(name)
    plan.method = method
    settings, options = as_json(asdict(plan.recipe)), as_json(asdict(build_method(plan)))
    if METHODS[method].when == "never":
        settings["sparsity"] = 0.0
    apart = ("seed", *EXECUTION_SETTINGS)
    return {k: v for k, v in settings.items() if k not in apart}, {k: v for k, v in options.items() if k not in apart}
