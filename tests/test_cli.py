import resource
import subprocess
import sys

from optg.methods import METHODS


def optg(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "optg", *args], capture_output=True, text=True)


def seconds(*args: str) -> float:
    """What a command takes of the processor, at best of three times: whatever else the machine does, that is the same."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert optg(*args).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_help_does_not_wait_for_torch():
    loads = "import sys, optg.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loads]).returncode == 0
    assert seconds("--help") < 0.8  # 0.2 s where this was written
    assert seconds("train", "--help") < 3.0  # 1.3 s there


def test_methods_lists_them_all():
    listed = optg("methods").stdout
    assert all(name in listed for name in METHODS)


def test_an_unknown_command_is_refused():
    wrong = optg("method")
    assert wrong.returncode == 2 and "methods" in wrong.stderr and "Traceback" not in wrong.stderr


def test_the_help_of_train_is_of_its_method_and_has_no_comments_of_the_code():
    said = optg("train", "--method", "rigl", "--help").stdout
    assert "of rigl" in said and "--method.fraction" in said and "type:" not in said and "fmt:" not in said
