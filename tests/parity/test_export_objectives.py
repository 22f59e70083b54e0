"""``amos export`` of objectives other than AMOS and plain ELECTRA, against our own code."""

import json
from pathlib import Path

import pytest
import torch
from exported_folders import LONGEST, assert_close, export, outputs, padded_tokens
from saved_models import write_run

from amos_fairseq.checkpoints.read import load_checkpoint


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def class_in(folder: Path) -> str:
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return name


def refusal(run: Path, out: Path, capsys: pytest.CaptureFixture, *flags: str) -> str:
    with pytest.raises(SystemExit, match="1"):
        export(run, out, *flags)
    assert not out.exists()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


MLM_CLASSES = {
    "none": ({}, "BertForMaskedLM"),
    "t5": ({"relative_position_scheme": "t5"}, "MPNetForMaskedLM"),
    "narrow embeddings": ({"embedding_dim": 8}, "ElectraForMaskedLM"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MLM_CLASSES)
def test_mlm_is_exported_as_masked_language_model(name, tmp_path):
    """Against ``predict_logits``, at every position; and the encoder that AutoModel loads from the same folder."""
    settings, class_name = MLM_CLASSES[name]
    pretrained = load_checkpoint(write_run(tmp_path / "run", "mlm", **settings))
    export(tmp_path / "run", tmp_path / "out", check=True)
    assert class_in(tmp_path / "out") == class_name
    tokens = padded_tokens(pretrained)
    real = tokens.ne(1)
    everywhere = torch.arange(LONGEST).expand_as(tokens)
    (ours,) = pretrained.model.predict_logits(tokens, tokens, everywhere, real.float())[0]
    theirs = outputs(tmp_path / "out", "AutoModelForMaskedLM", tokens).logits
    assert_close(ours[real][:, : len(pretrained.dictionary)], theirs[real])
    states = outputs(tmp_path / "out", "AutoModel", tokens).last_hidden_state
    assert_close(pretrained.model.extract_features(tokens)[real], states[real])


@torch.no_grad()
def test_encoder_of_mlm(tmp_path):
    pretrained = load_checkpoint(write_run(tmp_path / "run", "mlm"))
    export(tmp_path / "run", tmp_path / "out", "--part", "encoder")
    assert class_in(tmp_path / "out") == "BertModel"
    tokens = padded_tokens(pretrained)
    real = tokens.ne(1)
    theirs = outputs(tmp_path / "out", "AutoModel", tokens).last_hidden_state
    assert_close(pretrained.model.extract_features(tokens)[real], theirs[real])


def test_card_of_mlm_does_not_mention_a_generator(tmp_path):
    write_run(tmp_path / "run", "mlm")
    export(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "# MLM, 2 layers of width 16: the masked language model" in card
    assert "pipeline_tag: fill-mask" in card
    assert "This is the generator" not in card
    assert "| Objective | mlm |" in card


TEAMS_BRANCHES = {
    "mws": {},
    "rtd": {"representation": "rtd"},
    "extra layer": {"task_heads": "extra_layer", "representation": "rtd"},
    "rtd alone": {"mws_loss_weight": 0.0, "representation": "rtd"},
}


@torch.no_grad()
@pytest.mark.parametrize("name", TEAMS_BRANCHES)
def test_encoder_of_teams_is_the_chosen_branch(name, tmp_path):
    """Against the states that ``discriminate`` returns for the two tasks."""
    pretrained = load_checkpoint(write_run(tmp_path / "run", "teams", **TEAMS_BRANCHES[name]))
    export(tmp_path / "run", tmp_path / "out")
    tokens = padded_tokens(pretrained)
    real = tokens.ne(1)
    of_mws, of_rtd = pretrained.model.discriminate(tokens, ~real)
    ours = of_mws if name == "mws" else of_rtd
    theirs = outputs(tmp_path / "out", "AutoModel", tokens).last_hidden_state
    assert_close(ours[real], theirs[real])
    if name in ("rtd", "extra layer"):
        assert (of_mws - of_rtd)[real].abs().max() > 0.1, "the branches differ"


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"task_heads": "extra_layer"}, {"relative_position_scheme": "t5"}])
def test_discriminator_of_teams_is_the_detection_branch(settings, tmp_path):
    """The detection head needs the branch of its task, although the other one is fine-tuned."""
    pretrained = load_checkpoint(write_run(tmp_path / "run", "teams", **settings))
    export(tmp_path / "run", tmp_path / "out", "--part", "discriminator")
    assert (
        class_in(tmp_path / "out")
        == f"{'MPNet' if 'relative_position_scheme' in settings else 'Bert'}ForTokenClassification"
    )
    tokens = padded_tokens(pretrained)
    real = tokens.ne(1)
    ours = pretrained.model.detection_head(pretrained.model.discriminate(tokens, ~real)[1]).sigmoid()
    theirs = outputs(tmp_path / "out", "AutoModelForTokenClassification", tokens).logits.softmax(-1)[..., 1]
    assert_close(ours[real], theirs[real])


