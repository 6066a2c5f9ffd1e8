"""Names in messages."""

import pytest

from optg.naming import visible

RIGHT_TO_LEFT = "\u202e"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [bold] ü 模型 😀 a\tb\nc", "plain [bold] ü 模型 😀 a\tb\nc"),
        (f"photo{RIGHT_TO_LEFT}gpj.exe", r"photo\u202egpj.exe"),
        ("\x1b]0;title\x07\x1b[2J", r"\x1b]0;title\x07\x1b[2J"),
        ("a\rb\x00\x7f\x9b\u200b\ufeff\u2066", r"a\rb\x00\x7f\x9b\u200b\ufeff\u2066"),
        ("\udcff", r"\udcff"),
    ],
)
def test_invisible_characters_are_written_as_escapes(text, shown):
    assert visible(text) == shown
