"""What is shown of a text by untrained models of every objective, against the model's own outputs; losses on replaced tokens by
depth against a naive loop with the model's own parts, and a case by hand."""

import math

import numpy as np
import pytest
import torch
from fairseq.data import indexed_dataset
from saved_models import CORPUS, TEXT, write_run

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.data.masked_blocks import MaskedBlockDataset
from amos_fairseq.data.seeding import Purpose, noise_seed
from amos_fairseq.errors import UserError
from amos_fairseq.functional.sampling import gumbel_max, gumbel_noise
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.report import inspection
from amos_fairseq.report.inspection import (
    held_out_blocks,
    inspect_text,
    mask_block,
    replaced_token_losses,
    text_of_corpus,
)

SEED, MASKING = 3, {"mask_prob": 0.2}


@pytest.fixture
def pretrained(tmp_path):
    return load_checkpoint(write_run(tmp_path, task=MASKING))


def test_values_equal_those_of_the_forward_pass(pretrained):
    inspection = inspect_text(pretrained, TEXT, SEED, top=4)
    tokens = pretrained.tokens(TEXT)
    model, dictionary = pretrained.model, pretrained.dictionary
    assert len(inspection.masked) == -(-len(tokens) // 5), "ceil(0.2 L)"

    batch = mask_block(pretrained, tokens, SEED)["net_input"]
    assert torch.equal(batch["tokens"][0], tokens)
    torch.manual_seed(SEED)
    with torch.no_grad():
        output = model(PretrainingBatch(**batch))
    for index, masked in enumerate(inspection.masked):
        token = inspection.tokens[masked.position]
        assert token.masked
        assert not token.special
        assert token.original == dictionary[tokens[masked.position]]
        assert token.input == dictionary[output.sampled_tokens[0, index]]
        assert masked.mixture_weights == pytest.approx(output.mixture_weights[0, index].tolist())
        originals = [one.probability for lines in masked.predictions for one in lines if one.is_original]
        assert originals == pytest.approx((-output.mlm_nll[:, 0, index]).exp().tolist(), rel=1e-4)
        for depth, predictions in enumerate(masked.predictions):
            assert [one.text for one in predictions if one.is_original] == [token.original]
            probabilities = [prediction.probability for prediction in predictions[:4]]
            assert len(probabilities) == 4
            assert probabilities == sorted(probabilities, reverse=True)
            if output.mlm_correct[depth, 0, index]:
                assert predictions[0].is_original
    # The discriminator alone, with the input that the page shows.
    inputs = torch.tensor([[dictionary.index(token.input) for token in inspection.tokens]])
    with torch.no_grad():
        detected = model.detection_head(model.extract_features(inputs)).sigmoid()[0].tolist()
    assert [token.positive_probability for token in inspection.tokens] == pytest.approx(detected, rel=1e-4)


def test_a_check_mark_follows_replaced_tokens_that_are_found(pretrained):
    """Every sample is the token at the first masked position, and every logit is positive."""
    model, tokens = pretrained.model, pretrained.tokens(TEXT)
    first = int(mask_block(pretrained, tokens, SEED)["net_input"]["masked_positions"][0, 0])
    with torch.no_grad():
        model.mlm_heads[0].bias[tokens[first]] += 1e4
        model.detection_head.output.bias.fill_(100)
    masked = inspect_text(pretrained, TEXT, SEED).masked
    marks = {one.position: [sample.endswith("\u2713") for sample in one.shown] for one in masked}
    assert marks == {position: [bool(tokens[position] != tokens[first])] * 3 for position in marks}
    assert len(set(map(tuple, marks.values()))) == 2


def test_most_probable_pieces_are_shown_as_a_reader_sees_them(tmp_path):
    """Without the mark of a space; a piece without one continues a word."""
    pretrained = load_checkpoint(write_run(tmp_path, "mlm", task=MASKING))
    symbols = pretrained.dictionary.symbols
    begins = next(symbol for symbol in symbols if symbol[0] == "\u2581" and symbol[1:].isalpha())
    continues = next(symbol for symbol in symbols if symbol.isalpha())
    for piece, shown in ((begins, begins[1:]), (continues, f"-{continues}")):
        with torch.no_grad():
            pretrained.model.mlm_head.bias[pretrained.dictionary.index(piece)] += 1e4
        masked = inspect_text(pretrained, TEXT, SEED).masked
        assert {word for one in masked if one.position > 1 for word in one.shown} == {shown}
        with torch.no_grad():
            pretrained.model.mlm_head.bias[pretrained.dictionary.index(piece)] -= 1e4


def test_predictions_are_the_tokens_that_can_be_sampled(pretrained):
    """Biases make special tokens and padding rows the most probable; others are predicted with small probabilities."""
    dictionary, model = pretrained.dictionary, pretrained.model
    specials = [dictionary.index(symbol) for symbol in ("<s>", "<pad>", "</s>", "<unk>", "<mask>")]
    padding = list(range(len(dictionary), model.embed_tokens.num_embeddings))
    assert padding
    with torch.no_grad():
        model.mlm_heads[0].bias[specials + padding] += 50
    inspection = inspect_text(pretrained, TEXT, SEED, top=10_000)
    words = sorted(set(dictionary.symbols) - {dictionary[i] for i in specials})
    for masked in inspection.masked:
        for predictions in masked.predictions:
            assert sorted(prediction.text for prediction in predictions) == words
            assert sum(prediction.probability for prediction in predictions) < 1e-6, "the softmax is over all rows"


@torch.no_grad()
def test_mlm_has_predictions_and_no_detection(tmp_path):
    """Probabilities by the softmax of its head's output times the token embeddings."""
    pretrained = load_checkpoint(write_run(tmp_path, "mlm", task=MASKING | {"mask_treatment": "bert"}))
    inspection = inspect_text(pretrained, TEXT, SEED)
    model, tokens = pretrained.model, pretrained.tokens(TEXT)
    read = tokens.clone()
    read[[masked.position for masked in inspection.masked]] = pretrained.dictionary.index("<mask>")
    states = model.transformer(model.embed_tokens(read[None]))[-1]
    shares = (model.mlm_head(states) @ model.embed_tokens.weight.T + model.mlm_head.bias).softmax(-1)[0]
    right = 0
    for masked in inspection.masked:
        share, original = shares[masked.position], int(tokens[masked.position])
        (shown,) = (one.probability for one in masked.predictions[0] if one.is_original)
        assert shown == pytest.approx(share[original].item(), rel=1e-4)
        right += masked.predictions[0][0].text == pretrained.dictionary[original]
    assert inspection.summary.endswith(f"tokens masked, {right} predicted correctly")
    assert {token.positive_probability for token in inspection.tokens} == {None}


@torch.no_grad()
@pytest.mark.parametrize("variant", ["electric", "electra_tt"])
def test_electric_shows_noise_and_its_probability(variant, tmp_path):
    pretrained = load_checkpoint(write_run(tmp_path, "electric", task=MASKING, electric_variant=variant))
    model, inspection = pretrained.model, inspect_text(pretrained, TEXT, SEED)
    read = torch.tensor([[pretrained.dictionary.index(token.input) for token in inspection.tokens]])
    selected = {masked.position for masked in inspection.masked}
    assert {position for position, token in enumerate(inspection.tokens) if token.is_positive} == selected
    logits = model.detection_head(model.discriminator(model.embed_tokens(read))[-1])[0]
    scored = {position for position, token in enumerate(read[0].tolist()) if token not in model.vocabulary.special}
    alarms = sum(inspection.tokens[position].flagged for position in scored - selected)
    assert f"{alarms} false alarms on {len(scored - selected)} original tokens" in inspection.summary
    for position, token in enumerate(inspection.tokens):
        if position not in scored:  # special or unknown: no loss is computed there
            assert token.positive_probability is None
        elif variant == "electra_tt":  # the classifier's own probability
            assert token.positive_probability == pytest.approx(logits[position].sigmoid().item(), rel=1e-3, abs=1e-6)


def test_default_text_is_of_the_runs_corpus(pretrained, tmp_path):
    """The first paragraph of 30 to 100 known tokens in the validation split, as its tokens spell it."""
    words = "the quick brown fox jumps over the lazy dog and the end"
    builder = indexed_dataset.make_builder(str(tmp_path / "valid.bin"), "mmap", vocab_size=len(pretrained.dictionary))
    for paragraph in ("the end", f"Zürich {words}", f"{words} and the", TEXT.replace("\n", " ")):
        builder.add_item(pretrained.tokens(paragraph)[1:].int())
    builder.finalize(str(tmp_path / "valid.idx"))
    pretrained.task["data"] = f"{tmp_path}:{tmp_path / 'absent'}"
    assert text_of_corpus(pretrained) == f"{words} and the"
    (tmp_path / "valid.idx").unlink()
    with pytest.raises(UserError, match=r"valid\.idx is missing.*: give a text with --sentence"):
        text_of_corpus(pretrained)


LENGTH = 20


def load(tmp_path, objective="amos", **settings):
    task = {"tokens_per_sample": LENGTH}
    return load_checkpoint(write_run(tmp_path, objective, task=task, kernels="reference", **settings))


def masked(loaded, blocks, seed):
    settings = {"tokens_per_block": LENGTH, "mask_prob": 0.15, "training": False}
    return MaskedBlockDataset(blocks, loaded.dictionary, seed=seed, **settings)


@pytest.mark.parametrize("separate", [False, True])
def test_losses_equal_a_naive_loop(tmp_path, separate, monkeypatch):
    """Two blocks at a time; sampled from the logits of one depth, detected block by block, -log P in double precision."""
    monkeypatch.setattr(inspection, "TOKENS_AT_ONCE", 2 * LENGTH)
    loaded = load(tmp_path, separate_generators=separate)
    model, text = loaded.model, "\n".join(CORPUS)
    blocks = held_out_blocks(loaded, text)
    assert torch.cat(list(blocks)).tolist() == loaded.tokens(text)[1:].tolist()
    assert max(map(len, blocks)) == LENGTH - 1
    before = torch.get_rng_state()
    found = replaced_token_losses(loaded, blocks, seed=5, num_masked=10_000)
    assert torch.equal(torch.get_rng_state(), before)
    assert [depth_losses.depth for depth_losses in found] == ["1", "2", "4"]

    dataset = masked(loaded, blocks, seed=5)
    for depth, depth_losses in enumerate(found):
        losses, num_masked = [], 0
        for start in range(0, len(blocks), 2):
            batch = dataset.collater([dataset[i] for i in range(start, min(start + 2, len(blocks)))])["net_input"]
            torch.manual_seed(noise_seed(Purpose.VALIDATION_NOISE, 5, depth, start))
            logits = model.predict_logits(PretrainingBatch(**batch))[0][depth]
            logits = logits.masked_fill(model.never_sampled_mask, float("-inf"))
            sampled = gumbel_max(logits, gumbel_noise(logits))
            for row, tokens in enumerate(batch["tokens"]):
                slots = [i for i in range(sampled.size(1)) if batch["masked_weights"][row, i]]
                corrupted = tokens.clone()
                for i in slots:
                    corrupted[batch["masked_positions"][row, i]] = sampled[row, i]
                detected = model.detection_head(model.extract_features(corrupted[None]))[0].detach().double().sigmoid()
                changed = [t for t in range(LENGTH) if corrupted[t] != tokens[t]]
                losses += [-math.log(detected[t]) for t in changed]
                num_masked += len(slots)
        assert depth_losses.num_masked == num_masked
        assert losses
        assert depth_losses.losses == pytest.approx(losses, rel=1e-4)
        assert depth_losses.recall == pytest.approx(np.mean([loss < math.log(2) for loss in losses]))


def test_of_a_long_text_lines_at_equal_distances_are_encoded(tmp_path, monkeypatch):
    """Every fourth group of ten, in their order; all of a shorter text."""
    loaded, lines = load(tmp_path), [[*CORPUS[1:], "the fox"][i % 3] for i in range(95)]
    monkeypatch.setattr(inspection, "LINES_TOGETHER", 10)
    for parts, shown in ((4, [*lines[:10], *lines[40:50], *lines[80:90]]), (1, lines)):
        monkeypatch.setattr(inspection, "LONGEST_TEXT", math.ceil(len("\n".join(lines)) / parts))
        blocks = held_out_blocks(loaded, "\n".join(lines))
        assert torch.cat(list(blocks)).tolist() == loaded.tokens("\n".join(shown))[1:].tolist()


def test_every_sample_is_one_token_and_every_logit_is_minus_one(tmp_path):
    """By hand: -log P(replaced) = log(1 + e), at masked tokens that are not the sampled one."""
    loaded = load(tmp_path)
    model = loaded.model
    always = int(loaded.tokens("the")[1])
    with torch.no_grad():
        model.mlm_heads[0].bias[always] += 1e4
        model.detection_head.output.weight.zero_()
        model.detection_head.output.bias.fill_(-1)
    blocks = held_out_blocks(loaded, "the dog and the fox " * 12)
    dataset = masked(loaded, blocks, seed=1)
    originals = [int(dataset[n]["tokens"][i]) for n in range(len(blocks)) for i in dataset[n]["positions"]]
    replaced = sum(token != always for token in originals)
    assert 0 < replaced < len(originals)
    for depth_losses in replaced_token_losses(loaded, blocks, seed=1, num_masked=10_000):
        assert depth_losses.num_masked == len(originals)
        assert depth_losses.losses == pytest.approx([math.log(1 + math.e)] * replaced)
        assert depth_losses.recall == 0


REPLACE_MLM = {"main_objective": "replace_mlm"}


@pytest.mark.parametrize(
    ("objective", "settings"),
    [("electra", {}), ("electra", REPLACE_MLM), ("teams", {"encoder_layers": 4}), ("electric", {}), ("mlm", {})],
)
def test_objectives(tmp_path, objective, settings):
    loaded = load(tmp_path, objective, **settings)
    losses = replaced_token_losses(loaded, held_out_blocks(loaded, CORPUS[0]), seed=1, num_masked=1)
    detects = objective != "mlm" and settings != REPLACE_MLM
    assert [depth_losses.depth for depth_losses in losses] == ["2"] * detects
    assert all(np.isfinite(depth_losses.losses).all() and len(depth_losses.losses) for depth_losses in losses)
