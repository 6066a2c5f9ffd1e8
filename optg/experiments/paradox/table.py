"""The table that `optg paradox` prints."""

from collections.abc import Sequence

from rich.table import Table

from optg.experiments.paradox.measure import Row


def paradox_table(rows: Sequence[Row], steps: int, samples: int) -> Table:
    table = Table(title="How removing weights at once changes the loss", title_justify="left", caption_justify="left")
    table.box, table.pad_edge, table.padding = None, False, (0, 1, 0, 0)  # fits 80 columns
    tuned = f"; tuned: true, after training the remaining weights for {steps} steps" if steps else ""
    table.caption = (
        f"predicted: −Σ g·w; true: loss without the removed weights minus loss with them{tuned}. One removed weight at a time, "
        f"mean over at most {samples}: alone: all others in place (Eq. 7); among: the others removed"
        f"{' and the remaining ones trained' if steps else ''} (Eq. 8); gap: |Eq. 8 − Eq. 7|."
    )
    table.add_column("criterion")
    for column in ("removed", "share", "predicted", "true", "tuned", "alone", "among", "gap"):
        table.add_column(column, justify="right")
    last = None
    for row in rows:
        if last not in (None, row.criterion):
            table.add_row()
        changes = ["" if v is None else f"{v:+.1e}" for v in (row.predicted, row.true, row.tuned)]
        single_weight = [f"{value:.1e}" for value in (row.alone, row.among, row.gap)]
        name = row.criterion if last != row.criterion else ""
        table.add_row(name, f"{row.removed:,}", f"{row.share:.1%}", *changes, *single_weight)
        last = row.criterion
    return table
