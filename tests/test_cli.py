import subprocess
import sys
import time

from optg.methods import METHODS


def optg(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "optg", *args], capture_output=True, text=True)


def test_help_does_not_wait_for_torch():
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert "methods" in optg("--help").stdout
        times.append(time.perf_counter() - start)
    loads = "import sys, optg.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loads]).returncode == 0
    assert min(times) < 1.0  # 0.2 s on an idle machine


def test_methods_lists_them_all():
    listed = optg("methods").stdout
    assert all(name in listed for name in METHODS)


def test_an_unknown_command_is_refused():
    wrong = optg("method")
    assert wrong.returncode == 2 and "methods" in wrong.stderr and "Traceback" not in wrong.stderr
