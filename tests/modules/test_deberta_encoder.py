"""DeBERTaV3's encoder, mask decoder and pair of networks against values of its authors' code, and transformers' DebertaV2Model.

``deberta_decoder.safetensors`` has the last layer of a generator in the authors' code, its input and what both passes of their
mask decoder return. The other values are in ``../shared/data/deberta_v3`` beside the checkout, or in ``DEBERTA_V3_REFERENCE``.
"""

import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_models import DEBERTA_PAIR, build_encoder, deberta_config, electra_criterion, set_samples, small_electra
from torch import Tensor, nn
from transformers import DebertaV2Config, DebertaV2Model

from amos_fairseq.functional.relative_position import deberta_rows
from amos_fairseq.models.configuration import PaddedVocabulary
from amos_fairseq.models.electra import ElectraConfig, ElectraModel
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.modules.deberta_encoder import DebertaEncoder, DebertaEncoderConfig
from amos_fairseq.modules.heads import FirstTokenDetectionHead

REFERENCE = Path(os.environ.get("DEBERTA_V3_REFERENCE", Path(__file__).parents[3] / "shared/data/deberta_v3"))
with_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the authors' values are not here")
EXACT = {"rtol": 0.0, "atol": 1e-10}
SHAPE = {"width": 48, "ffn_width": 96, "num_heads": 3, "max_positions": 32, "layer_norm_eps": 1e-7}
SHAPE |= {"position_buckets": 16, "position_max_distance": 32}
# Theirs -> ours, inside of a network.
NAMES = {
    "embeddings.LayerNorm": "embedding_norm",
    "embeddings.position_embeddings": "decoder_positions",
    "encoder.rel_embeddings": "relative_table",
    "encoder.LayerNorm": "relative_norm",
    "encoder.layer": "layers",
    "attention.output.LayerNorm": "attention_norm",
    "attention.output.dense": "attention.output",
    "intermediate.dense": "ffn_in",
    "output.dense": "ffn_out",
    "output.LayerNorm": "ffn_norm",
}


