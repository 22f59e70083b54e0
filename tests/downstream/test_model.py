"""The encoder of a labelled task: loading checkpoints, checkpoints that are refused, its head, pooling and a frozen encoder."""

from typing import Any

import pytest
import torch
from small_models import AMOS_SETTINGS, fine_tuning_task, small_amos
from torch.nn.functional import cross_entropy

from amos_fairseq.downstream.model import FineTunedModel, TextModel
from amos_fairseq.downstream.spans.task import SpanModel
from amos_fairseq.downstream.words.model import WordModel
from amos_fairseq.errors import UserError
from amos_fairseq.models.amos import AmosConfig, AmosModel

HEAD = "sentence_classification_head"
# Two pairs of texts, the second padded; ids 4 to 43 are ordinary tokens, 2 ends a text, 1 is padding.
TOKENS = torch.tensor([[0, 5, 6, 2, 7, 8, 9, 2], [0, 10, 2, 11, 2, 1, 1, 1]])


def with_encoder(model_class: type[FineTunedModel], **settings: Any) -> Any:
    return AmosModel.build_model(AmosConfig(**(AMOS_SETTINGS | settings)), fine_tuning_task(model_class))


def fine_tuned(num_classes: int = 3, **settings: Any) -> TextModel:
    model = with_encoder(TextModel, **settings)
    model.register_classification_head(HEAD, num_classes)
    return model.eval()


@pytest.mark.parametrize("settings", [{}, {"pooling": "mean"}, {"pooler_activation_fn": "gelu"}], ids=str)
def test_a_head_with_the_function_of_an_imported_pooler_starts_from_it(settings: dict, caplog) -> None:
    """tanh of a dense layer on the last state of the first token; another head does not, and both are said."""
    caplog.set_level("INFO")
    pretrained, width = small_amos(), AMOS_SETTINGS["encoder_embed_dim"]
    pretrained.pooler_weight, pretrained.pooler_bias = torch.randn(width, width), torch.randn(width)
    continued = small_amos(seed=1)  # as fairseq loads a checkpoint to train it further
    continued.load_state_dict(pretrained.state_dict())
    assert "pooler_weight" not in dict(continued.named_parameters())
    model = fine_tuned(**settings)
    model.load_state_dict(continued.state_dict())
    dense = model.classification_heads[HEAD].dense
    starts_from_it = torch.equal(dense.weight, pretrained.pooler_weight) and torch.equal(
        dense.bias, pretrained.pooler_bias
    )
    assert starts_from_it is (not settings)
    assert ("starts from the pooler" in caplog.text) is (not settings)
    assert ("do not fit this task are not used: pooler_weight, pooler_bias" in caplog.text) is bool(settings)
    assert f"{HEAD}.output.weight" in str(model.newly_initialized)


@pytest.mark.parametrize("activation", ["tanh", "gelu", "linear"])
def test_classification_head_by_hand(activation: str) -> None:
    """Dense, activation, output on the first state, in plain matrix products; the linear head has the output alone."""
    model = fine_tuned(pooler_activation_fn=activation, pooler_dropout=0.5)
    state, head = model.extract_features(TOKENS)[:, 0], model.classification_heads[HEAD]
    assert head.dropout.p == 0.5
    if activation == "linear":
        assert set(head.state_dict()) == {"output.weight", "output.bias"}
    else:
        function = {"tanh": torch.tanh, "gelu": torch.nn.functional.gelu}[activation]
        state = function(state @ head.dense.weight.t() + head.dense.bias)
    logits, _ = model(TOKENS, src_lengths=None, features_only=True, classification_head_name=HEAD)
    torch.testing.assert_close(logits, state @ head.output.weight.t() + head.output.bias)


