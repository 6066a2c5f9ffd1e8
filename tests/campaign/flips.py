"""Part: one bit is flipped in every 64th byte of every file of a run folder. It is detected, or harmless; never silent.

    python -m tests.campaign.flips --count 1000 --seed 0 --seconds 3600

After each flip `optg verify` and the commands that read the file are called: evaluate, export, report and train, which
resumes. A flip is detected if a command refuses the file or warns of it, and harmless if all commands print and write what
they do for the undamaged folder. Everything else is silent: a wrong result that nobody is told of.
"""

import re
from pathlib import Path
from typing import NamedTuple

from tests.campaign import server, small_run
from tests.campaign.part import Part, run

STRIDE, METHOD = 64, "optg"
FOLDERS = ("finished", "interrupted")
NOT_OURS = (".lock",)  # empty, never read
NOT_READ = {"checkpoints": ("evaluate", "export", "report"), "model.safetensors": ("report",)}  # of a finished run
WARNED = re.compile(r"damaged|warning|checksum|unverif|not whole|no result", re.IGNORECASE)


class Flip(NamedTuple):
    state: str  # finished or interrupted
    file: str
    byte: int

    def __str__(self) -> str:
        return f"{self.state} run, {self.file}, byte {self.byte}, bit {self.bit}"

    @property
    def bit(self) -> int:
        return self.byte // STRIDE % 8


class Result(NamedTuple):
    """What a command printed and wrote."""

    status: int
    text: str
    written: bytes

    @property
    def is_warning(self) -> bool:
        said = self.text.replace("nothing is damaged", "")
        return self.status != 0 or bool(WARNED.search(said)) or b"damaged" in self.written


def has_verify() -> bool:
    from optg import cli

    return "verify" in cli.COMMANDS


class Readers:
    """The commands that read a run folder, and what they say about the undamaged one."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "output"
        self.run = folder / "run"
        self.pristine = {
            "finished": small_run.undisturbed(folder / "finished", METHOD),
            "interrupted": small_run.interrupted(folder / "interrupted", METHOD),
        }
        self.expected = {(state, name): self.read(state, name) for state in FOLDERS for name in self.commands(state)}
        doubted = {f"{state} {name}": found.text for (state, name), found in self.expected.items() if found.is_warning}
        assert not doubted, doubted

    def commands(self, state: str) -> dict[str, tuple[object, ...]]:
        """Return the commands by name. `resume` is last: it writes to the folder."""
        verify: dict[str, tuple[object, ...]] = {"verify": ("verify", self.run)} if has_verify() else {}
        resume = {"resume": small_run.training(self.run, METHOD)}
        if state == "interrupted":
            newest = self.run / "checkpoints" / max(p.name for p in (self.pristine[state] / "checkpoints").glob("step-*"))
            return verify | {"evaluate": ("evaluate", newest, "--device", "cpu", *trust("evaluate"))} | resume
        return verify | {
            "evaluate": ("evaluate", self.run, "--device", "cpu", *trust("evaluate")),
            "export": ("export", self.run, "--to", "safetensors", "--output", self.output, *trust("export")),
            "report": ("report", self.run, "--output", self.output),
        } | resume  # fmt: skip

    def read(self, state: str, name: str, flip: Flip | None = None) -> Result:
        """Call a command on a fresh copy of the folder, with a bit flipped."""
        small_run.copy(self.pristine[state], self.run)
        small_run.copy(Path("nothing"), self.output) if self.output.is_dir() else self.output.unlink(missing_ok=True)
        if flip:
            path = self.run / flip.file
            content = bytearray(path.read_bytes())
            content[flip.byte] ^= 1 << flip.bit
            path.write_bytes(content)
        done = server.optg(*self.commands(state)[name])
        if name == "resume":
            text = "" if done.status == 0 and not WARNED.search(done.text) else done.text
            problems = small_run.differences(self.run, self.pristine["finished"]) if done.status == 0 else []
            return Result(done.status, text, "; ".join(problems).encode())
        page = self.output / "index.html"
        written = page.read_bytes() if page.is_file() else small_run.read(self.output)
        return Result(done.status, done.text, written)

    def judge(self, flip: Flip) -> tuple[str, str]:
        """Return `detected`, `harmless`, `silent` or `crash`, and what shows it."""
        detected = []
        for name in self.commands(flip.state):
            if name in NOT_READ.get(flip.file.split("/")[0], ()) and flip.state == "finished":
                continue
            found, expected = self.read(flip.state, name, flip), self.expected[flip.state, name]
            if "Traceback" in found.text or found.status not in (0, 1, 2):
                return "crash", f"{name}: status {found.status}: {found.text[-400:]}"
            if found.is_warning:
                detected.append(name)
            elif found != expected:
                return "silent", f"{name} prints or writes something else: {found.text[-200:]}"
        return ("detected", ", ".join(detected)) if detected else ("harmless", "")


def trust(command: str) -> tuple[str, ...]:
    """Return the option that lets a command import the model that the recipe names."""
    from importlib import import_module
    from inspect import getsource

    return ("--trust",) if "trust" in getsource(import_module(f"optg.cli.{command}")) else ()


def enumerate_flips(readers: Readers) -> list[Flip]:
    return [
        Flip(state, name, byte)
        for state in FOLDERS
        for name, content in small_run.contents(readers.pristine[state]).items()
        if name not in NOT_OURS
        for byte in range(0, len(content), STRIDE)
    ]


def carry_out(part: Part) -> None:
    readers = Readers(part.folder)
    flips = enumerate_flips(readers)
    part.total = len(flips)
    for number in part.cases():
        verdict, why = readers.judge(flips[number])
        part.counts[verdict] += 1
        if verdict in ("silent", "crash"):
            part.fail(f"{flips[number]}: {verdict}: {why}")


if __name__ == "__main__":
    run(carry_out, __doc__)
