"""Tables that `optg reproduce` prints."""

from collections.abc import Iterator

from rich.table import Table

from optg.experiments.cell_results import COLUMNS, collect_results, format_result, informative_columns
from optg.experiments.cost import CostEstimate
from optg.experiments.declaration import Experiment, Selection, experiment_datasets, experiment_names, load_experiment
from optg.experiments.planned_run import PlannedRun
from optg.experiments.records import Summaries


def experiment_table(experiment: Experiment, summaries: Summaries) -> Table:
    """Return our accuracies beside the paper's."""
    rows = [format_result(result) for result in collect_results(experiment, summaries)]
    table = Table(title=experiment.title, title_justify="left")
    shown = informative_columns(rows)
    for i in shown:
        table.add_column(COLUMNS[i], justify="left" if i < 3 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table


def overview_table(summaries: Summaries) -> Table:
    """Return all experiments with their datasets, number of runs and estimated cost."""
    cost = CostEstimate(summaries.values())
    table = Table(title="optg reproduce NAME", title_justify="left", caption_justify="left")
    for column in ("name", "title", "dataset", "runs", "epochs", "hours"):
        left = column in ("name", "title", "dataset")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    for name, title, dataset, runs in all_experiments():
        epochs = sum(run.plan.recipe.epochs for run in runs)
        table.add_row(name, title, dataset, f"{len(runs)}", f"{epochs:,}", cost.hours(runs))
    table.caption = (
        "hours: training time summed over the runs, estimated from finished runs in results/*.jsonl and in --output; unknown "
        "if no similar run has finished. Runs that share a GPU take longer each, but less time together."
    )
    return table


def all_experiments() -> Iterator[tuple[str, str, str, list[PlannedRun]]]:
    """Yield name, title, dataset and runs for each dataset; name and title are empty from an experiment's second dataset on."""
    for name in experiment_names():
        for i, dataset in enumerate(experiment_datasets(name) or [""]):
            experiment = load_experiment(name, Selection(on=(dataset,) if dataset else ()))
            yield (name, experiment.title, dataset, experiment.runs) if i == 0 else ("", "", dataset, experiment.runs)
