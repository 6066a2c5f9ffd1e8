"""Settings for all tests, and the list of accepted skips.

`make test` passes --strict-skips: a test that is skipped for a reason not listed here fails the run.
"""

import gc
import os
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from optg import trust
from tests.torchvision_import import import_torchvision

torch.set_num_threads(1)  # the tensors are tiny: more threads would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for child processes

# Accepted reasons to skip a test: a pattern for the reason, and why `make test` cannot run the test everywhere.
# A missing Python package is never accepted: add the package to the `dev` extra.
ACCEPTED_SKIPS = {
    r"\bCUDA\b|\bGPU\b": "CI has no GPU; tests/core/passes/test_kernels.py runs the kernels on the CPU instead",
    r"AVX-?(2|512)|AVX.VNNI": "the CPU may lack the instruction set; the scalar engine is tested on every CPU",
    r"CIFAR": "the real images are not bundled: OPTG_DATA names the folder that has them",
    r"Chromium": "the browser is not a Python package: .ci/run installs it where apt can",
    r"root|tmpfs": "filling a disk needs a small disk, and only root may mount one",
    r"sanitizer": "the sanitizer libraries come with the C compiler, and some compilers lack them",
    r"QEMU": "Debian's packages qemu-user, gcc-aarch64-linux-gnu and libc6-dev-arm64-cross; `make test-long` uses them",
    r"gigabytes": "a Rice code of this size does not fit in memory",
}


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow models and data of the tests' own by name, as --trust does. tests/test_trust.py takes this back.

    Trusting a name also puts the working directory on sys.path: a later test must not find its modules there.
    """
    monkeypatch.setenv(trust.VARIABLE, trust.EVERYTHING)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="session")
def torchvision() -> ModuleType:
    """Return torchvision's models."""
    if not find_spec("torchvision"):
        pytest.skip("torchvision is not installed")
    import_torchvision()
    return import_module("torchvision.models")


def pytest_configure(config: pytest.Config) -> None:
    """Make torchvision importable in the main process of xdist: it imports Lightning to read warnings of the workers."""
    if config.getoption("numprocesses", None) and find_spec("torchvision"):
        import_torchvision()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that fork this process first: a fork takes three times as long when it holds what other tests imported."""
    items.sort(key=lambda item: item.path.name != "test_faults.py")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hide what is imported now from the garbage collector, which would look through all of it during every test."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-skips", action="store_true", help="fail if a test is skipped for a reason not in tests/conftest.py"
    )


def is_accepted(reason: str) -> bool:
    """Return whether a skip's reason matches an entry of the list."""
    return any(re.search(pattern, reason, re.IGNORECASE) for pattern in ACCEPTED_SKIPS)


def unexpected_skips(config: pytest.Config) -> list[str]:
    """Return "test: reason" for each skip that is not on the list. With xdist, only the main process sees any."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not config.getoption("--strict-skips") or reporter is None:
        return []
    skips = [(report.nodeid, report.longrepr[2]) for report in reporter.stats.get("skipped", [])]
    return [f"{test}: {reason.removeprefix('Skipped: ')}" for test, reason in skips if not is_accepted(reason)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if unexpected_skips(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if unexpected := unexpected_skips(config):
        terminalreporter.section("unexpected skips", sep="=", red=True)
        terminalreporter.write_line("\n".join(unexpected))
        terminalreporter.write_line("Make these tests run, or add the reason to ACCEPTED_SKIPS in tests/conftest.py.")