GENERATORS = {
    "teams": ("teams", {}),
    "shallow electra": ("electra", {"generator_layers": 1}),
    "electra that shares nothing": ("electra", {"share_weights": "none"}),
    "electra that shares all": ("electra", {"share_weights": "all", "generator_size": 1}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", GENERATORS)
def test_generators_of_the_family(name, tmp_path):
    """Against ``predict_logits`` at every position."""
    objective, settings = GENERATORS[name]
    pretrained = load_checkpoint(write_run(tmp_path / "run", objective, **settings))
    export(tmp_path / "run", tmp_path / "out", "--part", "generator")
    tokens = padded_tokens(pretrained)
    real = tokens.ne(1)
    (ours,) = pretrained.model.predict_logits(tokens, tokens, torch.arange(LONGEST).expand_as(tokens), real.float())[0]
    theirs = outputs(tmp_path / "out", "AutoModelForMaskedLM", tokens).logits
    assert_close(ours[real][:, : len(pretrained.dictionary)], theirs[real])


@torch.no_grad()
@pytest.mark.parametrize("variant", ["electric", "electra_tt"])
def test_electric_and_electra_tt(variant, tmp_path):
    """Electric: -logits are its token_log_probs. ELECTRA-TT: the probability of noise, as ELECTRA's of "replaced"."""
    pretrained = load_checkpoint(write_run(tmp_path / "run", "electric", electric_variant=variant))
    export(tmp_path / "run", tmp_path / "out", "--part", "discriminator", check=True)
    assert class_in(tmp_path / "out") == "ElectraForPreTraining"
    model, tokens = pretrained.model, padded_tokens(pretrained)
    scored = tokens.ne(1) & ~model.never_sampled_mask[tokens]
    logits = outputs(tmp_path / "out", "AutoModelForPreTraining", tokens).logits
    ours = (
        model.token_log_probs(tokens) if variant == "electric" else model.detection_head(model.extract_features(tokens))
    )
    assert_close(ours[scored], (-logits if variant == "electric" else logits)[scored])
    labels = json.loads((tmp_path / "out" / "config.json").read_text()).get("id2label", {})
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert ("replaced" in labels.values()) == (variant == "electra_tt")
    assert ("-energy is the log-probability" in card) == (variant == "electric")


@torch.no_grad()
@pytest.mark.parametrize(
    ("objective", "class_name"),
    [("teams", "BertForSequenceClassification"), ("electric", "ElectraForSequenceClassification")],
)
def test_fine_tuned_teams_and_electric(objective, class_name, tmp_path):
    pretrained = load_checkpoint(write_run(tmp_path / "run", objective, classes=3))
    export(tmp_path / "run", tmp_path / "out")
    assert class_in(tmp_path / "out") == class_name
    tokens = padded_tokens(pretrained)
    ours = pretrained.model(tokens, classification_head_name="sentence_classification_head")[0]
    assert_close(ours, outputs(tmp_path / "out", "AutoModelForSequenceClassification", tokens).logits)


NOTHING_FITS = {
    "two towers": ("electric", {}, "generator", "no generator that a masked language model"),
    "counts": ("electra", {"generator": "uniform"}, "generator", "no generator that a masked language model"),
    "tells originals": ("electra", {"main_objective": "replace_mlm"}, "discriminator", "has no detection head"),
    "selects alone": ("teams", {"rtd_loss_weight": 0.0}, "discriminator", "has no detection head"),
    "a network per token": ("teams", {"task_heads": "ffn"}, "discriminator", "on top of its encoder (--task-heads ffn)"),
    "cloze model": (
        "electric", {"electric_variant": "two_tower", "generator_size": 1, "generator_loss_tokens": "all"}, "encoder",
        "has no encoder to fine-tune or to load",
    ),
    "energies on relative positions": (
        "electric", {"relative_position_scheme": "t5"}, "discriminator", "two layers on relative positions"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING_FITS)
def test_networks_without_a_hugging_face_class_are_refused(name, tmp_path, capsys):
    objective, settings, part, message = NOTHING_FITS[name]
    write_run(tmp_path / "run", objective, **settings)
    assert message in refusal(tmp_path / "run", tmp_path / "out", capsys, "--part", part)


def test_parts_that_an_objective_lacks_are_refused(tmp_path, capsys):
    mlm, amos = write_run(tmp_path / "mlm", "mlm"), write_run(tmp_path / "amos")
    for part in ("generator", "discriminator"):
        said = refusal(mlm, tmp_path / "out", capsys, "--part", part)
        assert f"has no {part}: give --part mlm or encoder" in said
    assert "is not an mlm: its masked language model is --part generator" in refusal(
        amos, tmp_path / "out", capsys, "--part", "mlm"
    )
