"""BERT, RoBERTa and MPNet with their MLM heads as ``mlm_*``, against Hugging Face's own logits; and back again.

Tolerance: float32 on both sides in another order of summation; 1e-5 of the largest value is some fifty roundings.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from hugging_face_folders import write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from amos_fairseq.checkpoints.read import Pretrained, load_pretrained, read_state
from amos_fairseq.checkpoints.write import NEVER_PREDICTED
from amos_fairseq.cli.main import main
from amos_fairseq.tokenization.fast_tokenizer import row_map

TOLERANCE = 1e-5
TEXTS = ["the quick brown fox, 14 lazy dogs!", "it jumps over the fox"]
CLASSES = {"mpnet": "MPNetForMaskedLM", "bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM"}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for family, class_name in CLASSES.items():
        write_model(root / family, family, class_name)
        assert main(["import", str(root / family), str(root / f"{family}_imported" / "model.pt")]) == 0
    return root


def padded_rows(pretrained: Pretrained) -> Tensor:
    """The texts in our ids, right-padded."""
    rows = [pretrained.tokens(text) for text in TEXTS]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pretrained.dictionary.pad())


@torch.no_grad()
@pytest.mark.parametrize("family", CLASSES)
def test_predictions_are_those_of_the_folder(family, folders):
    """Log-probabilities at every position, also where our vocabulary has more rows than theirs has tokens."""
    pretrained = load_pretrained(folders / f"{family}_imported" / "model.pt")
    model, ids, rows = pretrained.model, row_map(pretrained.tokenizer), padded_rows(pretrained)
    assert read_state(pretrained.file)["cfg"]["model"]["_name"] == "mlm_base"
    everywhere = torch.arange(rows.size(1)).expand_as(rows)
    logits, weights = model.predict_logits(rows, rows, everywhere, torch.ones(rows.shape))
    real = rows.ne(pretrained.dictionary.pad())
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folders / family).eval()
    expected = theirs(ids[rows], attention_mask=real.long()).logits[..., ids].log_softmax(-1)[real]
    ours = logits[0].log_softmax(-1)[..., : len(ids)][real]
    assert (ours - expected).abs().max() < TOLERANCE * expected.abs().max()
    assert weights.unique().tolist() == [1.0]


@pytest.mark.parametrize("family", CLASSES)
def test_round_trip_is_the_identity(family, folders, tmp_path):
    """After export, every weight of a token is the folder's, bit for bit."""
    checkpoint = folders / f"{family}_imported" / "model.pt"
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--as", family]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [CLASSES[family]]
    theirs, back = load_file(folders / family / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert theirs.keys() == back.keys()
    num_tokens = len(row_map(load_pretrained(checkpoint).tokenizer))
    for name, tensor in theirs.items():
        kept, restored = tensor, back[name]
        if "word_embeddings" in name or name in ("lm_head.bias", "cls.predictions.bias"):
            kept, restored = kept[:num_tokens], restored[:num_tokens]  # rows that no token has are left out
        if "position_embeddings" in name and family != "bert":
            kept, restored = kept[2:], restored[2:]  # the first two belong to no position
        assert torch.equal(kept, restored), name


def test_rows_without_a_foreign_one_are_never_predicted(folders):
    pretrained = load_pretrained(folders / "bert_imported" / "model.pt")
    bias = pretrained.model.mlm_head.bias
    assert bias[len(pretrained.dictionary) :].unique().tolist() == [NEVER_PREDICTED]
    assert bias[: len(pretrained.dictionary)].abs().max() < 10


def test_report_lists_nothing_newly_initialized(folders, tmp_path, capsys):
    main(["import", str(folders / "roberta"), str(tmp_path / "model.pt")])
    said = capsys.readouterr().out
    held, of = (int(number.replace(",", "")) for number in said.split(" parameters")[0].split()[-3::2])
    assert held == of
    assert "initialized randomly" not in said
    assert "--arch mlm_base" in said


@torch.no_grad()
@pytest.mark.parametrize("arch", ["teams_tiny", "electric_tiny", "electra_tiny"])
def test_the_encoder_continues_with_any_objective(arch, folders, tmp_path, capsys):
    """Its states are the folder's; the generator and all heads are reported as newly initialized."""
    assert main(["import", str(folders / "bert"), str(tmp_path / "model.pt"), "--arch", arch]) == 0
    said = capsys.readouterr().out
    assert "detection_head" in said.partition("initialized randomly")[2]
    assert "cls.predictions.bias" in said.partition("left out")[2]
    pretrained = load_pretrained(tmp_path / "model.pt")
    rows = padded_rows(pretrained)
    real = rows.ne(pretrained.dictionary.pad())
    theirs = transformers.BertModel.from_pretrained(folders / "bert").eval()
    expected = theirs(row_map(pretrained.tokenizer)[rows], attention_mask=real.long()).last_hidden_state[real]
    ours = pretrained.model.extract_features(rows)[real]
    assert (ours - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_an_untied_output_layer_is_refused_and_the_encoder_alone_is_not(folders, tmp_path, capsys):
    weights = load_file(folders / "bert" / "model.safetensors")
    write_model(tmp_path / "in", "bert", "BertForMaskedLM")
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"] + 1
    save_file(weights, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()  # the progress bar of transformers 5, from write_model
    with pytest.raises(SystemExit):
        main(["import", str(tmp_path / "in"), str(tmp_path / "model.pt")])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "differs from bert.embeddings.word_embeddings.weight" in said
    assert "--arch amos_base" in said
    assert main(["import", str(tmp_path / "in"), str(tmp_path / "model.pt"), "--arch", "amos_tiny"]) == 0


def test_folder_without_the_head_becomes_amos_or_gets_a_new_head(tmp_path, capsys):
    write_model(tmp_path / "in", "bert", "BertModel")
    main(["import", str(tmp_path / "in"), str(tmp_path / "a.pt"), "--arch", "mlm_tiny"])
    assert "initialized randomly (--seed 1): mlm_head" in capsys.readouterr().out
    main(["import", str(tmp_path / "in"), str(tmp_path / "b" / "b.pt")])
    assert read_state(tmp_path / "b" / "b.pt")["cfg"]["model"]["_name"] == "amos_base"
