"""BERT, RoBERTa and MPNet with their MLM heads imported as ``mlm_*``, against Hugging Face's own logits, and exported."""

from pathlib import Path

import pytest
import torch
import transformers
from failures import error_line
from hugging_face_folders import TOLERANCE, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from amos_fairseq.checkpoints.read import LoadedCheckpoint, load_checkpoint, read_state
from amos_fairseq.checkpoints.write import NEVER_PREDICTED
from amos_fairseq.cli.main import main
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.text.tokenization.fast_tokenizer import row_map

TEXTS = ["the quick brown fox, 14 lazy dogs!", "it jumps over the fox"]
CLASSES = {"mpnet": "MPNetForMaskedLM", "bert": "BertForMaskedLM", "xlm-roberta": "XLMRobertaForMaskedLM"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for family, class_name in CLASSES.items():
        write_model(root / family, family, class_name)
        assert main(["import", str(root / family), str(root / f"{family}_imported" / "model.pt")]) == 0
    return root


def padded_rows(pretrained: LoadedCheckpoint) -> Tensor:
    rows = [pretrained.tokens(text) for text in TEXTS]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pretrained.dictionary.pad())


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", CLASSES)
def test_predictions_are_those_of_the_folder(family, folders):
    """Log-probabilities at every position, also where our vocabulary has more rows than theirs has tokens."""
    pretrained = load_checkpoint(folders / f"{family}_imported" / "model.pt")
    model, ids, rows = pretrained.model, row_map(pretrained.tokenizer), padded_rows(pretrained)
    assert read_state(pretrained.file)["cfg"]["model"]["_name"] == "mlm_base"
    everywhere = torch.arange(rows.size(1)).expand_as(rows)
    logits, weights = model.predict_logits(PretrainingBatch(rows, rows, everywhere, torch.ones(rows.shape)))
    real = rows.ne(pretrained.dictionary.pad())
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folders / family).eval()
    expected = theirs(ids[rows], attention_mask=real.long()).logits[..., ids].log_softmax(-1)[real]
    ours = logits[0].log_softmax(-1)[..., : len(ids)][real]
    assert (ours - expected).abs().max() < TOLERANCE * expected.abs().max()
    assert weights.unique().tolist() == [1.0]


def test_rows_without_a_token_are_never_predicted(folders):
    pretrained = load_checkpoint(folders / "bert_imported" / "model.pt")
    bias = pretrained.model.mlm_head.bias
    assert bias[len(pretrained.dictionary) :].unique().tolist() == [NEVER_PREDICTED]
    assert bias[: len(pretrained.dictionary)].abs().max() < 10


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "arch",
    [
        "teams_tiny",
    ],
)
def test_encoder_is_imported_for_any_objective(arch, folders, tmp_path, capsys):
    """Its states are the folder's; the generator and all heads are reported as newly initialized."""
    assert main(["import", str(folders / "bert"), str(tmp_path / "model.pt"), "--arch", arch]) == 0
    printed = capsys.readouterr().out
    assert "detection_head" in printed.partition("initialized randomly")[2]
    assert "cls.predictions.bias" in printed.partition("left out")[2]
    pretrained = load_checkpoint(tmp_path / "model.pt")
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
    line = error_line(capsys, main, "import", tmp_path / "in", tmp_path / "model.pt")
    assert "differs from bert.embeddings.word_embeddings.weight" in line
    assert "--arch amos_base" in line
    assert main(["import", str(tmp_path / "in"), str(tmp_path / "model.pt"), "--arch", "amos_tiny"]) == 0


def test_folder_without_the_head_becomes_amos_or_gets_a_new_head(tmp_path, capsys):
    write_model(tmp_path / "in", "bert", "BertModel")
    main(["import", str(tmp_path / "in"), str(tmp_path / "a.pt"), "--arch", "mlm_tiny"])
    assert "initialized randomly (--seed 1): mlm_head" in capsys.readouterr().out
    main(["import", str(tmp_path / "in"), str(tmp_path / "b" / "b.pt")])
    assert read_state(tmp_path / "b" / "b.pt")["cfg"]["model"]["_name"] == "amos_base"
