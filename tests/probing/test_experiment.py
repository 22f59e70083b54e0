"""Tables of probing results, by hand, and the file that they are made of."""

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.probing.experiment import ProbeResult, columns_of, layer_name, read_probe_results, results_table


def result(layer: int | str, score: float, baseline: str | None = None, seed=1, task="pos") -> ProbeResult:
    return ProbeResult(task, "discriminator", layer, baseline, seed, score, 100)


def test_columns_are_in_the_order_of_layers_whatever_was_probed_first():
    columns = columns_of([result(4, 0.4), result(1, 0.1), result("pieces", 0.3, "pieces")])
    expected = [*(f"discriminator {layer}" for layer in (1, 4)), "pieces alone"]
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


def test_a_file_of_something_else_is_one_line(tmp_path):
    for content in ('{"results": [{"task": "pos"}]}', '{"results": []}', "{}"):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(UserError, match="is not readable as results of amos probe: write it again"):
            read_probe_results(tmp_path)
