"""Runs as tasks of a Ray cluster of two nodes, both on this machine."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from optg.experiments.command import Execution, choose_launcher
from optg.experiments.declaration import Selection, load_experiment
from optg.experiments.planned_run import PlannedRun
from optg.experiments.ray_launcher import RayLauncher
from optg.experiments.runner import Runner
from tests.cli.calling import call
from tests.experiments.fake_summaries import fake_summary
from tests.experiments.test_runner import SCRIPT

TINY = ["--epochs", "1", "--model", "digits", "--data", "synthetic:1x8x8:10:64", "--set", "batch_size=32", "--device", "cpu"]
DIES_ONCE = "import os, signal, sys\nif not os.path.exists(sys.argv[4]):\n    open(sys.argv[4], 'w').close()\n    " + (
    "os.kill(os.getpid(), signal.SIGKILL)\n"
)


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two nodes with one CPU and one (pretended) GPU each, to which this process is connected."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched:
        root = str(Path(__file__).parents[2])
        patched.setenv("PYTHONPATH", os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]))
        patched.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1, "include_dashboard": False})
        made.add_node(num_cpus=1, num_gpus=1)
        made.wait_for_nodes()
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def runs() -> list[PlannedRun]:
    return load_experiment("mask-optimizer", Selection(columns=("Eq. 16",))).runs


class RayScriptRunner(Runner):
    """Run scripts instead of training. A script may wait, or be killed the first time."""

    behaviours: dict[str, str] = {}  # noqa: RUF012

    def command(self, run: PlannedRun) -> list[str]:
        folder, behaviour = self.output / run.name, self.behaviours.get(run.name, "finish")
        script = (DIES_ONCE if behaviour == "die once" else "") + SCRIPT
        return [sys.executable, "-c", script, str(folder), json.dumps(fake_summary(run)), behaviour, f"{folder}.died"]


def ray_runner(folder: Path, behaviours: dict[str, str] | None = None, **resources: float) -> tuple[RayScriptRunner, Path]:
    output = folder / "output.txt"
    launcher = RayLauncher(**resources)
    runner = RayScriptRunner(
        folder / "runs", jobs=4, device="cpu", launcher=launcher, console=Console(file=output.open("a"), width=500)
    )
    runner.behaviours = behaviours or {}
    return runner, output


@pytest.mark.long
def test_reproduce_trains_on_the_cluster(cluster, tmp_path, monkeypatch, capsys):
    only = ("--only", "dense", "gmp", "--on", "cifar10", "--sparsity", "0.9")
    with pytest.raises(SystemExit, match="0"):
        call(monkeypatch, "reproduce", "cifar", *only, *TINY, "--launcher", "ray", "--output", tmp_path / "runs")
    summaries = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/summary.json")]
    assert {summary["method"] for summary in summaries} == {"dense", "gmp"}


def test_runs_share_gpus_and_a_killed_run_is_started_again(cluster, tmp_path, runs):
    runner, output = ray_runner(tmp_path, {runs[0].name: "die once", runs[1].name: "fail"}, gpus=0.5, cpus=0.5)
    assert runner.run(runs) == 1
    text = output.read_text()
    assert f"failed with exit status 1: {runs[1].name}: it broke" in text and text.count("failed with") == 1
    assert runner.done == 3 and Path(f"{tmp_path / 'runs' / runs[0].name}.died").exists()
    environments = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/environment.json")]
    assert {environment["CUDA_VISIBLE_DEVICES"] for environment in environments} == {"0"}  # one GPU per node, shared


def test_a_signal_reaches_the_runs_and_the_same_command_continues(cluster, tmp_path, runs):
    runner, _ = ray_runner(tmp_path, {run.name: "wait" for run in runs})

    def interrupt() -> None:
        while len(list((tmp_path / "runs").glob("*/ready"))) < 2:  # the other two wait for a free node
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert runner.run(runs) == 130 and not runner.failed
    thread.join()
    logs = [path.read_text() for path in (tmp_path / "runs" / "logs").glob("*.log")]
    assert len(logs) == 2 and all(log.endswith("saved\n") for log in logs)
    assert not list((tmp_path / "runs" / "logs").glob("*.stop"))
    assert ray_runner(tmp_path)[0].run(runs) == 0


@pytest.mark.long
def test_a_run_on_a_node_that_dies_continues_on_another(cluster, tmp_path):
    node = cluster.add_node(num_cpus=1, resources={"other": 1})
    cluster.wait_for_nodes()
    launcher = RayLauncher(gpus=0)
    launcher.options["resources"] = {"other": 0.5}  # so that it runs on this node
    folder = tmp_path / "run"
    script = "import os, sys, time\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\nfolder.mkdir(exist_ok=True)\n" + (
        "(folder / str(os.getpid())).touch()\nif len(list(folder.iterdir())) < 2: time.sleep(600)\n"
    )
    running = launcher.start([sys.executable, "-c", script, str(folder)], tmp_path / "logs" / "run.log", 0)
    wait_until(lambda: folder.exists() and list(folder.iterdir()))
    [first] = [int(path.name) for path in folder.iterdir()]
    cluster.remove_node(node, allow_graceful=False)
    wait_until(lambda: not Path(f"/proc/{first}").exists())  # it dies with its node
    assert running.poll() is None
    cluster.add_node(num_cpus=1, resources={"other": 1})
    wait_until(lambda: running.poll() is not None)
    assert running.returncode == 0 and len(list(folder.iterdir())) == 2


def wait_until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_run_that_needs_more_than_the_cluster_has_is_refused(cluster):
    with pytest.raises(ValueError, match=r"a run needs 8 GPUs; the Ray cluster has \d"):
        RayLauncher(gpus=8)


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        (Execution(launcher="ray", mps=True), "--mps is for runs on this machine"),
        (Execution(launcher="ray", jobs=0), "--jobs 0 is for runs on this machine"),
        (Execution(gpus=0.5), "--gpus has no effect on this machine; remove it, or add --launcher ray"),
        (Execution(cpus=2), "--cpus has no effect on this machine"),
    ],
)
def test_flags_of_the_other_launcher_are_refused(execution, message):
    with pytest.raises(ValueError, match=message):
        choose_launcher(execution, 3)


def test_a_missing_package_is_named_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"--launcher ray needs a missing package .* pip install 'optg\[ray\]'"):
        RayLauncher()


def test_without_a_cluster_the_message_says_how_to_start_one(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("ray.is_initialized", lambda: False)

    def refuse(**_: object) -> None:
        raise ConnectionError("no cluster\nmore")

    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(ValueError, match=r"found no cluster \(no cluster\); start one with `ray start --head`"):
        RayLauncher()
