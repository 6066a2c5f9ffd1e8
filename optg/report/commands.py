"""What was typed for each run, and what it ran on."""

import shlex
from dataclasses import asdict

from optg.methods import METHODS
from optg.report.markup import missing, text
from optg.report.runs import Run, as_json
from optg.training import recipe
from optg.training.recipe import HOW, build_method, flag


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
    name = run.summary.get("recipe")
    typed = {word.partition("=")[0].replace("_", "-") for word in str(run.summary.get("command")).split()}
    if name not in recipe.names() or run.method not in METHODS:
        return []
    plan = recipe.load(name)
    plan.method, plan.recipe.seed = run.method, run.settings["seed"]
    if METHODS[run.method].when == "never":
        plan.recipe.sparsity = run.settings["sparsity"]
    lacking = []
    for prefix, then, today in (
        ("", run.settings, as_json(asdict(plan.recipe))),
        ("method.", run.options, as_json(asdict(build_method(plan)))),
    ):
        for key, value in then.items():
            words = {flag(prefix, key, given)[0] for given in (True, False)}
            if key in today and value != today[key] and key not in HOW and typed.isdisjoint(words):
                lacking += flag(prefix, key, value)
    return lacking
