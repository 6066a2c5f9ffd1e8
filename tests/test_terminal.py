"""What is printed to a terminal."""

import io

import pytest
from rich.table import Table
from torch import nn, optim

import optg
from optg.terminal import PlainConsole

NAMES = ["a[/b]", "[red]x[/red]", ":smile:", "\x1b[2J", "b\u202ecod.exe", "[link=file:///etc/passwd]x[/link]"]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_printed_as_they_are(name):
    output = io.StringIO()
    console = PlainConsole(file=output, width=100)
    table = Table("column", title=name)
    table.add_row(name)
    console.print(name)
    console.print(table)
    shown = name.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")
    assert output.getvalue().count(shown) == 3 and not {"\x1b", "\u202e"} & set(output.getvalue())


def test_the_summary_of_a_sparsifier_can_be_printed_whatever_its_layers_are_called():
    from rich.console import Console

    model = nn.ModuleDict({"a[/b]": nn.Linear(8, 8)})
    sparsifier = optg.sparsify(model, optim.SGD(model.parameters(), 0.1), "gmp", sparsity=0.5, steps=10)
    output = io.StringIO()
    Console(file=output, width=100).print(sparsifier.summary())
    assert "a[/b].weight" in output.getvalue()
