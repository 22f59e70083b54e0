"""Tables of probing results, by hand."""

from itertools import product

from amos_fairseq.probing.results import (
    ProbeResult,
    column_styles,
    columns_of,
    layer_name,
    probing_figure,
    results_table,
)


def result(layer: int | str, score: float, baseline: str | None = None, seed=1, task="pos") -> ProbeResult:
    return ProbeResult(task, "discriminator", layer, baseline, seed, "micro_f1", score, 100)


def test_columns_are_in_the_order_of_layers_whatever_was_probed_first():
    columns = columns_of([result(4, 0.4), result("mix", 0.5), result(1, 0.1), result("pieces", 0.3, "pieces")])
    expected = [*(f"discriminator {layer}" for layer in (1, 4, "mix")), "pieces alone"]
    assert [layer_name(column) for column in columns] == expected


def test_a_few_layers_are_columns_and_many_are_rows():
    """The deviation of 0.5 and 0.7 with divisor n - 1 is 0.1414."""
    few = [result(1, 0.5), result(1, 0.7, seed=2), result(2, 0.25), result(2, 0.125, task="relations")]
    table = results_table(few, "", [])
    assert table.columns == ["task", "discriminator 1", "discriminator 2"]
    assert table.rows == [["pos", "60.0 ± 14.1", "25.0"], ["relations", "-", "12.5"]]
    many = results_table([result(layer, layer / 10) for layer in range(1, 10)], "", [])
    assert many.columns == ["layer", "pos"]
    assert many.rows[0] == ["discriminator 1", "10.0"]
    assert len(many.rows) == 9


def test_no_marker_hides_another_and_the_most_frequent_label_is_a_line():
    """Two layers and their mixture with equal scores, and 20 % with the most frequent label."""
    majority = ProbeResult("pos", "majority", "majority", "majority", 0, "micro_f1", 0.2, 100)
    results = [result(1, 0.5), result(2, 0.5), result("mix", 0.5), majority]
    assert [layer_name(column) for column in columns_of(results)][-1] == "most frequent label"
    ax = probing_figure(results).axes[0]
    places = [tuple(line.get_xydata()[0]) for line in ax.lines]
    assert [x for x, _ in places] == [50, 50, 50]
    inches = ax.figure.get_figheight() - 1.6 - 0.12 * 3  # of the one row
    heights = [y * inches * 72 for _, y in places]
    assert heights[1] - heights[0] >= 6, "the size of a marker"
    assert len({str(line.get_color()) for line in ax.lines}) == 3
    (bar,) = [lines for lines in ax.collections if lines.get_linestyle()[0][1] is not None]
    assert bar.get_segments()[0][:, 0].tolist() == [20, 20]


def test_each_column_of_the_figure_has_its_own_look():
    """Two separate generators with the same layers, the discriminator, and their random weights."""
    layers = [*product(("generator_1", "generator_2"), (0, 1, "mix")), ("discriminator", 2)]
    columns = [(*layer, baseline) for baseline in (None, "random") for layer in layers]
    looks = [(str(s["color"]), s["marker"], s["fillstyle"]) for s in column_styles(columns)]
    assert len(set(looks)) == len(columns) == 14
