"""Run the kernel tests in Triton's interpreter, on CPU tensors: python -m tests.core.passes.interpret_kernels

The interpreter must be chosen before Triton is imported, so the tests need a process of their own.
Arguments go to pytest. Prints what happened as one line of JSON after pytest's own output.
"""

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent


def kernel_tests() -> list[str]:
    """Return the test files in this folder that can run in the interpreter."""
    return sorted(str(file) for file in FOLDER.glob("test_*.py") if "fused_device" in file.read_text())


class Recorder:
    """Collect the number of passed tests and the reason of each skip."""

    def __init__(self) -> None:
        self.passed, self.skipped = 0, dict[str, str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.passed and report.when == "call"
        self.record_skip(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.record_skip(report)

    def record_skip(self, report: Any) -> None:
        if report.skipped:
            self.skipped[report.nodeid] = report.longrepr[2]


def untested_kernels() -> list[str]:
    """Return the @triton.jit functions of optg.core that have not run in this process."""
    from triton.runtime.interpreter import InterpretedFunction

    modules = [module for name, module in list(sys.modules.items()) if name.startswith("optg.core.")]
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, InterpretedFunction)}
    return sorted(kernel.__name__ for kernel in kernels if kernel.fn not in kernel.rewritten_fn)


def patch_once() -> None:
    """Let the interpreter patch Triton's language for a kernel, but not again for each function that the kernel calls.

    It looks through all members of the language to find out that they are patched already: 40 % of the time of these tests.
    """
    from triton.language import core
    from triton.runtime import interpreter

    original, first = interpreter._patch_builtin, dict[Any, str]()

    def patch_builtin(package: Any, *args: Any) -> None:
        if package not in first:
            first[package] = next(name for name, member in inspect.getmembers(package) if core.is_builtin(member))
        if core.is_builtin(getattr(package, first[package])):
            original(package, *args)

    interpreter._patch_builtin = patch_builtin


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    patch_once()
    recorder = Recorder()
    code = pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:], *kernel_tests()], plugins=[recorder])
    print(json.dumps({"passed": recorder.passed, "skipped": recorder.skipped, "untested": untested_kernels()}))
    sys.exit(code)
