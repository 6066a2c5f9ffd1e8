import math

from optg.report.markup import compact, duration, escape, signed, slug


def test_formats():
    assert [compact(v) for v in (0, 999, 1001718, 17451622, 398136320, 4.09e9, None, math.nan)] == [
        "0", "999", "1.00 M", "17.5 M", "398 M", "4.09 G", "–", "–",
    ]  # fmt: skip
    assert [duration(v) for v in (4.25, 59.96, 151.8, 3 * 3600 + 62)] == ["4.2 s", "1 min 00 s", "2 min 32 s", "3 h 01 min"]
    assert signed(-0.0111) == "−1.11" and signed(0.001) == "+0.10" and signed(None) == "–"
    assert escape("<a href='x'>\x1b\udcff") == "&lt;a href=&#x27;x&#x27;&gt;��" and slug("../../x: <y>") == "x-y"