@pytest.mark.parametrize("settings", [{}, {"encoder": "modernbert"}], ids=str)
@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_every_head_reads_the_same_from_packed_texts(settings: dict, pooling: str) -> None:
    """Logits, spans, labels of words, and the gradients of the token embeddings, without and with lengths."""
    settings = settings | ({"relative_position_scheme": "none", "embedding_dim": 0} if "encoder" in settings else {})
    texts, lengths = TOKENS, [8, 5]
    calls = [(fine_tuned(pooling=pooling, **settings), {"classification_head_name": HEAD})]
    if pooling == "first":
        spans, words = with_encoder(SpanModel, **settings), with_encoder(WordModel, **settings)
        spans.register_span_head("joint")
        words.register_word_head("upos_labels", 3)
        mask = torch.arange(8).expand(2, -1) < torch.tensor(lengths)[:, None]
        calls += [(spans, {"answer_mask": mask, "span_targets": (torch.tensor([4, 1]), torch.tensor([5, 1]))})]
        calls += [(words, {"word_positions": torch.tensor([[1, 4, 6], [1, 3, 0]])})]
    for model, arguments in calls:
        model.double().eval()
        found = []
        for given in (None, lengths):
            model.zero_grad()
            output = model(texts, lengths=given, **arguments)
            values = output[0] if isinstance(output, tuple) else output
            values = values["upos_labels"] if isinstance(values, dict) else values
            values.pow(2).sum().backward()
            found.append([values.detach(), model.embed_tokens.weight.grad])
        torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_positions": 30}, "embed_positions.* --max-positions"),
        ({"encoder_layers": 3}, "layers.2.* absent in the checkpoint.* --arch"),
        ({"encoder_layers": 1}, "layers.1.* absent here"),
        ({"relative_position_scheme": "none"}, "relative_position"),
        ({"encoder_ffn_embed_dim": 32}, "ffn_in"),
        ({"encoder_embed_dim": 32}, "embed_tokens"),
    ],
)
def test_another_encoder_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fine_tuned(**change).load_state_dict(small_amos().state_dict())
    of_another_vocabulary = small_amos().state_dict() | {"embed_tokens.weight": torch.zeros(128, 16)}
    with pytest.raises(UserError, match=r"embed_tokens.*binarized with its tokenizer"):
        fine_tuned().load_state_dict(of_another_vocabulary)


@pytest.mark.parametrize("num_types", [2, 3])
def test_token_types_follow_the_separators(num_types: int) -> None:
    """A second ``</s>`` before the second text belongs to that text."""
    assert fine_tuned().token_types(TOKENS) is None
    types = fine_tuned(token_types=num_types).token_types(TOKENS)
    assert types.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1]]
    model = fine_tuned(token_types=num_types)
    assert model.token_types(torch.tensor([[0, 5, 2, 2, 7, 8, 2]])).tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    # Type 1 moves the states of a pair; a single text has type 0 alone, so row 1 does not matter.
    single = torch.tensor([[0, 5, 6, 2]])
    before = model.extract_features(single), model.extract_features(TOKENS)
    with torch.no_grad():
        model.encoder.embed_token_types.weight[1] += torch.randn(AMOS_SETTINGS["encoder_embed_dim"])
    torch.testing.assert_close(model.extract_features(single), before[0], rtol=0, atol=0)
    assert (model.extract_features(TOKENS) - before[1]).abs().max() > 1e-3


@torch.no_grad()
def test_mean_pooling_by_hand() -> None:
    """The mean over the tokens of each text, without padding; the same alone and in a batch."""
    model = fine_tuned(pooling="mean")
    states, head = model.extract_features(TOKENS), model.classification_heads[HEAD]
    pooled = torch.stack([states[0].mean(0), states[1, :5].mean(0)])
    expected = torch.tanh(pooled @ head.dense.weight.t() + head.dense.bias) @ head.output.weight.t() + head.output.bias
    logits, _ = model(TOKENS, classification_head_name=HEAD)
    torch.testing.assert_close(logits, expected)
    alone, _ = model(TOKENS[1:, :5], classification_head_name=HEAD)
    torch.testing.assert_close(alone, logits[1:])
    assert not torch.allclose(logits, head(states[:, :1]))


def test_a_frozen_encoder_trains_the_head_on_fixed_features() -> None:
    """Three updates give the head the weights of a loop over states that were computed once, in eval mode."""
    model, reference = fine_tuned(freeze_encoder=True, dropout=0.3).train(), fine_tuned()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reference.load_state_dict({name: value.clone() for name, value in before.items()})
    with torch.no_grad():
        embedded = reference.embed_tokens(TOKENS)
        bias = reference.encoder.attention_context(embedded, TOKENS.eq(1))
        states = reference.encoder.embed(embedded, None)
        for layer in reference.encoder.layers:
            states = layer(states, bias)
    head, target = reference.classification_heads[HEAD], torch.tensor([2, 0])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, other = torch.optim.SGD(trained, lr=0.5), torch.optim.SGD(head.parameters(), lr=0.5)
    for _ in range(3):
        of_model = model(TOKENS, classification_head_name=HEAD)[0]
        for used, logits in ((optimizer, of_model), (other, head(states, TOKENS.eq(1)))):
            used.zero_grad()
            cross_entropy(logits, target).backward()
            used.step()
    assert not model.extract_features(TOKENS).requires_grad
    for name, value in reference.state_dict().items():
        if name.startswith(("encoder.", "embed_tokens.")):
            assert torch.equal(model.state_dict()[name], before[name]), name
        else:
            torch.testing.assert_close(model.state_dict()[name], value)
            assert not torch.equal(value, before[name]), name


def test_heads_of_tokens_refuse_pooling() -> None:
    for head_class, what in ((WordModel, "labels of words"), (SpanModel, "answer spans")):
        with pytest.raises(UserError, match=f"--pooling mean has no effect on a head for {what}"):
            with_encoder(head_class, pooling="mean")
