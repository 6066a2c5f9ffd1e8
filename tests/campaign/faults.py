"""Part: every file-system call of save, resume and finish fails once, in every way it can.

    python -m tests.campaign.faults --count 100 --seed 0 --seconds 600

A run is watched once to list its calls below the run folder, those of safetensors and libc included. Then each call is
repeated with each fault that applies to it, in a run from the beginning and in one that resumes at its last epoch. After a
fault the command must have ended clearly, no checkpoint may be lost, and the same command must end with the same bytes as an
undisturbed run.
"""

from pathlib import Path
from typing import NamedTuple

from tests.campaign import server, small_run
from tests.campaign.part import Part, run

METHODS = ("optg", "rigl", "st3")
SCENARIOS = ("start", "resume")


class Fault(NamedTuple):
    code: int  # as in faults.c
    kinds: str  # of calls: c creates a file, o opens one, w writes, r reads, m changes names or modes, f syncs, s looks


# A kill before a call that changes nothing leaves the same files as one before the next call that does.
FAULTS = {
    "kill": Fault(1, "cwmf"),
    "disk full": Fault(2, "cwf"),  # it stays full until the process ends
    "write error": Fault(3, "cwmf"),
    "short write": Fault(4, "w"),
    "read error": Fault(5, "ors"),
    "too many open files": Fault(6, "co"),
}


class Case(NamedTuple):
    method: str
    scenario: str
    fault: str
    call: int
    line: str  # the call, as faults.c records it

    def __str__(self) -> str:
        return f"{self.method}, {self.scenario}, {self.fault} at call {self.call} ({self.line})"


class Trial:
    """The folders of one method, and the trial of one fault at one call."""

    def __init__(self, method: str, folder: Path) -> None:
        self.method, self.run = method, folder / "run"
        self.expected = small_run.undisturbed(folder / "undisturbed", method)
        self.begun = {"start": folder / "nothing", "resume": small_run.interrupted(folder / "interrupted", method)}

    def calls(self, scenario: str) -> list[str]:
        """Return the calls of a run without faults."""
        return self.attempt(scenario, -1, 0).calls

    def attempt(self, scenario: str, call: int, code: int) -> server.Outcome:
        small_run.copy(self.begun[scenario], self.run)
        return server.optg(*small_run.training(self.run, self.method), before=server.arm(self.run, call, code))

    def problems(self, case: Case, part: Part) -> list[str]:
        """Return what goes wrong after a fault."""
        before = small_run.newest_whole(self.begun[case.scenario])
        done = self.attempt(case.scenario, case.call, FAULTS[case.fault].code)
        found = []
        if not (done.is_clear or (case.fault == "kill" and done.status == -9)):
            found.append(f"status {done.status}: {done.text[-500:]}")
        if (after := small_run.newest_whole(self.run)) < before:
            found.append(f"the newest whole checkpoint was step {before}, now {after}")
        if "damaged" in done.text or list(self.run.rglob("*.damaged*")):
            found.append(f"whole files count as damaged: {done.text[:300]}")
        part.counts["killed" if done.status == -9 else "not affected" if done.status == 0 else "stopped with a message"] += 1
        if done.status == 0:
            return found + small_run.differences(self.run, self.expected)
        return found + small_run.finish(self.run, self.method, self.expected)


def enumerate_cases(trials: dict[str, Trial]) -> list[Case]:
    return [
        Case(method, scenario, fault, call, line)
        for method, trial in trials.items()
        for scenario in SCENARIOS
        for call, line in enumerate(trial.calls(scenario))
        for fault, (_, kinds) in FAULTS.items()
        if line[0] in kinds
    ]


def carry_out(part: Part) -> None:
    trials = {method: Trial(method, part.folder / method) for method in METHODS}
    cases = enumerate_cases(trials)
    part.total = len(cases)
    for number in part.cases():
        case = cases[number]
        for problem in trials[case.method].problems(case, part):
            part.fail(f"{case}: {problem}")
        part.counts[case.fault] += 1


if __name__ == "__main__":
    run(carry_out, __doc__, preload=True)
