"""examples/benchmark/changes.py: each change undoes one fast path, changes no loss, and leaves everything as it was."""

import sys

import pytest
import torch
from small_electra import small_electra
from small_models import small_batch
from tiny_runs import ROOT
from torch.nn.functional import linear as product

from amos_fairseq.functional import linear, output_layer
from amos_fairseq.functional.attention import attention_by_definition, fast_attention
from amos_fairseq.modules import dropout
from amos_fairseq.modules.attention import SelfAttention

sys.path.insert(0, str(ROOT / "examples" / "benchmark"))
import changes


@pytest.mark.parametrize("change", changes.CHANGES, ids=lambda change: change.__name__)
def test_a_change_keeps_the_loss_and_is_taken_back(change) -> None:
    """Sums in another order; a padded slot holds a token of any value."""
    model, batch = small_electra().eval(), small_batch((12,) * 4)["net_input"]
    with change(model):
        without = model(**batch).mlm_nll
    torch.testing.assert_close(without, model(**batch).mlm_nll, rtol=1e-5, atol=1e-5)
    assert {module.attend for module in model.modules() if isinstance(module, SelfAttention)} == {fast_attention}
    assert model.is_fast
    assert output_layer.KEPT_BYTES_OF_CPU > 0
    assert isinstance(linear.LEAST_PRODUCTS, int)


def test_each_change_reaches_what_it_undoes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = small_electra(), small_batch((12,) * 4)["net_input"]
    with changes.attention(model):
        assert {m.attend for m in model.modules() if isinstance(m, SelfAttention)} == {attention_by_definition}
    with changes.output_layer_and_sampling(model):
        assert not model.is_fast
    with changes.hidden_dropout(model):
        torch.manual_seed(0)
        dropped = dropout.FastDropout(0.5)(torch.ones(64))
    torch.manual_seed(0)
    assert torch.equal(dropped, torch.nn.functional.dropout(torch.ones(64), 0.5))
    with changes.kept_logits(model):
        assert not output_layer.can_be_kept(torch.ones(1, 1, 1), torch.ones(1, 1))
    monkeypatch.setattr(linear, "LEAST_PRODUCTS", 0)
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    assert linear.takes_convolution(x, weight)
    with changes.linear_layers(model):
        assert not linear.takes_convolution(x, weight)
    torch.testing.assert_close(linear.linear(x, weight, torch.zeros(4)), product(x, weight))
    shapes = []
    model.generator.layers[-1].register_forward_hook(lambda module, given, states: shapes.append(states.shape[1]))
    with changes.masked_positions_of_the_last_layer(model):
        model(**batch)
    model(**batch)
    assert shapes == [12, batch["masked_positions"].size(1)]


def test_the_table_has_a_row_for_each_change(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    words = ["changes.py", "electra_tiny", "--steps", "2", "--set", "dataset.batch_size=2"]
    monkeypatch.setattr(sys, "argv", words)
    changes.main()
    *_, head, line, first, _, _, _, _, last = capsys.readouterr().out.splitlines()
    assert head.startswith("| without | ms a step")
    assert set(line) == set("|- :")
    assert first.startswith("| attention | ")
    assert last.startswith("| masked positions of the last layer | ")
