# Everything on a fresh machine: each target makes its own environment first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench clean

demo: .venv/ready ## train a small net on the bundled digits, dense and sparse
	$(BIN)/python examples/digits.py

test: .venv/ready lint ## lint, types and all tests
	$(BIN)/python -m pytest --numprocesses 2

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready ## what is measured, on this machine's CPU
	$(BIN)/python benchmarks/ranking.py
	$(BIN)/python benchmarks/overhead.py --model resnet32 --methods optg gmp rigl dpf feather
	$(BIN)/python benchmarks/peers.py --model resnet32

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
