"""``amos inspect`` of the other objectives: each shows its own values, computed again from the model."""

import re

import pytest
import torch
from saved_models import TEXT, write_run

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.report.inspect_text import inspect_text, mask_block
from amos_fairseq.report.inspection import percent
from amos_fairseq.report.inspection_views import render_inspection

SEED, MASK_PROB = 3, 0.2


def printed(directory, capsys, monkeypatch) -> tuple[str, str]:
    """What the command prints, and its page."""
    monkeypatch.setenv("COLUMNS", "160")
    page = directory / "page.html"
    command = ["inspect", str(directory), "--text", TEXT, "--seed", str(SEED), "--mask-prob", str(MASK_PROB)]
    assert main([*command, "--html", str(page)]) == 0
    return capsys.readouterr().out, page.read_text(encoding="utf-8")


def inspected(directory, objective: str, top: int = 1, **settings):
    """An inspection, its model and dictionary, and the tokens [1,T] that the page shows as input."""
    pretrained = load_checkpoint(write_run(directory, objective, **settings))
    inspection = inspect_text(pretrained, TEXT, SEED, MASK_PROB, top)
    read = [pretrained.dictionary.index(token.input) for token in inspection.tokens]
    return inspection, pretrained.model, pretrained.dictionary, torch.tensor([read])


@torch.no_grad()
def test_mlm_has_predictions_and_no_detection(tmp_path, capsys, monkeypatch):
    """Probabilities by the softmax of its head's output times the token embeddings."""
    pretrained = load_checkpoint(write_run(tmp_path, "mlm", task={"mask_treatment": "bert"}))
    inspection = inspect_text(pretrained, TEXT, SEED, MASK_PROB, top=2)
    model, tokens = pretrained.model, pretrained.tokens(TEXT)
    read = tokens.clone()
    read[[masked.position for masked in inspection.masked]] = pretrained.dictionary.index("<mask>")
    states = model.transformer(model.embed_tokens(read[None]))[-1]
    shares = (model.mlm_head(states) @ model.embed_tokens.weight.T + model.mlm_head.bias).softmax(-1)[0]
    right = 0
    for masked in inspection.masked:
        share, original = shares[masked.position], int(tokens[masked.position])
        assert masked.original_probabilities == pytest.approx([share[original].item()], rel=1e-4)
        right += masked.predictions[0][0].piece == pretrained.dictionary[original]
    assert inspection.summary()[1].endswith(f"tokens masked, {right} predicted correctly")
    assert {token.positive_probability for token in inspection.tokens} == {None}

    out, page = printed(tmp_path, capsys, monkeypatch)
    assert "depth 2" in out
    page = page.partition("<body>")[2]
    for shown in (out, page):
        tokens_shown = shown.partition("Every token")[2]
        assert not re.search(r"discriminator|sampled|replaced|weight \d|log p|selection", tokens_shown)
    assert "discriminator" not in out + page
    assert "<h2>Every token masked</h2>" in page


@torch.no_grad()
@pytest.mark.parametrize("variant", ["electric", "electra_tt"])
def test_electric_shows_noise_and_log_probabilities_of_its_input(variant, tmp_path, capsys, monkeypatch):
    inspection, model, _, read = inspected(tmp_path, "electric", top=2, electric_variant=variant)
    selected = {masked.position for masked in inspection.masked}
    assert {position for position, token in enumerate(inspection.tokens) if token.is_positive} == selected
    logits = model.detection_head(model.discriminator(model.embed_tokens(read))[-1])[0]
    scored = {position for position, token in enumerate(read[0].tolist()) if token not in model.vocabulary.special}
    alarms = sum(inspection.tokens[position].flagged for position in scored - selected)
    assert f"{alarms} false alarms on {len(scored - selected)} original tokens" in inspection.summary()[1]
    for position, token in enumerate(inspection.tokens):
        if position not in scored:  # special or unknown: no loss is computed there
            assert (token.log_prob, token.positive_probability) == (None, None)
        elif variant == "electric":
            assert token.log_prob == pytest.approx(-logits[position].item(), rel=1e-4, abs=1e-5)
        else:  # the classifier's own probability
            assert token.positive_probability == pytest.approx(logits[position].sigmoid().item(), rel=1e-3, abs=1e-6)

    out, page = printed(tmp_path, capsys, monkeypatch)
    assert "Tokens selected for noise" in out
    assert "P(noise)" in page
    text = page.partition("<h1>")[2].replace("class=", "").replace('"token masked', "").replace('"masked', "")
    assert "masked" not in text
    first = inspection.masked[0]
    log_prob = f"{inspection.tokens[first.position].log_prob:.2f}"
    assert log_prob in out
    assert f"log p {log_prob}" in page


