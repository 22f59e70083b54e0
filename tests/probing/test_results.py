"""Tables of probing results, by hand."""

import pytest

from amos_fairseq.probing.results import ProbeResult, columns_of, layer_name, results_table


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


def test_values_that_no_probe_has():
    whole = {"task": "pos", "part": "generator", "layer": 1, "baseline": None, "seed": 1}
    whole |= {"metric": "micro_f1", "score": 1, "targets": 9}
    ProbeResult(**whole)
    for wrong in ({"score": 1.5}, {"layer": None}, {"baseline": "x"}, {"metric": "x"}, {"targets": 1.5}):
        with pytest.raises((TypeError, ValueError), match=r"."):
            ProbeResult(**whole | wrong)
