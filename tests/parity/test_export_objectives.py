"""What ``amos export`` makes of objectives beside AMOS and plain ELECTRA, against our own code."""

import json
from pathlib import Path

import pytest
import torch
from exported_folders import LONGEST, assert_close, export, outputs, padded_tokens
from small_runs import write_run

from amos_fairseq.interop.checkpoint import load_pretrained


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
def test_an_mlm_is_a_masked_language_model(name, tmp_path):
    """Against ``propose``, at every position; and its encoder out of the same folder, as AutoModel reads it."""
    settings, class_name = MLM_CLASSES[name]
    pretrained = load_pretrained(write_run(tmp_path / "run", "mlm", **settings))
    export(tmp_path / "run", tmp_path / "out", check=True)
    assert class_in(tmp_path / "out") == class_name
    tokens = padded_tokens(pretrained)
    real = tokens.ne(1)
    everywhere = torch.arange(LONGEST).expand_as(tokens)
    (ours,) = pretrained.model.propose(tokens, tokens, everywhere, real.float())[0]
    theirs = outputs(tmp_path / "out", "AutoModelForMaskedLM", tokens).logits
    assert_close(ours[real][:, : len(pretrained.dictionary)], theirs[real])
    states = outputs(tmp_path / "out", "AutoModel", tokens).last_hidden_state
    assert_close(pretrained.model.extract_features(tokens)[real], states[real])


@torch.no_grad()
def test_the_encoder_of_an_mlm_alone(tmp_path):
    pretrained = load_pretrained(write_run(tmp_path / "run", "mlm"))
    export(tmp_path / "run", tmp_path / "out", "--part", "encoder")
    assert class_in(tmp_path / "out") == "BertModel"
    tokens = padded_tokens(pretrained)
    real = tokens.ne(1)
    theirs = outputs(tmp_path / "out", "AutoModel", tokens).last_hidden_state
    assert_close(pretrained.model.extract_features(tokens)[real], theirs[real])


def test_card_of_an_mlm_speaks_of_no_generator(tmp_path):
    write_run(tmp_path / "run", "mlm")
    export(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "# MLM, 2 layers of width 16: the masked language model" in card
    assert "pipeline_tag: fill-mask" in card
    assert "This is the generator" not in card
    assert "| Objective | mlm |" in card


def test_parts_that_an_objective_does_not_have_are_refused(tmp_path, capsys):
    mlm, amos = write_run(tmp_path / "mlm", "mlm"), write_run(tmp_path / "amos")
    for part in ("generator", "discriminator"):
        said = refusal(mlm, tmp_path / "out", capsys, "--part", part)
        assert f"has no {part}: give --part mlm or encoder" in said
    assert "is no mlm: its masked language model is --part generator" in refusal(
        amos, tmp_path / "out", capsys, "--part", "mlm"
    )
