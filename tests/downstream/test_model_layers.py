"""``--pooling`` and ``--freeze-encoder``, against computation by hand."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import fine_tuning_task, small_amos, small_mlm
from torch import Tensor
from torch.nn.functional import cross_entropy

from amos_fairseq.downstream.model import TextModel
from amos_fairseq.downstream.spans.task import SpanModel
from amos_fairseq.downstream.words.model import WordModel
from amos_fairseq.errors import UserError
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.modules.encoder import TransformerEncoder

HEAD = "sentence_classification_head"
TOKENS = torch.tensor([[0, 5, 6, 2, 7, 8, 9, 2], [0, 10, 2, 11, 2, 1, 1, 1]])
FOUR_LAYERS = {"encoder_layers": 4, "relative_position_scheme": "t5"}
OBJECTIVES: dict[str, Callable[[], PretrainingModel]] = {
    "mlm": lambda: small_mlm(**FOUR_LAYERS),
    "amos": lambda: small_amos(**FOUR_LAYERS),
}


def pretrained(objective: str) -> PretrainingModel:
    return OBJECTIVES[objective]().eval()


def fine_tuned(objective: str, **settings: Any) -> TextModel:
    source = OBJECTIVES[objective]()
    torch.manual_seed(1)
    model = type(source).build_model(dataclasses.replace(source.cfg, **settings), fine_tuning_task())
    model.register_classification_head(HEAD, 3)
    return model.eval()


def started_from(source: torch.nn.Module, objective: str, **settings: Any) -> TextModel:
    """A fine-tuned model with the weights of another model."""
    model = fine_tuned(objective, **settings)
    model.load_state_dict({key: value.clone() for key, value in source.state_dict().items()})
    return model


def layer_by_layer(embedded: Tensor, encoder: TransformerEncoder) -> list[Tensor]:
    """The input of the first layer and the output of each, one call of a layer after another."""
    bias = encoder.attention_context(embedded, TOKENS.eq(1))
    states = [encoder.embed(embedded, None)]
    for layer in encoder.layers:
        states.append(layer(states[-1], bias))
    return states


@torch.no_grad()
def test_mean_pooling_by_hand() -> None:
    """The mean over the tokens of each text, without padding; the same alone and in a batch."""
    model = started_from(pretrained("mlm"), "mlm", pooling="mean")
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
    model = started_from(pretrained("amos"), "amos", freeze_encoder=True, dropout=0.3).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reference = started_from(model, "amos")
    with torch.no_grad():
        states = layer_by_layer(reference.embed_tokens(TOKENS), reference.encoder)[-1]
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
    cfg = dataclasses.replace(small_mlm().cfg, pooling="mean")
    for head_class, what in ((WordModel, "labels of words"), (SpanModel, "answer spans")):
        with pytest.raises(UserError, match=f"--pooling mean has no effect on a head for {what}"):
            MlmModel.build_model(cfg, fine_tuning_task(head_class))
