"""Hugging Face folders against the checkpoints that ``amos import`` writes from them, also through ``amos_fairseq.load``."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from failures import error_line
from hugging_face_folders import POSITIONS, SPECIAL_TOKENS, TOLERANCE, predicted_everywhere, write_electra, write_model
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

import amos_fairseq
from amos_fairseq.checkpoints.read import load_checkpoint, read_state
from amos_fairseq.cli.main import main
from amos_fairseq.hugging_face.import_folder import configuration
from amos_fairseq.recipes.composition import compose_recipe
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.fast_tokenizer import row_map

TEXTS = ["the quick brown fox, 14 lazy dogs!", "it jumps", "fox"]
PAIRS = [("fox", "it jumps"), ("the lazy dogs", "fox"), ("number 7", "doesn't it jump? " * 9), ("it", "it")]
# Family, class in the folder, class of the bare encoder.
CLASSES = {
    "mpnet": ("MPNetForMaskedLM", "MPNetModel"),
    "electra": ("ElectraForPreTraining", "ElectraModel"),
    "bert": ("BertForPreTraining", "BertModel"),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertModel"),
    "roberta": ("RobertaForMaskedLM", "RobertaModel"),
    "xlm-roberta": ("XLMRobertaForMaskedLM", "XLMRobertaModel"),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertModel"),
}


def run_import(*arguments: str | Path) -> int:
    return main(["import", *map(str, arguments)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for family, (name, _) in CLASSES.items():
        if family != "electra":
            write_model(root / family, family, name)
    write_electra(root)
    (root / "discriminator").rename(root / "electra")
    return root


@pytest.fixture(scope="module")
def checkpoints(folders) -> dict[str, Path]:
    """Each family imported once: ELECTRA with its generator, the others with their MLM head."""
    files = {family: folders / f"{family}_imported" / "model.pt" for family in CLASSES}
    for family, file in files.items():
        generator = ["--generator", folders / "generator", "--arch", "electra_tiny"]
        run_import(folders / family, file, *(generator if family == "electra" else []))
    return files


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", CLASSES)
def test_states_and_predictions_of_padded_texts_agree(family, folders, checkpoints):
    """From text on both sides: their tokenizer and model against ours, every length up to the maximum. Log-probabilities also
    where our vocabulary has more rows than theirs has tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders / family)
    theirs = getattr(transformers, CLASSES[family][1]).from_pretrained(folders / family).eval()
    pretrained = load_checkpoint(checkpoints[family])
    texts = [*TEXTS, *(" ".join([word] * n) for word in ("fox", "a") for n in range(1, POSITIONS))]
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    ids = [[cls, *tokenizer(text, add_special_tokens=False).input_ids, sep] for text in texts]
    texts, ids = zip(*((text, row) for text, row in zip(texts, ids, strict=True) if len(row) <= POSITIONS), strict=True)
    assert max(map(len, ids)) == POSITIONS
    batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    expected = theirs(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    rows = torch.nn.utils.rnn.pad_sequence([pretrained.tokens(t) for t in texts], True, pretrained.dictionary.pad())
    real = batch.attention_mask.bool()
    assert torch.equal(rows.ne(pretrained.dictionary.pad()), real)
    ours = pretrained.model.extract_features(rows)
    assert (ours[real] - expected[real]).abs().max() < TOLERANCE * expected[real].abs().max()
    if family == "electra":
        return
    name = "mlm_modern_base" if family == "modernbert" else "mlm_base"
    assert read_state(pretrained.file)["cfg"]["model"]["_name"] == name
    ids, theirs = row_map(pretrained.tokenizer), transformers.AutoModelForMaskedLM.from_pretrained(folders / family)
    expected = theirs.eval()(batch.input_ids, attention_mask=batch.attention_mask).logits[..., ids].log_softmax(-1)
    ours = predicted_everywhere(pretrained.model, rows)[-1].log_softmax(-1)[..., : len(ids)]
    assert (ours[real] - expected[real]).abs().max() < TOLERANCE * expected[real].abs().max()


def paired_tokenizer(folder: Path, family: str) -> transformers.PreTrainedTokenizerFast:
    """The folder's tokenizer, with a template that writes pairs as ``<s> A </s> B </s>`` with types 0 and 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    first, last = SPECIAL_TOKENS[family]["cls"], SPECIAL_TOKENS[family]["sep"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in (first, last)],
    )
    return tokenizer


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_loaded_features_of_pairs_equal_those_of_transformers(family, folders, checkpoints):
    """From text to pooled vectors, in batches; the longest pair is truncated to 40 positions on both sides."""
    theirs = getattr(transformers, CLASSES[family][1]).from_pretrained(folders / family).eval()
    settings = {"padding": True, "truncation": True, "max_length": POSITIONS, "return_token_type_ids": family == "bert"}
    batch = paired_tokenizer(folders / family, family)(PAIRS, return_tensors="pt", **settings)
    assert batch["input_ids"].size(1) == POSITIONS
    expected = theirs(**batch).last_hidden_state
    features = amos_fairseq.load(checkpoints[family], batch_size=2)(PAIRS, truncate=True)
    mask = batch["attention_mask"].bool()
    assert torch.equal(features.mask, mask)
    tolerance = TOLERANCE * expected.abs().max().item()
    torch.testing.assert_close(features.states[mask], expected[mask], atol=tolerance, rtol=0)
    mean = (expected * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(features.pooled(), mean, atol=tolerance, rtol=0)


@torch.no_grad()
def test_electra_keeps_its_generator_and_its_detection_head(folders, checkpoints):
    """Log-probabilities of the generator are those of the folder, also where our vocabulary has more rows."""
    pretrained = load_checkpoint(checkpoints["electra"])
    model, ids = pretrained.model, row_map(pretrained.tokenizer)
    rows = pretrained.tokens(TEXTS[0])[None]
    generator = transformers.ElectraForMaskedLM.from_pretrained(folders / "generator").eval()
    logits = generator(ids[rows]).logits[..., ids]  # without the rows that no token has
    ours = predicted_everywhere(model, rows)[-1].log_softmax(-1)
    torch.testing.assert_close(ours[..., : len(ids)], logits.log_softmax(-1), rtol=0, atol=1e-4)  # of values up to 20
    discriminator = transformers.ElectraForPreTraining.from_pretrained(folders / "electra").eval()
    detected = model.detection_head(model.discriminator(model.embed_tokens(rows))[-1])
    torch.testing.assert_close(detected, discriminator(ids[rows]).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", ["electra_base", "electra_large", "electric_large"])
def test_the_share_of_masked_tokens_is_that_of_the_recipe(arch):
    """From which amos score computes the log-probability of a token."""
    assert configuration(arch, {}, "google").task.mask_prob == compose_recipe(arch).task.mask_prob


DETECTION_LABELS = {"id2label": {0: "original", 1: "replaced"}, "label2id": {"original": 0, "replaced": 1}}


@torch.no_grad()
def test_detector_on_modernbert_is_imported_with_its_whole_head(tmp_path):
    theirs = write_model(tmp_path / "in", "modernbert", "ModernBertForTokenClassification", **DETECTION_LABELS)
    run_import(tmp_path / "in", tmp_path / "model.pt", "--arch", "amos_modern_mini")
    pretrained = load_checkpoint(tmp_path / "model.pt")
    rows = pretrained.tokens(TEXTS[0])[None]
    logits = theirs(row_map(pretrained.tokenizer)[rows]).logits
    ours = pretrained.model.detection_head(pretrained.model.extract_features(rows))
    torch.testing.assert_close(
        ours, logits[..., 1] - logits[..., 0], rtol=0, atol=TOLERANCE * logits.abs().max().item()
    )


def test_half_precision_pickled_weights_and_a_tokenizer_without_json(folders, tmp_path):
    """transformers converts vocab.txt to a tokenizer.json; pytorch_model.bin is read as data; float16 becomes float32."""
    shutil.copytree(folders / "bert", tmp_path / "in")
    weights = load_file(tmp_path / "in" / "model.safetensors")
    torch.save({name: tensor.half() for name, tensor in weights.items()}, tmp_path / "in" / "pytorch_model.bin")
    vocabulary = transformers.AutoTokenizer.from_pretrained(folders / "bert").get_vocab()
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "in" / name).unlink(missing_ok=True)  # transformers 5 writes no special_tokens_map.json
    (tmp_path / "in" / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n")
    run_import(tmp_path / "in", tmp_path / "out" / "model.pt", "--arch", "amos_tiny")
    pretrained = load_checkpoint(tmp_path / "out" / "model.pt")
    assert pretrained.tokenizer.encode(TEXTS[0]) == load_tokenizer(folders / "bert").encode(TEXTS[0])
    held = pretrained.model.discriminator.layers[0].ffn_in.weight
    assert torch.equal(held, weights["bert.encoder.layer.0.intermediate.dense.weight"].half().float())
    assert held.dtype == torch.float32


@torch.no_grad()
def test_encoder_is_imported_for_any_objective(folders, tmp_path, capsys):
    """Its states are the folder's; the generator and all heads are reported as newly initialized."""
    assert run_import(folders / "bert", tmp_path / "model.pt", "--arch", "teams_tiny") == 0
    printed = capsys.readouterr().out
    assert "detection_head" in printed.partition("initialized randomly")[2]
    assert "cls.predictions.bias" in printed.partition("left out")[2]
    pretrained = load_checkpoint(tmp_path / "model.pt")
    rows = pretrained.tokens(TEXTS[0])[None]
    theirs = transformers.BertModel.from_pretrained(folders / "bert").eval()
    expected = theirs(row_map(pretrained.tokenizer)[rows]).last_hidden_state
    ours = pretrained.model.extract_features(rows)
    assert (ours - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_a_head_that_is_untied_or_absent(folders, tmp_path, capsys):
    """An untied output layer is refused, and its encoder alone is not; without a head the encoder becomes AMOS, or gets one."""
    weights = load_file(folders / "bert" / "model.safetensors")
    shutil.copytree(folders / "bert", tmp_path / "untied")
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"] + 1
    save_file(weights, tmp_path / "untied" / "model.safetensors", metadata={"format": "pt"})
    line = error_line(capsys, main, "import", tmp_path / "untied", tmp_path / "model.pt")
    assert "differs from bert.embeddings.word_embeddings.weight" in line
    assert "--arch amos_base" in line
    assert run_import(tmp_path / "untied", tmp_path / "model.pt", "--arch", "amos_tiny") == 0
    write_model(tmp_path / "bare", "bert", "BertModel")
    run_import(tmp_path / "bare", tmp_path / "a" / "a.pt", "--arch", "mlm_tiny")
    assert "initialized randomly: mlm_head" in capsys.readouterr().out
    run_import(tmp_path / "bare", tmp_path / "b" / "b.pt")
    assert read_state(tmp_path / "b" / "b.pt")["cfg"]["model"]["_name"] == "amos_base"
