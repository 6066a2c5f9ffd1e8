"""Reproduce the paper's tables and figures, and measure the independence paradox.

contents.toml declares the experiments. `declaration` turns one into cells of planned runs (`planned_run`, `paper_figures`),
`runner` trains them (`history`, `processes`, `progress`, `mps`), `records` keeps their summaries, and `cell_results` combines
these for the terminal (`tables`), RESULTS.md (`results_page`) and figures (`drawing`). `command` is `optg reproduce`;
`paradox/` is `optg paradox`.
"""