def in_our_names(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """``embeddings.*`` and ``encoder.*`` of one of their networks, values or gradients; no word embeddings."""
    ours = {}
    for name, tensor in theirs.items():
        if "word_embeddings" in name or "_proj." in name:
            continue
        for old, new in NAMES.items():
            name = name.replace(old, new)
        ours[name] = tensor
    for name in theirs:
        if "query_proj" in name:
            three = [name.replace("query", part) for part in ("query", "key", "value")]
            layer, _, last = name.removeprefix("encoder.layer.").partition(".attention.self.query_proj.")
            ours[f"layers.{layer}.attention.query_key_value.{last}"] = torch.cat(
                [theirs[each] for each in three if each in theirs]
            )
    return ours


def network(theirs: dict[str, Tensor], **settings) -> DebertaEncoder:
    """An encoder with their weights, in float64."""
    module = DebertaEncoderConfig(**(deberta_config(**SHAPE).__dict__ | settings)).build().double()
    module.load_state_dict({name: tensor for name, tensor in in_our_names(theirs).items() if "_weight" not in name})
    return module


def of(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def reference(name: str) -> dict[str, Tensor]:
    tensors = load_file(REFERENCE / f"{name}.safetensors")
    return {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize(("buckets", "max_distance"), [(4, 20), (8, 32), (256, 512)])
def test_rows_of_distances(buckets: int, max_distance: int) -> None:
    """Exact up to half of the buckets, then ceil(log(d / mid) / log((max - 1) / mid) (mid - 1)) + mid; query minus key."""
    mid = buckets // 2
    rows = deberta_rows(601, 2 * buckets, max_distance, torch.device("cpu"))
    for distance in range(601):
        size = min(distance, max_distance - 1)
        if size > mid:
            size = math.ceil(math.log(size / mid) / math.log((max_distance - 1) / mid) * (mid - 1) - 1e-9) + mid
        assert rows[600 - distance] == buckets + size
        assert rows[600 + distance] == buckets - size
    if REFERENCE.is_dir() and buckets > 4:
        expected = of(f"buckets.{buckets}_{max_distance}.", reference("expected"))
        longest = int(expected["distance"].max())
        assert torch.equal(rows[600 - longest : 601 + longest].flip(0), expected["index"])


@with_reference
@pytest.mark.parametrize("batch", ["A", "B"])
def test_states_and_attention_equal_the_authors(batch: str) -> None:
    weights, inputs = of("discriminator.deberta.", reference("weights")), of(f"{batch}.", reference("inputs"))
    expected = of(f"{batch}.disc.", reference("expected"))
    module, real = network(weights, num_layers=4), inputs["input_mask"].bool()
    table = reference("expected")["effective_disc_word_table"]
    probabilities = []
    for layer in module.layers:
        layer.attention.dropout.register_forward_pre_hook(lambda _, weights: probabilities.append(weights[0]))
    outputs = module(table[inputs["sampled_ids"]], ~real, with_input=True)
    for depth in range(1, 5):
        torch.testing.assert_close(outputs[depth][real], expected[f"hidden.{depth}"][real], **EXACT)
        got = probabilities[depth - 1] * real[:, None, :, None]
        torch.testing.assert_close(got, expected[f"attention_probs.{depth}"], **EXACT)
    packed = module(table[inputs["sampled_ids"]], lengths=real.sum(1).tolist())
    torch.testing.assert_close(packed[-1][real], expected["hidden.4"][real], **EXACT)


def test_mask_decoder_equals_the_authors() -> None:
    """The layer above h gets z + h, then its own output, and keys h; float64 values of batch A."""
    fixture = load_file(Path(__file__).with_name("deberta_decoder.safetensors"))
    expected, lengths = of("expected.", fixture), [12, 9, 7]
    real = torch.arange(12) < torch.tensor(lengths)[:, None]
    module = network(
        {name: tensor.double() for name, tensor in of("weights.", fixture).items()}, num_layers=2, has_mask_decoder=True
    )
    passes = []
    module.layers[1].register_forward_hook(lambda *call: passes.append(call[-1]))
    context = module.attention_context(expected["h"], ~real)
    states = module.run_last_layer(module.layers[1], expected["h"], context)
    assert torch.equal(states, passes[1])
    for number in (1, 2):
        torch.testing.assert_close(passes[number - 1][real], expected[f"emd.{number}"][real], **EXACT)


@pytest.mark.parametrize("length", [1, 2, 3, 9, 40, 150])
def test_values_and_gradients_equal_transformers(length: int) -> None:
    """Padded, in float64; theirs rounds the scale to float32. Up to 39 tokens: beyond max_distance they use row 0."""
    module = build_encoder(deberta_config(position_buckets=16, position_max_distance=max(40, length + 1)))
    shape = module.shape
    theirs = DebertaV2Model(
        DebertaV2Config(
            vocab_size=8,
            hidden_size=shape.width,
            intermediate_size=shape.ffn_width,
            num_hidden_layers=3,
            num_attention_heads=2,
            layer_norm_eps=shape.layer_norm_eps,
            type_vocab_size=0,
            position_biased_input=False,
            relative_attention=True,
            position_buckets=8,
            max_relative_positions=shape.position_max_distance,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).double()
    state = module.state_dict()
    for name, value in in_our_names(theirs.state_dict()).items():
        assert value.shape == state[name].shape, name
    back = {}
    for name in theirs.state_dict():
        if "_proj." in name:
            index = ("query", "key", "value").index(name.rpartition(".")[0].rpartition(".")[2].removesuffix("_proj"))
            layer, last = name.split(".")[2], name.rpartition(".")[2]
            back[name] = state[f"layers.{layer}.attention.query_key_value.{last}"].chunk(3)[index]
        elif "word_embeddings" not in name:
            (ours,) = in_our_names({name: torch.zeros(1)})
            back[name] = state[ours]
    theirs.load_state_dict(back, strict=False)
    real = torch.arange(length) < torch.tensor([[length], [max(1, length - 5)]])
    found = []
    for network_ in (module, theirs):
        embeddings = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
        if network_ is module:
            states = module(embeddings, ~real)[-1]
        else:
            states = theirs(inputs_embeds=embeddings, attention_mask=real.long()).last_hidden_state
        (states[real] ** 3).sum().backward()
        gradients = {
            name: parameter.grad for name, parameter in network_.named_parameters() if parameter.grad is not None
        }
        gradients = gradients if network_ is module else in_our_names(gradients)
        found.append([states[real].detach(), embeddings.grad, *(gradients[name] for name in sorted(gradients))])
    for ours, expected in zip(*found, strict=True):
        assert (ours - expected).abs().max() <= 3e-6 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_large_states_do_not_overflow(dtype: torch.dtype) -> None:
    """Products of 400 * 400 * 8 are beyond float16, whose largest number is 65,504."""
    module = build_encoder(deberta_config(num_layers=1, num_heads=1)).to(dtype)
    weight = module.layers[0].attention.query_key_value.weight.data
    weight[:16] = 50 * torch.eye(8, dtype=dtype).repeat(2, 1)
    embeddings = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    module.embedding_norm.weight.data.fill_(8)
    mask = torch.arange(6) >= torch.tensor([[6], [4]])
    scores = []
    module.layers[0].attention.dropout.register_forward_pre_hook(lambda _, weights: scores.append(weights[0]))
    states = module(embeddings, mask)[-1]
    exact = module.double()(embeddings.double(), mask)[-1]
    assert states.isfinite().all()
    assert not scores[0][1, :, :, 4:].any()
    assert (states - exact)[~mask].abs().max() < 0.1 * exact.abs().max()


def test_networks_share_the_token_table_alone() -> None:
    """And the generator has half of the layers, positions of its decoder, and a table of relative positions of its own."""
    model = small_electra(**DEBERTA_PAIR, encoder_layers=4)
    own = {id(parameter) for parameter in model.generator.parameters()}
    assert not own & {id(parameter) for parameter in model.discriminator.parameters()}
    assert (len(model.generator.layers), len(model.discriminator.layers)) == (2, 4)
    assert model.generator.decoder_positions.weight.shape == (20, 16)
    assert model.discriminator.decoder_positions is None
    assert model.encoder_embedding is model.disentangled_embedding


def test_detection_head_adds_the_first_state() -> None:
    head, states = FirstTokenDetectionHead(8, 1e-7).double(), torch.randn(2, 5, 8).double()
    normed = nn.functional.layer_norm(states + states[:, 0:1].expand(-1, 5, -1), (8,), eps=1e-7)
    hidden = nn.functional.gelu(normed @ head.dense.weight.T + head.dense.bias)
    expected = (hidden @ head.output.weight.T + head.output.bias)[..., 0]
    torch.testing.assert_close(head(states), expected.float())


# Of the joint model, theirs -> ours.
OF_HEADS = {
    "generator.lm_predictions.lm_head.dense": "mlm_head.dense",
    "generator.lm_predictions.lm_head.LayerNorm": "mlm_head.norm",
    "generator.lm_predictions.lm_head": "mlm_head",
    "discriminator.mask_predictions.dense": "detection_head.dense",
    "discriminator.mask_predictions.LayerNorm": "detection_head.norm",
    "discriminator.mask_predictions.classifier": "detection_head.output",
    "generator.deberta.embeddings.word_embeddings": "embed_tokens",
}
DELTA = "discriminator.deberta.embeddings.word_embeddings._weight"


def of_pair(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values or gradients of their joint model under the names of our ELECTRA."""
    ours = {"disentangled_embedding.delta.weight": theirs[DELTA]}
    for name in ("generator", "discriminator"):
        inside = in_our_names(of(f"{name}.deberta.", theirs))
        ours |= {f"{name}.{key}": tensor for key, tensor in inside.items() if "_weight" not in key}
    for old, new in OF_HEADS.items():
        whole = {name: name.replace(old, new) for name in theirs if name.rpartition(".")[0] == old}
        ours |= {new_name: theirs[name] for name, new_name in whole.items()}
    return ours


@with_reference
@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.parametrize("name", ["A", "B"])
def test_losses_and_gradients_of_the_pair_equal_the_authors(name: str, kernels: str) -> None:
    """Their loss is the mean over masked tokens plus 10 x that over real ones; then a step of the generator alone."""
    inputs, expected = of(f"{name}.", reference("inputs")), of(f"{name}.", reference("expected"))
    weights = of_pair(reference("weights"))
    sizes = {"encoder_layers": 4, "encoder_embed_dim": 48, "encoder_ffn_embed_dim": 96, "encoder_attention_heads": 3}
    positions = {"max_positions": 32, "relative_position_buckets": 16, "relative_position_max_distance": 32}
    settings = DEBERTA_PAIR | sizes | positions | {"layer_norm_eps": 1e-7, "dropout": 0.0, "attention_dropout": 0.0}
    vocabulary = PaddedVocabulary(200, pad=0, end=2, special=(0, 1, 2, 3, 199))
    model = ElectraModel(ElectraConfig(**settings, kernels=kernels), vocabulary).double()
    state = model.state_dict()
    assert state.keys() == weights.keys()
    state["mlm_head.bias"].fill_(-1e4)  # rows beyond theirs
    for key, value in weights.items():
        state[key][: len(value)] = value

    masked = inputs["labels"].ne(0)
    positions = masked.float().topk(int(masked.sum(1).max()), sorted=False).indices.sort(1).values
    slots = masked.gather(1, positions)
    net_input = {"tokens": inputs["original_ids"], "masked_tokens": inputs["input_ids"]}
    net_input |= {"masked_positions": positions * slots, "masked_weights": slots.double()}
    set_samples(model, inputs["sampled_ids"].gather(1, net_input["masked_positions"]))
    num_masked, num_real = int(masked.sum()), int(inputs["input_mask"].sum())
    criterion = electra_criterion(10.0)
    criterion.padding_idx, criterion.task.masked_share = 0, num_masked / num_real
    sample = {"net_input": net_input, "ntokens": num_real, "num_masked": num_masked, "nsentences": len(masked)}

    loss, sample_size, _ = criterion(model, sample)
    (loss / sample_size).backward()
    assert (loss / sample_size).item() == pytest.approx(expected["total_loss"].item(), abs=1e-5)
    batch, real = PretrainingBatch.of(sample), inputs["input_mask"].bool()
    output = model(batch)
    found = {"loss_each": output.mlm_nll[slots], "logits": model.predict_logits(batch)[0][0, slots, :200]}
    for key, values in found.items():
        torch.testing.assert_close(values.double(), expected[f"gen.{key}"], rtol=0, atol=3e-5)
    torch.testing.assert_close(output.replaced[real].double(), expected["disc.targets"].double())
    torch.testing.assert_close(output.rtd_logits[real].double(), expected["disc.logits"][real], rtol=0, atol=3e-5)
    for key, gradient in of_pair(of("grad.", expected)).items():
        ours = model.get_parameter(key).grad
        torch.testing.assert_close(ours[: len(gradient)], gradient, rtol=0, atol=3e-5)
    if name == "A":
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.startswith(("embed_tokens.", "generator.", "mlm_head.")):
                    parameter -= 0.1 * parameter.grad
            after = model(batch).rtd_logits[real]
        torch.testing.assert_close(after.double(), expected["afterG.disc.logits"][real], rtol=0, atol=3e-5)
