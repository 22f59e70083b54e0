"""``amos inspect`` on untrained models of every objective, against the model's own outputs; its page, and its mistakes."""

import re

import pytest
import torch
from failures import error_line
from fairseq.data import indexed_dataset
from html_page import text_of
from saved_models import TEXT, write_run

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.report.inspection import inspect_text, mask_block, percent

SEED, MASK_PROB = 3, 0.2


@pytest.fixture
def save_dir(tmp_path):
    return write_run(tmp_path)


@pytest.fixture
def pretrained(save_dir):
    return load_checkpoint(save_dir)


def test_values_equal_those_of_the_forward_pass(pretrained):
    inspection = inspect_text(pretrained, TEXT, SEED, MASK_PROB, top=4)
    tokens = pretrained.tokens(TEXT)
    model, dictionary = pretrained.model, pretrained.dictionary
    assert len(inspection.masked) == -(-len(tokens) // 5), "ceil(0.2 L)"

    batch = mask_block(pretrained, tokens, SEED, MASK_PROB)["net_input"]
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
        assert masked.original_probabilities == pytest.approx((-output.mlm_nll[:, 0, index]).exp().tolist(), rel=1e-4)
        for depth, predictions in enumerate(masked.predictions):
            probabilities = [prediction.probability for prediction in predictions]
            assert len(probabilities) == 4
            assert probabilities == sorted(probabilities, reverse=True)
            if output.mlm_correct[depth, 0, index]:
                assert predictions[0].piece == token.original
    # The discriminator alone, with the input that the page shows.
    inputs = torch.tensor([[dictionary.index(token.input) for token in inspection.tokens]])
    with torch.no_grad():
        detected = model.detection_head(model.extract_features(inputs)).sigmoid()[0].tolist()
    assert [token.positive_probability for token in inspection.tokens] == pytest.approx(detected, rel=1e-4)


def test_a_check_mark_follows_replaced_tokens_that_are_found(pretrained):
    """Every sample is the token at the first masked position, and every logit is positive."""
    model, tokens = pretrained.model, pretrained.tokens(TEXT)
    first = int(mask_block(pretrained, tokens, SEED, MASK_PROB)["net_input"]["masked_positions"][0, 0])
    with torch.no_grad():
        model.mlm_heads[0].bias[tokens[first]] += 1e4
        model.detection_head.output.bias.fill_(100)
    masked = inspect_text(pretrained, TEXT, SEED, MASK_PROB, top=1, with_samples=True).masked
    marks = {one.position: [sample.endswith("\u2713") for sample in one.shown] for one in masked}
    assert marks == {position: [bool(tokens[position] != tokens[first])] * 3 for position in marks}
    assert len(set(map(tuple, marks.values()))) == 2


def test_most_probable_pieces_are_shown_as_a_reader_sees_them(tmp_path):
    """Without the mark of a space; a piece without one continues a word."""
    pretrained = load_checkpoint(write_run(tmp_path, "mlm"))
    symbols = pretrained.dictionary.symbols
    begins = next(symbol for symbol in symbols if symbol[0] == "\u2581" and symbol[1:].isalpha())
    continues = next(symbol for symbol in symbols if symbol.isalpha())
    for piece, shown in ((begins, begins[1:]), (continues, f"-{continues}")):
        with torch.no_grad():
            pretrained.model.mlm_head.bias[pretrained.dictionary.index(piece)] += 1e4
        for with_samples in (False, True):
            masked = inspect_text(pretrained, TEXT, SEED, MASK_PROB, 1, with_samples).masked
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
    inspection = inspect_text(pretrained, TEXT, SEED, MASK_PROB, top=10_000)
    words = sorted(set(dictionary.symbols) - {dictionary[i] for i in specials})
    for masked in inspection.masked:
        for depth, predictions in enumerate(masked.predictions):
            assert sorted(prediction.piece for prediction in predictions) == words
            assert sum(prediction.probability for prediction in predictions) < 1e-6, "the softmax is over all rows"
            original = inspection.tokens[masked.position].original
            share = next(prediction.probability for prediction in predictions if prediction.piece == original)
            assert share == masked.original_probabilities[depth]


def test_probabilities_have_two_significant_digits():
    shown = {0: "<0.01 %", 0.00009: "<0.01 %", 0.0001: "0.010 %", 0.00123: "0.12 %", 0.0345: "3.5 %", 0.0999: "10 %"}
    shown |= {0.456: "46 %", 0.9949: "99 %", 0.9964: "99.6 %", 0.9999: ">99.9 %", 1.0: ">99.9 %"}
    assert {probability: percent(probability) for probability in shown} == shown


def inspected(directory, objective: str, top: int = 1, **settings):
    """An inspection, its model and dictionary, and the tokens [1,T] that the page shows as input."""
    pretrained = load_checkpoint(write_run(directory, objective, **settings))
    inspection = inspect_text(pretrained, TEXT, SEED, MASK_PROB, top)
    read = [pretrained.dictionary.index(token.input) for token in inspection.tokens]
    return inspection, pretrained.model, pretrained.dictionary, torch.tensor([read])


@torch.no_grad()
def test_mlm_has_predictions_and_no_detection(tmp_path):
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


@torch.no_grad()
@pytest.mark.parametrize("variant", ["electric", "electra_tt"])
def test_electric_shows_noise_and_log_probabilities_of_its_input(variant, tmp_path):
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


@torch.no_grad()
def test_teams_shows_its_candidates(tmp_path):
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


@pytest.mark.parametrize("objective", ["amos", "teams"])
def test_terminal_and_page_show_every_value_and_the_page_is_self_contained(objective, tmp_path, capsys, monkeypatch):
    """The text has a script and special tokens, which must be shown and not run."""
    run, html = write_run(tmp_path / "run", objective), tmp_path / "page.html"
    monkeypatch.setenv("COLUMNS", "200")
    command = ["inspect", run, "--text", TEXT, "--seed", SEED, "--mask-prob", MASK_PROB, "--html", html]
    assert main(list(map(str, command))) == 0
    out, page = capsys.readouterr().out, html.read_text(encoding="utf-8")
    assert "\x1b" not in out, "no escape sequences without a terminal"
    assert "<s>" in text_of(page)
    for masked in inspect_text(load_checkpoint(run), TEXT, SEED, MASK_PROB, top=3).masked:
        (row,) = re.findall(rf"(?s)<td><div>{masked.position}</div></td>.*?</tr>", page)
        for probability in (*masked.original_probabilities, *(one.probability for one in masked.candidates)):
            assert percent(probability) in text_of(row)
            assert percent(probability) in out


def test_default_text_is_of_the_runs_corpus(save_dir, tmp_path, capsys):
    """The first paragraph of 30 to 100 known tokens in the validation split, as its tokens spell it."""
    loaded = load_checkpoint(save_dir)
    words = "the quick brown fox jumps over the lazy dog and the end"
    data = tmp_path / "data"
    data.mkdir()
    builder = indexed_dataset.make_builder(str(data / "valid.bin"), "mmap", vocab_size=len(loaded.dictionary))
    for paragraph in ("the end", f"Zürich {words}", f"{words} and the", TEXT.replace("\n", " ")):
        builder.add_item(loaded.tokens(paragraph)[1:].int())
    builder.finalize(str(data / "valid.idx"))
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    state["cfg"]["task"]["data"] = f"{data}:{tmp_path / 'absent'}"
    torch.save(state, save_dir / "checkpoint_last.pt")
    for name, text in {"a": [], "b": ["--text", f"{words} and the"]}.items():
        main(["inspect", str(save_dir), *text, "--html", str(tmp_path / name)])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    (data / "valid.idx").unlink()
    assert "data/valid.idx is missing" in error_line(capsys, main, "inspect", save_dir)


def test_mistakes_are_one_line(save_dir, monkeypatch, capsys):
    monkeypatch.chdir(save_dir)
    (save_dir / "cut.pt").write_bytes((save_dir / "checkpoint_last.pt").read_bytes()[:5000])
    write_run(save_dir / "fine_tuned", "electra", classes=2)
    (save_dir / "latin1.txt").write_bytes(b"a\xe9b")
    for arguments, named in (
        (["absent.pt", "--text", "a"], "absent.pt"),
        (["cut.pt", "--text", "a"], "cut.pt"),
        (["fine_tuned", "--text", "a"], "a model without a generator"),
        ([".", "--text", " \n "], "the text is empty"),
        ([".", "--file", "latin1.txt"], "not UTF-8 text (invalid continuation byte at byte 1)"),
        ([".", "--text", "the end", "--mask-prob", "1.5"], "--mask-prob 1.5"),
        ([".", "--text", "the end", "--seed", "-1"], "--seed -1"),
        ([".", "--text", "the end", "--html", "absent/page.html"], "absent/page.html"),
    ):
        assert named in error_line(capsys, main, "inspect", *arguments), arguments
    assert not list(save_dir.glob("*.html"))
