# Every target works on a fresh machine: it creates .venv and installs into it first.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest --numprocesses 2 -rs --strict-skips

.PHONY: demo test tests test-long campaign lint bench clean

demo: .venv/ready ## train a small net on the bundled digits, dense and sparse
	$(BIN)/python examples/digits.py

# mypy runs on one core, beside the tests
test: .venv/ready ## lint, check types, run all tests but the long ones; fail on an unexpected skip
	$(MAKE) --no-print-directory --jobs 2 lint tests

tests: .venv/ready ## the tests of `make test`, without lint and types
	$(PYTEST) -m "not long"

test-long: .venv/ready ## run the tests that take too long for CI
	$(PYTEST) -m long || [ $$? = 5 ] # 5: no test is marked long

HOURS ?= 2
campaign: .venv/ready ## continue the reliability campaign for HOURS (at most 2), and write docs/reliability.md
	nice -n 19 $(BIN)/python -m tests.campaign.driver --hours $(HOURS)

lint: .venv/ready ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready ## measure ranking and overhead on this machine's CPU
	$(BIN)/python benchmarks/ranking.py
	$(BIN)/python benchmarks/overhead.py --model resnet32 --methods optg gmp rigl dpf feather
	$(BIN)/python benchmarks/peers.py --model resnet32

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
