from optg.report import figures
from tests.report.fake_runs import read_group, write_forty_runs, write_run


def test_curves_show_the_metrics(tmp_path):
    write_run(tmp_path / "a", "optg")
    write_run(tmp_path / "b", "gmp", finished=False)
    shown = read_group(tmp_path)
    by_label = {series.label.split()[0]: series.points for series in figures.sparsity(shown).series}
    assert by_label["optg"][-1] == (12, 95.0) and by_label["gmp"][-1] == (6, 47.5)
    assert [series.label.split()[0] for series in figures.score_rate(shown).series] == ["optg"]
    assert [len(figures.late_accuracy(shown).series), len(figures.accuracy(shown).series)] == [1, 2]
    write_run(tmp_path / "c", "rigl", epochs=40)
    late = {series.label.split()[0]: series.points for series in figures.late_accuracy(read_group(tmp_path)).series}
    assert [late["optg"][i][0] for i in (0, -1)] == [75, 100] and len(late["optg"]) == 4
    assert [late["rigl"][i][0] for i in (0, -1)] == [75, 100] and len(late["rigl"]) == 11


def test_titles_say_which_images_were_used(tmp_path):
    write_run(tmp_path / "a", "optg", validate=True)
    shown = read_group(tmp_path)
    plots = figures.accuracy(shown), figures.late_accuracy(shown), figures.test_loss(shown)
    assert [plot.title for plot in plots] == ["Validation accuracy", "Validation accuracy, last quarter", "Validation loss"]
    write_run(tmp_path / "b", "gmp")
    assert figures.accuracy(read_group(tmp_path)).title == "Test or validation accuracy"


def test_legends_name_methods_if_there_are_many_runs(tmp_path):
    shown = read_group(write_forty_runs(tmp_path))
    assert [entry.label for entry in figures.accuracy(shown).legend][:3] == ["dense", "optg", "gmp"]
    assert len(figures.accuracy(shown).legend) == 10 and len(figures.accuracy(shown).series) == 40
