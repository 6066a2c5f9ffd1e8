"""The package is built in layers: imports point down, core is small in what it needs, files stay short."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import optg
from tests.architecture.blocked import run_without
from tests.architecture.modules import FILES, ROOT, area, imports, module_name

# From top to bottom. A module may import its own area and the layers below.
LAYERS = [
    {"cli"},
    {"experiments"},
    {"report"},
    {"deploy"},
    {"training"},
    {"data", "models", "integrations"},
    {"sparsifier"},
    {"step"},
    {"methods"},
    {"core"},
    {"terminal"},
    {"files", "machine", "naming", "trust"},
]
HEIGHTS = {name: height for height, layer in enumerate(reversed(LAYERS)) for name in layer}
ENTRY_POINTS = {"", "__main__"}  # optg/__init__.py forwards to every layer; optg/__main__.py starts the command line

SPARSE_TRAINING = ("core", "methods", "step", "sparsifier")
ALLOWED_PACKAGES = {"torch", "numpy", "optg", *sys.stdlib_module_names}
OPTIONAL_PACKAGES = {  # module prefix -> the package that its functions import
    "optg.core.passes.": "triton",  # only where tensors are on a GPU; the CUDA builds of torch bring Triton
    "optg.core.channels.trace": "torch_pruning",  # an extra; without it, finding coupled channels raises ImportError
}
CLI_PACKAGES = ("rich", "tyro", "PIL", "matplotlib", "safetensors")

MAX_FILE_LINES, MAX_CLASS_LINES = 350, 200
# Files that may be longer, such as "core/passes/kernels.py". Each explains in its first 20 lines why it is long.
LONG_FILES: set[str] = set()


def home(imported: str) -> str:
    """Return the area that an import leads to, resolving the names that optg itself forwards: optg.load is in deploy."""
    found = area(imported)
    return area(getattr(optg, found).__module__) if found in {*optg.__all__} - {"deploy", "methods"} else found


def test_every_area_has_a_layer() -> None:
    assert {area(module_name(file)) for file in FILES} - ENTRY_POINTS <= HEIGHTS.keys()


def test_imports_point_down() -> None:
    upward = []
    for file in FILES:
        source = area(module_name(file))
        if source in ENTRY_POINTS:
            continue
        for line, imported in imports(file):
            target = home(imported) if imported.startswith("optg.") else source
            if target in HEIGHTS and target != source and HEIGHTS[target] >= HEIGHTS[source]:
                upward.append(f"{file.relative_to(ROOT)}:{line} imports {imported}")
    assert not upward, "\n".join(upward)


def test_sparse_training_needs_only_torch_and_numpy() -> None:
    foreign = []
    for file in FILES:
        module = module_name(file)
        if area(module) in SPARSE_TRAINING:
            allowed = ALLOWED_PACKAGES | {package for prefix, package in OPTIONAL_PACKAGES.items() if module.startswith(prefix)}
            found = [(line, name) for line, name in imports(file) if name.split(".")[0] not in allowed]
            foreign += [f"{file.relative_to(ROOT)}:{line} imports {name}" for line, name in found]
    assert not foreign, "\n".join(foreign)


def test_sparsify_works_without_the_packages_of_the_command_line() -> None:
    program = """
import torch, optg
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sparsifier = optg.sparsify(model, optimizer, sparsity=0.5, epochs=2, steps_per_epoch=2)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
sparsifier.finish()
print(sparsifier.sparsity)
"""
    done = run_without(CLI_PACKAGES, program)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 0.5


def long_files() -> dict[str, int]:
    """Return the number of lines of each source file above the limit."""
    files = [*FILES, *ROOT.rglob("*.c"), *ROOT.rglob("*.h")]
    lengths = {file.relative_to(ROOT).as_posix(): len(file.read_text().splitlines()) for file in files}
    return {file: lines for file, lines in lengths.items() if lines > MAX_FILE_LINES}


def test_files_are_short() -> None:
    found = [f"{file} has {lines} lines" for file, lines in long_files().items() if file not in LONG_FILES]
    assert not found, "\n".join(found)


def test_no_exception_is_left_over() -> None:
    assert LONG_FILES <= long_files().keys()


def test_long_files_say_why() -> None:
    headers = {file: "\n".join((ROOT / file).read_text().splitlines()[:20]) for file in LONG_FILES}
    assert [file for file, header in headers.items() if not re.search(r"\blong(er)?\b", header)] == []


def test_classes_are_short() -> None:
    found = [f"{name} has {lines} lines" for file in FILES for name, lines in class_lengths(file) if lines > MAX_CLASS_LINES]
    assert not found, "\n".join(found)


def class_lengths(file: Path) -> list[tuple[str, int]]:
    """Return the name and number of lines of each class in a file."""
    classes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]
    return [(f"{module_name(file)}.{node.name}", (node.end_lineno or 0) - node.lineno + 1) for node in classes]


def subclasses(base: type) -> Iterator[type]:
    for child in base.__subclasses__():
        yield child
        yield from subclasses(child)


def test_only_its_own_file_asks_for_the_class_of_a_method_or_an_operation() -> None:
    from optg.deploy.engine.int8.base import Int8Op
    from optg.deploy.engine.lower import TorchCall
    from optg.deploy.engine.ops.base import Op
    from optg.deploy.engine.plan import OpSequence
    from optg.methods.base import Method

    homes: dict[str, set[str]] = {}
    for kind in (
        Op,
        Int8Op,
        OpSequence,
        TorchCall,
        *(c for base in (Op, Int8Op, OpSequence, Method) for c in subclasses(base)),
    ):
        homes.setdefault(kind.__name__, set()).add(kind.__module__)
    assert {"OptG", "Convolution", "Quantize", "Int8Segment"} <= homes.keys()
    asked = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
                names = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)} & homes.keys()
                asked += [f"{file}:{node.lineno} {name}" for name in names if module_name(file) not in homes[name]]
    assert asked == []
