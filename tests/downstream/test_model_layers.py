"""``--layers``, ``--new-top-layers``, ``--pooling``, ``--freeze-encoder``: against computation by hand; refusals."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import fine_tuning_task, small_amos, small_electra, small_electric, small_mlm, small_teams
from torch import Tensor
from torch.nn.functional import cross_entropy

from amos_fairseq.downstream.model import TextModel
from amos_fairseq.downstream.spans.task import SpanModel
from amos_fairseq.downstream.words.model import WordModel
from amos_fairseq.errors import UserError
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.modules.encoder import TransformerEncoder, parameter_group
from amos_fairseq.optim.grouped_adam import parameter_groups

HEAD = "sentence_classification_head"
TOKENS = torch.tensor([[0, 5, 6, 2, 7, 8, 9, 2], [0, 10, 2, 11, 2, 1, 1, 1]])
FOUR_LAYERS = {"encoder_layers": 4, "relative_position_scheme": "t5"}
OBJECTIVES: dict[str, Callable[[], PretrainingModel]] = {
    "mlm": lambda: small_mlm(**FOUR_LAYERS),
    "amos": lambda: small_amos(**FOUR_LAYERS),
    "electra": lambda: small_electra(**FOUR_LAYERS),
    "electric": lambda: small_electric(**FOUR_LAYERS),
    "teams": small_teams,
    "teams rtd": lambda: small_teams(representation="rtd"),
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


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kept", [1, 3, 4])
@torch.no_grad()
def test_layer_k_is_the_k_th_layer_of_the_checkpoint(objective: str, kept: int) -> None:
    source = pretrained(objective)
    model = started_from(source, objective, layers=str(kept))
    expected = layer_by_layer(source.embed_tokens(TOKENS), source.encoder)[kept]
    torch.testing.assert_close(model.extract_features(TOKENS), expected, rtol=0, atol=0)
    assert len(model.encoder.layers) == model.encoder.shape.num_layers == kept
    # A fine-tuned checkpoint of K layers is loaded by a model with the same setting, and by one of K layers.
    for settings in ({"layers": str(kept)}, {"encoder_layers": kept}):
        again = started_from(model, objective, **settings)
        assert again.state_dict().keys() == model.state_dict().keys()
        torch.testing.assert_close(again.extract_features(TOKENS), expected, rtol=0, atol=0)


@torch.no_grad()
def test_mixture_is_elmos_formula() -> None:
    """g sum_l softmax(s)_l x_l over the input of the first layer and four outputs, in float64; at the start their mean."""
    source = pretrained("amos")
    model = started_from(source, "amos", layers="mix")
    states = [each.double() for each in layer_by_layer(source.embed_tokens(TOKENS), source.encoder)]
    assert len(states) == 5
    torch.testing.assert_close(model.extract_features(TOKENS).double(), sum(states) / 5, rtol=1e-6, atol=1e-6)
    scores = torch.tensor([0.5, -1.0, 2.0, 0.0, 0.3])
    model.layer_mixture.scores.copy_(scores)
    model.layer_mixture.scale.fill_(1.7)
    shares = [score.double().exp() for score in scores]
    expected = 1.7 * sum(share * state for share, state in zip(shares, states, strict=True)) / sum(shares)
    # Five terms of about 1 in float32.
    torch.testing.assert_close(model.extract_features(TOKENS).double(), expected, rtol=1e-5, atol=1e-5)


def test_mixture_learns_at_the_rate_of_the_heads_without_decay() -> None:
    model = fine_tuned("mlm", layers="mix")
    groups = [parameter_group(parameter) for parameter in model.layer_mixture.parameters()]
    assert [(group.depth, group.is_decayed) for group in groups] == [(0, False), (0, False)]
    logits, _ = model(TOKENS, classification_head_name=HEAD)
    logits.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.layer_mixture.parameters())
    assert len(list(parameter_groups(model.parameters(), 0.1, False, 0.5))) == 2 * (1 + 4 + 1)


@pytest.mark.parametrize(("kept", "number"), [("last", 2), ("3", 1), ("mix", 4)])
def test_upper_layers_are_new_once(kept: str, number: int) -> None:
    source = pretrained("electra")
    before = {f"encoder.{name}": value for name, value in source.discriminator.state_dict().items()}
    model = started_from(source, "electra", layers=kept, new_top_layers=number)
    initial = fine_tuned("electra", layers=kept, new_top_layers=number)
    num_layers = len(model.encoder.layers)
    for name, value in model.state_dict().items():
        if not name.startswith("encoder."):
            continue
        layer = int(name.split(".")[2]) if name.startswith("encoder.layers.") else -1
        is_new = layer >= num_layers - number
        assert torch.equal(value, (initial.state_dict() if is_new else before)[name]), name
    # A resume keeps them as they are; another number makes others new; without the setting all are as trained.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    again = started_from(model, "electra", layers=kept, new_top_layers=number)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    plain = started_from(model, "electra", layers=kept)
    assert plain.state_dict().keys() == model.state_dict().keys() - {"new_layers"}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())
    if number > 1:
        other = started_from(model, "electra", layers=kept, new_top_layers=1)
        top = f"encoder.layers.{num_layers - 1}.ffn_in.weight"
        assert torch.equal(other.state_dict()[top], initial.state_dict()[top])
    # As many new layers of a shorter encoder are others.
    if (kept, number) == ("last", 2):
        shorter, top = started_from(model, "electra", layers="3", new_top_layers=2), "encoder.layers.2.ffn_in.weight"
        assert not torch.equal(shorter.state_dict()[top], model.state_dict()[top])


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


@pytest.mark.parametrize("layers", ["last", "mix"])
def test_a_frozen_encoder_trains_the_head_on_fixed_features(layers: str) -> None:
    """Three updates give the head, and the mixture, the weights of a loop over states that were computed once, in eval mode."""
    model = started_from(pretrained("amos"), "amos", layers=layers, freeze_encoder=True, dropout=0.3).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reference = started_from(model, "amos", layers=layers)
    with torch.no_grad():
        states = layer_by_layer(reference.embed_tokens(TOKENS), reference.encoder)
    head, mixture, target = reference.classification_heads[HEAD], reference.layer_mixture, torch.tensor([2, 0])
    of_reference = [*head.parameters(), *(mixture.parameters() if mixture else ())]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, other = torch.optim.SGD(trained, lr=0.5), torch.optim.SGD(of_reference, lr=0.5)
    for _ in range(3):
        for used, logits in (
            (optimizer, model(TOKENS, classification_head_name=HEAD)[0]),
            (
                other,
                head(
                    states[-1]
                    if mixture is None
                    else sum(mixture.scores.softmax(0)[:, None, None, None] * torch.stack(states)) * mixture.scale,
                    TOKENS.eq(1),
                ),
            ),
        ):
            used.zero_grad()
            cross_entropy(logits, target).backward()
            used.step()
    assert model.extract_features(TOKENS).requires_grad == (layers == "mix")
    for name, value in reference.state_dict().items():
        if name.startswith(("encoder.", "embed_tokens.")):
            assert torch.equal(model.state_dict()[name], before[name]), name
        else:
            torch.testing.assert_close(model.state_dict()[name], value)
            assert not torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": "5"}, r"--layers 5 is no layer of this encoder: give 1 to 4, last or mix"),
        ({"layers": "0"}, r"--layers 0 is no layer"),
        ({"layers": "all"}, r"--layers all is no layer"),
        ({"layers": "2", "new_top_layers": 3}, r"--new-top-layers 3 must be from 0 to 2, the layers of the encoder"),
        ({"new_top_layers": -1}, r"new_top_layers|new-top-layers"),
        ({"new_top_layers": 1, "freeze_encoder": True}, "new layers must learn: without --freeze-encoder"),
    ],
)
def test_refused_settings(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fine_tuned("mlm", **settings)


def test_a_mixture_of_another_number_of_layers_starts_anew() -> None:
    before = fine_tuned("mlm", layers="mix")
    with torch.no_grad():
        before.layer_mixture.scale.fill_(3.0)
    state = {name: value for name, value in before.state_dict().items() if ".layers.3." not in name}
    model = fine_tuned("mlm", encoder_layers=3, layers="mix")
    model.load_state_dict(state)
    assert model.layer_mixture.scale.item() == 1
    assert model.layer_mixture.scores.tolist() == [0] * 4


def test_heads_of_tokens_refuse_pooling() -> None:
    cfg = dataclasses.replace(small_mlm().cfg, pooling="mean")
    for head_class, what in ((WordModel, "labels of words"), (SpanModel, "answer spans")):
        with pytest.raises(UserError, match=f"--pooling mean has no effect on a head for {what}"):
            MlmModel.build_model(cfg, fine_tuning_task(head_class))


def test_a_checkpoint_with_fewer_layers_than_the_setting_says_is_refused() -> None:
    model = fine_tuned("mlm", encoder_layers=2)
    with pytest.raises(UserError, match=r"encoder\.layers\.2\.\S+ is absent in the checkpoint.* --layers"):
        started_from(model, "mlm", layers="3")
    assert dataclasses.asdict(model.encoder.shape)["num_layers"] == 2
