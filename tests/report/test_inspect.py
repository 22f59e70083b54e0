"""``amos inspect`` on an untrained model, against the model's own outputs."""

import re

import pytest
import torch
from failures import error_line
from fairseq.data import indexed_dataset
from html_page import Page
from saved_models import TEXT, write_run, write_save_dir

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.inspect import LARGEST_SEED
from amos_fairseq.cli.main import main
from amos_fairseq.errors import UserError
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.report.inspect_text import inspect_text, mask_block, surfaces
from amos_fairseq.report.inspection import percent
from amos_fairseq.report.inspection_views import render_inspection


@pytest.fixture
def save_dir(tmp_path):
    write_save_dir(tmp_path)
    return tmp_path


@pytest.fixture
def pretrained(save_dir):
    return load_checkpoint(save_dir)


def test_tokens_are_those_of_the_binarized_corpus(pretrained):
    first, second = (pretrained.tokenizer.encode(line) for line in TEXT.split("\n"))
    pieces = [pretrained.dictionary[i] for i in pretrained.tokens(TEXT).tolist()]
    assert pieces == ["<s>", *first, "</s>", *second, "</s>"]
    assert pretrained.tokens("\nthe end\n\n").tolist() == pretrained.tokens("the end").tolist()


def test_values_equal_those_of_the_forward_pass(pretrained):
    inspection = inspect_text(pretrained, TEXT, seed=3, mask_prob=0.2, top=4)
    tokens = pretrained.tokens(TEXT)
    model, dictionary = pretrained.model, pretrained.dictionary
    assert len(inspection.masked) == -(-len(tokens) // 5), "ceil(0.2 L)"

    batch = mask_block(pretrained, tokens, seed=3, mask_prob=0.2)["net_input"]
    assert torch.equal(batch["tokens"][0], tokens)
    torch.manual_seed(3)
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


def test_predictions_are_the_tokens_that_can_be_sampled(pretrained):
    """Biases make special tokens and padding rows the most probable; others are predicted with small probabilities."""
    dictionary, model = pretrained.dictionary, pretrained.model
    specials = [dictionary.index(symbol) for symbol in ("<s>", "<pad>", "</s>", "<unk>", "<mask>")]
    padding = list(range(len(dictionary), model.embed_tokens.num_embeddings))
    assert padding
    with torch.no_grad():
        model.mlm_heads[0].bias[specials + padding] += 50
    inspection = inspect_text(pretrained, TEXT, seed=3, mask_prob=0.2, top=10_000)
    words = sorted(set(dictionary.symbols) - {dictionary[i] for i in specials})
    for masked in inspection.masked:
        for depth, predictions in enumerate(masked.predictions):
            assert sorted(prediction.piece for prediction in predictions) == words
            assert sum(prediction.probability for prediction in predictions) < 1e-6, "the softmax is over all rows"
            original = inspection.tokens[masked.position].original
            share = next(prediction.probability for prediction in predictions if prediction.piece == original)
            assert share == masked.original_probabilities[depth]


def test_seed_decides_masks_and_samples(pretrained):
    assert inspect_text(pretrained, TEXT, LARGEST_SEED, 0.2, 1).masked
    first, again, other = (inspect_text(pretrained, TEXT, seed, 0.2, 1) for seed in (1, 1, 2))
    assert first == again
    assert [m.position for m in first.masked] != [m.position for m in other.masked]


def test_samples_of_each_depth_are_computed_for_the_report_only(pretrained, monkeypatch):
    passes = []
    pretrained.model.register_forward_pre_hook(lambda *_: passes.append(1))
    shown, reported = (inspect_text(pretrained, TEXT, 1, 0.2, 1, with_samples=samples) for samples in (False, True))
    num_depths = len(shown.depth_names)
    assert len(passes) == 2 + num_depths
    assert {len(masked.samples) for masked in shown.masked} == {0}
    assert {len(masked.samples) for masked in reported.masked} == {num_depths}


def test_text_without_a_known_token_is_refused(pretrained, monkeypatch):
    dictionary = pretrained.dictionary
    unknown = torch.tensor([dictionary.bos(), dictionary.unk(), dictionary.eos()])
    monkeypatch.setattr(type(pretrained), "tokens", lambda self, text: unknown)
    with pytest.raises(UserError, match="no token of the text may be masked"):
        inspect_text(pretrained, "?", seed=1, mask_prob=0.15, top=1)


def test_a_fine_tuned_checkpoint_has_no_generator_to_inspect(save_dir, capsys):
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    state["cfg"]["task"] = {"_name": "sentence_prediction"}
    state["model"] = {
        name.replace("discriminator.", "encoder."): tensor
        for name, tensor in state["model"].items()
        if name.startswith(("embed_tokens.", "discriminator."))
    }
    torch.save(state, save_dir / "fine_tuned.pt")
    line = error_line(capsys, main, "inspect", save_dir / "fine_tuned.pt", "--text", "the end")
    assert line.endswith("holds a model without a generator: inspect needs a checkpoint of pretraining")


def test_electra_predicts_from_its_single_depth(tmp_path):
    """Its generator by hand: the softmax of the head's output times the token embeddings."""
    write_run(tmp_path, "electra", encoder_layers=2)
    pretrained = load_checkpoint(tmp_path)
    inspection = inspect_text(pretrained, TEXT, seed=3, mask_prob=0.2, top=4)
    assert inspection.depth_names == ["2"]
    model, tokens = pretrained.model, pretrained.tokens(TEXT)
    masked_tokens = mask_block(pretrained, tokens, seed=3, mask_prob=0.2)["net_input"]["masked_tokens"]
    with torch.no_grad():
        states = model.generator(model.embed_tokens(masked_tokens))[-1]
        logits = model.mlm_head(states) @ model.embed_tokens.weight.T + model.mlm_head.bias
    probabilities = logits[0].softmax(-1)
    for masked in inspection.masked:
        assert masked.mixture_weights == [1.0]
        share = probabilities[masked.position]
        assert masked.original_probabilities == pytest.approx([share[tokens[masked.position]].item()], rel=1e-4)
        (predictions,) = masked.predictions
        expected = [share[pretrained.dictionary.index(prediction.piece)].item() for prediction in predictions]
        assert [prediction.probability for prediction in predictions] == pytest.approx(expected, rel=1e-4)


def test_sampled_mixture_is_that_of_the_forward_pass(tmp_path):
    """Weights are 0 and 1: the token was sampled from the depth with weight 1."""
    write_run(tmp_path, "amos", encoder_layers=2, mixture="random_layer")
    pretrained = load_checkpoint(tmp_path)
    inspection = inspect_text(pretrained, TEXT, seed=3, mask_prob=0.3, top=1)
    batch = mask_block(pretrained, pretrained.tokens(TEXT), seed=3, mask_prob=0.3)["net_input"]
    torch.manual_seed(3)
    with torch.no_grad():
        weights = pretrained.model(PretrainingBatch(**batch)).mixture_weights[0].tolist()
    assert [masked.mixture_weights for masked in inspection.masked] == weights


def test_longer_text_is_truncated_with_a_notice(pretrained):
    inspection = inspect_text(pretrained, TEXT * 3, seed=1, mask_prob=0.15, top=1)
    assert len(inspection.tokens) == 80
    left_out = len(pretrained.tokens(TEXT * 3)) - 80
    expected = f"the last {left_out} tokens of the text are left out: they exceed the model's maximum input"
    assert inspection.summary()[-1] == expected


def test_joined_surfaces_are_the_text(pretrained):
    pieces = [pretrained.dictionary[i] for i in pretrained.tokens(TEXT).tolist()]
    special = [piece in ("<s>", "</s>") for piece in pieces]
    assert "".join(surfaces(pretrained.tokenizer, pieces, special)) == TEXT.replace("\n", "")


def test_page_is_self_contained_and_escaped(pretrained):
    inspection = inspect_text(pretrained, TEXT, seed=1, mask_prob=0.15, top=2)
    page = render_inspection(inspection)
    reader = Page(page)
    assert not re.search(r"url\(|@import|https?:|srcset", page)
    assert "<s>" in reader.text, "shown as text, not taken as a tag"
    for line in inspection.summary():
        assert line in reader.text
    for masked in inspection.masked:
        token = inspection.tokens[masked.position]
        for shown in (token.original, token.input, percent(token.positive_probability), token.verdict):
            assert shown in reader.text
        for probability in masked.original_probabilities:
            assert percent(probability) in reader.text


def test_command_prints_the_table_and_writes_the_page(save_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    page = tmp_path / "out.html"
    assert main(["inspect", str(save_dir), "--text", TEXT, "--html", str(page)]) == 0
    out = capsys.readouterr().out
    inspection = inspect_text(load_checkpoint(save_dir), TEXT, seed=1, mask_prob=0.15, top=3)
    assert page.read_text(encoding="utf-8") == render_inspection(inspection)
    for masked in inspection.masked:
        token = inspection.tokens[masked.position]
        assert re.search(rf"(?m)^ +{masked.position} +{re.escape(token.original)} .*weight.*weight.*weight", out)
        assert f"[{token.original}>{token.input}]{100 * token.positive_probability:.0f}" in out
    assert "7 updates; seed 1, mask probability 0.15" in out
    assert out.endswith(f"page: {page}\n")
    assert "\x1b" not in out, "no escape sequences without a terminal"


def test_probabilities_have_two_significant_digits():
    shown = {0: "<0.01 %", 0.00009: "<0.01 %", 0.0001: "0.010 %", 0.00123: "0.12 %", 0.0345: "3.5 %", 0.0999: "10 %"}
    shown |= {0.456: "46 %", 0.9949: "99 %", 0.9964: "99.6 %", 0.9999: ">99.9 %", 1.0: ">99.9 %"}
    assert {probability: percent(probability) for probability in shown} == shown


def test_default_text_is_of_the_runs_corpus(save_dir, tmp_path, capsys):
    """The first paragraph of 30 to 100 known tokens in the validation split, as its tokens spell it."""
    loaded = load_checkpoint(save_dir)
    words = "the quick brown fox jumps over the lazy dog and the end"
    paragraphs = ["the end", f"Zürich {words}", f"{words} and the", TEXT.replace("\n", " ")]
    data = tmp_path / "data"
    data.mkdir()
    builder = indexed_dataset.make_builder(str(data / "valid.bin"), "mmap", vocab_size=len(loaded.dictionary))
    for paragraph in paragraphs:
        builder.add_item(loaded.tokens(paragraph)[1:].int())
    builder.finalize(str(data / "valid.idx"))
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    state["cfg"]["task"]["data"] = f"{data}:{tmp_path / 'absent'}"
    torch.save(state, save_dir / "checkpoint_last.pt")
    main(["inspect", str(save_dir), "--html", str(tmp_path / "a.html")])
    main(["inspect", str(save_dir), "--text", paragraphs[2], "--html", str(tmp_path / "b.html")])
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    (data / "valid.idx").unlink()
    line = error_line(capsys, main, "inspect", save_dir)
    assert "data/valid has no paragraph to show: give a text with --text" in line


def test_text_of_a_file(save_dir, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    main(["inspect", str(save_dir), "--text", TEXT, "--html", str(tmp_path / "a.html")])
    main(["inspect", str(save_dir), "--file", str(tmp_path / "text.txt"), "--html", str(tmp_path / "b.html")])
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "absent.pt", "--text", "a"], "absent.pt is missing: give a checkpoint or the SAVE_DIR"),
        (["inspect", "cut.pt", "--text", "a"], "cut.pt is not a complete checkpoint"),
        (["inspect", "other.pt", "--text", "a"], "other.pt is not a checkpoint of fairseq-train"),
        (["inspect", ".", "--text", " \n "], "the text is empty"),
        (["inspect", ".", "--file", "absent.txt"], "absent.txt: the text cannot be read (No such file or directory)"),
        (["inspect", ".", "--file", "latin1.txt"], "latin1.txt: not UTF-8 at byte 1"),
        (["inspect", ".", "--text", "the end", "--mask-prob", "1.5"], "--mask-prob 1.5 is out of range"),
        (["inspect", ".", "--text", "the end", "--top", "0"], "--top 0 shows no predictions"),
        (["inspect", ".", "--text", "the end", "--seed", "-1"], "--seed -1 is out of range: give a number from 0"),
        (["inspect", ".", "--text", "the end", "--seed", str(2**63)], f"--seed {2**63} is out of range"),
        (["inspect", ".", "--text", "the end", "--seed", "9" * 23], "--seed 99999999999999999999999 is out of range"),
        (["inspect", ".", "--text", "the end", "--html", "absent/page.html"], "absent/page.html: the page cannot be"),
    ],
)
def test_mistakes_are_one_line(save_dir, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(save_dir)
    (save_dir / "cut.pt").write_bytes((save_dir / "checkpoint_last.pt").read_bytes()[:5000])
    torch.save({"weights": torch.zeros(2)}, save_dir / "other.pt")
    (save_dir / "latin1.txt").write_bytes("é".encode("latin-1").join([b"a", b"b"]))
    assert message in error_line(capsys, main, *arguments)
    assert not list(save_dir.glob("*.html"))
