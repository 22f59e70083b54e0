"""Loss and every gradient of MLM and ELECTRA against Hugging Face's ElectraForMaskedLM and ElectraForPreTraining."""

import pytest
import torch
from small_models import ENCODER_SETTINGS, MASKED_SHARE, set_samples, small_batch, small_electra, small_mlm, small_task
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import ElectraConfig as HuggingFaceConfig
from transformers import ElectraForMaskedLM, ElectraForPreTraining

from amos_fairseq.criterions.electra import ElectraCriterion
from amos_fairseq.criterions.mlm import MlmCriterion
from amos_fairseq.hugging_face.weights import Head, to_hugging_face

EMBEDDING = 8
SIZES = tuple(ENCODER_SETTINGS[f"encoder_{size}"] for size in ("embed_dim", "ffn_embed_dim", "attention_heads"))
# The loss runs through 2 or 4 layers in float32; sums have another order on the other side.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def renamed(tensors: dict[str, Tensor], encoder: str, head: str) -> dict[str, Tensor]:
    """Embeddings, one encoder and its head under the names of Hugging Face's ELECTRA."""
    part = {name: tensor for name, tensor in tensors.items() if name.startswith(("embed_tokens", head))}
    part |= {f"encoder.{n.removeprefix(encoder)}": t for n, t in tensors.items() if n.startswith(encoder)}
    return to_hugging_face("electra", Head.MASKED_LM if head == "mlm_head" else Head.PRETRAINING, part)


def reference(model_class: type, width: int, ffn: int, heads: int, weights: dict[str, Tensor]) -> torch.nn.Module:
    rows, layers = len(weights["electra.embeddings.word_embeddings.weight"]), ENCODER_SETTINGS["encoder_layers"]
    sizes = {"vocab_size": rows, "embedding_size": EMBEDDING, "hidden_size": width, "intermediate_size": ffn}
    sizes |= {"num_attention_heads": heads, "num_hidden_layers": layers}
    sizes |= {"max_position_embeddings": ENCODER_SETTINGS["max_positions"], "layer_norm_eps": 1e-5, "pad_token_id": 1}
    model = model_class(HuggingFaceConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    model.load_state_dict(weights, strict=True)
    return model


def labels_of(inputs: dict[str, Tensor]) -> Tensor:
    """Masked tokens [B,T], -100 elsewhere."""
    labels = torch.full_like(inputs["tokens"], -100)
    for row, slot in inputs["masked_weights"].nonzero().tolist():
        position = inputs["masked_positions"][row, slot]
        labels[row, position] = inputs["tokens"][row, position]
    return labels


def assert_equal_gradients(ours: dict[str, Tensor], theirs: dict[str, torch.nn.Parameter]) -> None:
    expected = {name: parameter.grad for name, parameter in theirs.items()}
    torch.testing.assert_close({name: ours[name] for name in theirs}, expected, **CLOSE)


@pytest.mark.parametrize(
    ("treatment", "blocks"), [("mask", {"lengths": (12, 12)}), ("mask", {"num_columns": 16, "slots": 6}), ("bert", {})]
)
def test_mlm(treatment: str, blocks: dict) -> None:
    """Without padding, with more padded columns and slots, and with other tokens than ``<mask>``."""
    model, batch = small_mlm(embedding_dim=EMBEDDING, token_types=2), small_batch(**blocks)
    inputs = batch["net_input"]
    if treatment == "bert":  # some masked positions have another or the original token
        row, positions = inputs["masked_tokens"][0], inputs["masked_positions"][0]
        row[positions[0]], row[positions[1]] = inputs["tokens"][0, positions[0]], 7
    loss, sample_size, logged = MlmCriterion(small_task())(model, batch)
    loss.backward()

    theirs = reference(ElectraForMaskedLM, *SIZES, renamed(model.state_dict(), "transformer.", "mlm_head"))
    labels = labels_of(inputs)
    logits = theirs(inputs["masked_tokens"], attention_mask=inputs["tokens"].ne(1).long()).logits
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()

    torch.testing.assert_close(loss, expected, **CLOSE)
    assert sample_size == batch["num_masked"] == int(labels.ne(-100).sum())
    assert int(logged["mlm_acc_2"]) == int((logits.argmax(-1).eq(labels) & labels.ne(-100)).sum())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_equal_gradients(renamed(gradients, "transformer.", "mlm_head"), dict(theirs.named_parameters()))


def test_electra() -> None:
    model, batch = small_electra(token_types=2), small_batch()
    inputs = batch["net_input"]
    sampled = torch.randint(4, 44, inputs["masked_positions"].shape, generator=torch.Generator().manual_seed(3))
    set_samples(model, sampled)
    loss, sample_size, _ = ElectraCriterion(small_task(), 50.0)(model, batch)
    loss.backward()

    weights = model.state_dict()
    half = tuple(size // 2 for size in SIZES)
    generator = reference(ElectraForMaskedLM, *half, renamed(weights, "generator.", "mlm_head"))
    discriminator = reference(ElectraForPreTraining, *SIZES, renamed(weights, "discriminator.", "detection_head"))
    attended, labels = inputs["tokens"].ne(1), labels_of(inputs)
    corrupted = inputs["tokens"].clone()
    for row, slot in inputs["masked_weights"].nonzero().tolist():
        corrupted[row, inputs["masked_positions"][row, slot]] = sampled[row, slot]
    logits = generator(inputs["masked_tokens"], attention_mask=attended.long()).logits
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    detected = discriminator(corrupted, attention_mask=attended.long()).logits
    replaced = corrupted.ne(inputs["tokens"]).float()
    losses = binary_cross_entropy_with_logits(detected, replaced, reduction="none")
    expected = expected + 50.0 * MASKED_SHARE * losses[attended].sum()
    expected.backward()

    assert sample_size == labels.ne(-100).sum()
    torch.testing.assert_close(loss, expected, **CLOSE)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    of_generator, of_discriminator = dict(generator.named_parameters()), dict(discriminator.named_parameters())
    shared = [name for name in of_discriminator if "embeddings." in name]
    own = [{n: p for n, p in part.items() if n not in shared} for part in (of_generator, of_discriminator)]
    assert sum(map(len, own)) > 40
    assert_equal_gradients(renamed(gradients, "generator.", "mlm_head"), own[0])
    ours = renamed(gradients, "discriminator.", "detection_head")
    assert_equal_gradients(ours, own[1])
    for name in shared:
        torch.testing.assert_close(ours[name], of_generator[name].grad + of_discriminator[name].grad, **CLOSE)