@torch.no_grad()
def test_two_tower_model_scores_every_token(tmp_path, capsys, monkeypatch):
    settings = {"electric_variant": "two_tower", "generator_size": 1, "generator_loss_tokens": "all"}
    inspection, model, _, tokens = inspected(tmp_path, "electric", **settings)
    log_probs = model.token_log_probs(tokens)[0].tolist()
    assert [token.log_prob or 0.0 for token in inspection.tokens] == pytest.approx(log_probs)
    assert [token.input for token in inspection.tokens] == [token.original for token in inspection.tokens]
    out, page = printed(tmp_path, capsys, monkeypatch)
    assert "discriminator" not in out + page
    for token in inspection.tokens:
        if token.masked:
            assert f"[{token.input}] {token.log_prob:.1f}" in re.sub(r"\s+", " ", out)


@torch.no_grad()
def test_teams_shows_its_candidates(tmp_path, capsys, monkeypatch):
    """Selection computed again from the page: the softmax of the scores of exactly these candidates."""
    inspection, model, dictionary, read = inspected(tmp_path, "teams")
    states = model.mws_head(model.discriminator(model.embed_tokens(read))[-1])[0]
    chosen = 0
    for masked in inspection.masked:
        original = inspection.tokens[masked.position].original
        pieces = [candidate.piece for candidate in masked.candidates]
        assert (len(pieces), len(set(pieces)), pieces[0]) == (6, 6, original)
        scores = model.embed_tokens.weight[[dictionary.index(piece) for piece in pieces]] @ states[masked.position]
        shares = scores.softmax(0).tolist()
        assert [candidate.probability for candidate in masked.candidates] == pytest.approx(shares, rel=1e-3)
        chosen += shares[0] == max(shares)
    assert f"multi-word selection: the original chosen at {chosen} of" in inspection.summary()[2]
    out, page = printed(tmp_path, capsys, monkeypatch)
    for candidate in inspection.masked[0].candidates:
        assert percent(candidate.probability) in out
        assert percent(candidate.probability) in page
    assert page.count("(chosen)") == len(inspection.masked)


@torch.no_grad()
def test_main_network_that_predicts_tokens(tmp_path, capsys, monkeypatch):
    """All-Tokens MLM: its probability of the original by hand, copying mixed with the softmax of its head."""
    inspection, model, dictionary, read = inspected(tmp_path, "electra", main_objective="all_tokens_mlm")
    states = model.discriminator(model.embed_tokens(read))[-1][0]
    head = model.token_prediction
    shares = (head.mlm_head(states) @ model.embed_tokens.weight.T + head.mlm_head.bias).softmax(-1)
    copies = head.copy_layer(states).sigmoid()[:, 0]
    for masked in inspection.masked:
        position, token = masked.position, inspection.tokens[masked.position]
        share = shares[position, dictionary.index(token.original)]
        expected = copies[position] * (not token.replaced) + (1 - copies[position]) * share
        assert masked.discriminator_probability == pytest.approx(expected.item(), rel=1e-3)
        assert masked.copy_probability == pytest.approx(copies[position].item(), rel=1e-3)
    out, page = printed(tmp_path, capsys, monkeypatch)
    for shown in (out, page):
        assert f"p(original) {percent(inspection.masked[0].discriminator_probability)}" in shown
        assert "discriminator" not in shown


def test_masks_are_those_of_training_without_its_treatment(tmp_path):
    """Training replaces some masked tokens by others; here all are <mask>, so that predictions are comparable."""
    pretrained = load_checkpoint(write_run(tmp_path, "mlm", task={"mask_treatment": "bert"}))
    batch = mask_block(pretrained, pretrained.tokens(TEXT), SEED, 0.9)["net_input"]
    read = batch["masked_tokens"].gather(1, batch["masked_positions"])
    assert read.unique().tolist() == [pretrained.dictionary.index("<mask>")]


def test_page_of_every_objective_is_escaped(tmp_path):
    for objective in ("mlm", "electric", "teams"):
        inspection = inspect_text(load_checkpoint(write_run(tmp_path / objective, objective)), TEXT, 1, 0.3, 2)
        assert "<script" not in render_inspection(inspection)
