"""ELECTRA's loss and every gradient against Hugging Face's ElectraForMaskedLM and ElectraForPreTraining."""

import torch
from small_models import AMOS_SETTINGS, BLOCK_LENGTH, MASK_PROB, set_samples, small_batch, small_task
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import ElectraConfig as HuggingFaceConfig
from transformers import ElectraForMaskedLM, ElectraForPreTraining

from amos_fairseq.criterions.electra import ElectraCriterion
from amos_fairseq.hugging_face.weights import MASKED_LM, PRETRAINING, to_hugging_face
from amos_fairseq.models.electra import ElectraConfig, ElectraModel

EMBEDDING = 8
# The whole loss runs through 4 layers in float32; sums have another order on the other side.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def small_electra(seed: int = 0) -> ElectraModel:
    settings = {name: value for name, value in AMOS_SETTINGS.items() if name not in ("generator_depths", "max_update")}
    torch.manual_seed(seed)
    model = ElectraModel.build_model(
        ElectraConfig(**settings, embedding_dim=EMBEDDING, token_types=2, generator_size=0.5), small_task()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def as_generator(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The generator as an encoder of its own."""
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith(("embed_tokens", "mlm_head"))}
    inner = {f"encoder.{n.removeprefix('generator.')}": t for n, t in tensors.items() if n.startswith("generator.")}
    return to_hugging_face("electra", MASKED_LM, kept | inner)


def as_discriminator(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith(("embed_tokens", "detection_head"))}
    inner = {
        f"encoder.{n.removeprefix('discriminator.')}": t for n, t in tensors.items() if n.startswith("discriminator.")
    }
    return to_hugging_face("electra", PRETRAINING, kept | inner)


def reference(model_class: type, width: int, ffn: int, heads: int, weights: dict[str, Tensor]) -> torch.nn.Module:
    config = HuggingFaceConfig(
        vocab_size=len(weights["electra.embeddings.word_embeddings.weight"]), embedding_size=EMBEDDING, hidden_size=width,
        intermediate_size=ffn, num_attention_heads=heads, num_hidden_layers=AMOS_SETTINGS["encoder_layers"], pad_token_id=1,
        max_position_embeddings=AMOS_SETTINGS["max_positions"], layer_norm_eps=1e-5, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = model_class(config)
    model.load_state_dict(weights, strict=True)
    return model


def test_loss_and_gradients_are_those_of_hugging_face() -> None:
    model, batch = small_electra().train(), small_batch()
    inputs = batch["net_input"]
    draw = torch.Generator().manual_seed(3)
    sampled = torch.randint(4, 44, inputs["masked_positions"].shape, generator=draw)
    set_samples(model, sampled)
    loss, sample_size, _ = ElectraCriterion(small_task(), 50.0)(model, batch)
    loss.backward()

    weights = model.state_dict()
    width, ffn, heads = (AMOS_SETTINGS[f"encoder_{size}"] for size in ("embed_dim", "ffn_embed_dim", "attention_heads"))
    generator = reference(ElectraForMaskedLM, width // 2, ffn // 2, heads // 2, as_generator(weights))
    discriminator = reference(ElectraForPreTraining, width, ffn, heads, as_discriminator(weights))
    attended = inputs["tokens"].ne(1).long()
    corrupted, labels = inputs["tokens"].clone(), torch.full_like(inputs["tokens"], -100)
    for row, slot in inputs["masked_weights"].nonzero().tolist():
        position = inputs["masked_positions"][row, slot]
        labels[row, position] = inputs["tokens"][row, position]
        corrupted[row, position] = sampled[row, slot]
    logits = generator(inputs["masked_tokens"], attention_mask=attended).logits
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    detected = discriminator(corrupted, attention_mask=attended).logits
    share = -(-MASK_PROB * BLOCK_LENGTH // 1) / BLOCK_LENGTH
    replaced = corrupted.ne(inputs["tokens"]).float()
    losses = binary_cross_entropy_with_logits(detected, replaced, reduction="none")
    expected = expected + 50.0 * share * losses[attended.bool()].sum()
    expected.backward()

    assert sample_size == labels.ne(-100).sum()
    torch.testing.assert_close(loss, expected, **CLOSE)
    gradients = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    compared = 0
    for ours, other in ((as_generator(gradients), generator), (as_discriminator(gradients), discriminator)):
        for name, parameter in other.named_parameters():
            if "embeddings." in name:
                continue  # shared: compared below
            torch.testing.assert_close(
                ours[name], parameter.grad, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
            )
            compared += 1
    assert compared > 40
    ours = as_discriminator(gradients)
    both = (dict(generator.named_parameters()), dict(discriminator.named_parameters()))
    for name in (name for name in ours if "embeddings." in name):
        torch.testing.assert_close(ours[name], sum(side[name].grad for side in both), **CLOSE)


def test_the_generator_learns_from_its_own_loss_alone() -> None:
    """What is the generator's own receives nothing from detection: sampling lets no gradient through."""
    model, batch = small_electra().train(), small_batch()
    model(**batch["net_input"]).rtd_logits.sum().backward()
    own = [name for name, _ in model.named_parameters() if name.startswith(("generator.layers", "mlm_head"))]
    assert own
    assert all(dict(model.named_parameters())[name].grad is None for name in own)


def test_samples_follow_the_generators_softmax() -> None:
    """Frequencies over 20,000 draws within 4 standard errors, and never a special token or a padding row."""
    model = small_electra()
    hidden = torch.randn(1, 1, EMBEDDING) * 0.5
    draws = 20_000
    many, originals = hidden.expand(1, draws, EMBEDDING), torch.zeros(1, draws).long()
    sampled = model.predict_and_sample_in_chunks(many, originals).sampled.flatten()
    logits = torch.nn.functional.linear(hidden[0, 0], model.embed_tokens.weight, model.mlm_head.bias)
    logits[model.never_sampled_mask] = float("-inf")
    expected = logits.softmax(-1)
    seen = torch.bincount(sampled, minlength=len(expected)) / draws
    error = (expected * (1 - expected) / draws).sqrt()
    assert (seen - expected).abs().le(4 * error + 1e-9).all()
    assert seen[model.never_sampled_mask].eq(0).all()
