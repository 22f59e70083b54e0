"""MLM's loss and every gradient against Hugging Face's ElectraForMaskedLM, which is BERT with a projection."""

import math

import pytest
import torch
from small_models import AMOS_SETTINGS, small_batch, small_task
from torch.nn.functional import cross_entropy
from transformers import ElectraConfig as HuggingFaceConfig
from transformers import ElectraForMaskedLM

from amos_fairseq.criterions.mlm import MlmCriterion
from amos_fairseq.hugging_face.weights import MASKED_LM, to_hugging_face
from amos_fairseq.models.configuration import EncoderConfig
from amos_fairseq.models.mlm import MlmModel

EMBEDDING = 8
# The loss runs through 2 layers in float32; sums have another order on the other side.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def small_mlm(seed: int = 0, **settings) -> MlmModel:
    kept = {name: value for name, value in AMOS_SETTINGS.items() if name not in ("generator_depths", "max_update")}
    torch.manual_seed(seed)
    model = MlmModel.build_model(EncoderConfig(**(kept | {"embedding_dim": EMBEDDING} | settings)), small_task())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.train()


def as_hugging_face(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed = {name.replace("transformer.", "encoder.", 1): tensor for name, tensor in tensors.items()}
    return to_hugging_face("electra", MASKED_LM, renamed)


@pytest.mark.parametrize("treatment", ["mask", "bert"])
def test_loss_and_gradients_are_those_of_hugging_face(treatment: str) -> None:
    model, batch = small_mlm(token_types=2), small_batch()
    inputs = batch["net_input"]
    if treatment == "bert":  # some masked positions show another or the original token
        shown = inputs["masked_tokens"][0]
        shown[inputs["masked_positions"][0, 0]] = inputs["tokens"][0, inputs["masked_positions"][0, 0]]
        shown[inputs["masked_positions"][0, 1]] = 7
    loss, sample_size, logged = MlmCriterion(small_task())(model, batch)
    loss.backward()

    weights = as_hugging_face(model.state_dict())
    config = HuggingFaceConfig(
        vocab_size=len(weights["electra.embeddings.word_embeddings.weight"]), embedding_size=EMBEDDING,
        hidden_size=AMOS_SETTINGS["encoder_embed_dim"], intermediate_size=AMOS_SETTINGS["encoder_ffn_embed_dim"],
        num_attention_heads=AMOS_SETTINGS["encoder_attention_heads"], num_hidden_layers=AMOS_SETTINGS["encoder_layers"],
        max_position_embeddings=AMOS_SETTINGS["max_positions"], pad_token_id=1, layer_norm_eps=1e-5, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    reference = ElectraForMaskedLM(config)
    reference.load_state_dict(weights, strict=True)
    labels = torch.full_like(inputs["tokens"], -100)
    for row, slot in inputs["masked_weights"].nonzero().tolist():
        position = inputs["masked_positions"][row, slot]
        labels[row, position] = inputs["tokens"][row, position]
    logits = reference(inputs["masked_tokens"], attention_mask=inputs["tokens"].ne(1).long()).logits
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()

    torch.testing.assert_close(loss, expected, **CLOSE)
    assert sample_size == batch["num_masked"] == int(labels.ne(-100).sum())
    right = (logits.argmax(-1).eq(labels) & labels.ne(-100)).sum()
    assert int(logged["mlm_acc_2"]) == int(right)
    ours = as_hugging_face({name: parameter.grad for name, parameter in model.named_parameters()})
    theirs = dict(reference.named_parameters())
    for name, gradient in ours.items():
        if name in theirs:
            torch.testing.assert_close(
                gradient, theirs[name].grad, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
            )
    assert len(set(ours) & set(theirs)) >= len(theirs) - 1


def test_padding_and_padded_slots_count_nothing() -> None:
    model, long, short = (
        small_mlm(),
        small_batch(lengths=(12, 12)),
        small_batch(lengths=(12, 12), num_columns=16, slots=6),
    )
    criterion = MlmCriterion(small_task())
    torch.testing.assert_close(criterion(model, long)[0], criterion(model, short)[0], **CLOSE)
    # With all weights 0 every row is as likely as any other.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loss, masked, _ = criterion(model, long)
    assert float(loss) / masked == pytest.approx(math.log(len(model.embed_tokens.weight)), abs=1e-5)
