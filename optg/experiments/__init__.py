"""The paper's tables and figures as lists of runs (contents.toml), and the independence paradox measured directly."""
