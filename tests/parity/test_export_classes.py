"""Every class that ``amos export`` writes, loaded with the Auto classes, against our own code."""

import json

import pytest
import torch
import transformers
from exported_folders import LONGEST, assert_close, export, outputs, padded_tokens
from hugging_face_folders import write_tokenizer
from safetensors.torch import load_file
from saved_models import write_run
from torch.nn.functional import linear

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.tokenization import load_tokenizer


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


ENCODERS = {
    "t5": ({"objective": "amos"}, [], "MPNetModel"),
    "none": ({"objective": "amos", "relative_position_scheme": "none"}, [], "BertModel"),
    "as electra": ({"objective": "amos", "relative_position_scheme": "none"}, ["--as", "electra"], "ElectraModel"),
    "as roberta": ({"objective": "amos", "relative_position_scheme": "none"}, ["--as", "roberta"], "RobertaModel"),
    "electra": ({"objective": "electra"}, [], "ElectraModel"),
    "wide electra": ({"objective": "electra", "embedding_dim": 0}, ["--as", "bert"], "BertModel"),
    "token types": ({"objective": "electra", "token_types": 2}, [], "ElectraModel"),
    "other epsilon": ({"objective": "amos", "layer_norm_eps": 0.05}, [], "MPNetModel"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name, tmp_path):
    settings, flags, class_name = ENCODERS[name]
    pretrained = load_checkpoint(write_run(tmp_path / "run", **settings))
    export(tmp_path / "run", tmp_path / "out", *flags)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [class_name]
    assert config["vocab_size"] == len(pretrained.dictionary) == 62, "no padding rows"
    tokens = padded_tokens(pretrained)
    real = tokens.ne(1)
    theirs = outputs(tmp_path / "out", "AutoModel", tokens)
    assert_close(pretrained.model.extract_features(tokens)[real], theirs.last_hidden_state[real])
    if "pooler_output" in theirs:
        assert torch.equal(theirs.pooler_output, theirs.last_hidden_state[:, 0].tanh()), "nothing random"


@torch.no_grad()
@pytest.mark.parametrize(
    ("settings", "depth", "num_layers", "class_name"),
    [
        ({"objective": "amos"}, None, 4, "MPNetForMaskedLM"),
        ({"objective": "amos"}, "1", 1, "MPNetForMaskedLM"),
        ({"objective": "amos"}, "2", 2, "MPNetForMaskedLM"),
        ({"objective": "amos", "separate_generators": True, "generator_depths": "1,2,2"}, "2_3", 2, "MPNetForMaskedLM"),
        ({"objective": "amos", "relative_position_scheme": "none"}, "2", 2, "BertForMaskedLM"),
        ({"objective": "electra"}, None, 2, "ElectraForMaskedLM"),
    ],
)
def test_generator_at_each_depth(settings, depth, num_layers, class_name, tmp_path):
    """Against ``predict_logits``, which ``amos inspect`` shows: all logits, without padding rows of the vocabulary."""
    pretrained = load_checkpoint(write_run(tmp_path / "run", **settings))
    export(tmp_path / "run", tmp_path / "out", "--part", "generator", *(["--depth", depth] if depth else []))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"]) == ([class_name], num_layers)
    tokens = padded_tokens(pretrained)
    model, real = pretrained.model, tokens.ne(1)
    everywhere = torch.arange(LONGEST).expand_as(tokens)
    if settings["objective"] == "electra":
        hidden = model.generate(tokens, everywhere, ~real)
        ours = linear(hidden, model.embed_tokens.weight, model.mlm_head.bias)
    else:
        index = model.depth_names.index(depth or "4")
        ours = model.predict_logits(tokens, tokens, everywhere, real.float())[0][index]
    theirs = outputs(tmp_path / "out", "AutoModelForMaskedLM", tokens).logits
    assert_close(ours[real][:, : len(pretrained.dictionary)], theirs[real])


@torch.no_grad()
@pytest.mark.parametrize(
    ("settings", "auto_class", "class_name"),
    [
        ({"objective": "amos"}, "AutoModelForTokenClassification", "MPNetForTokenClassification"),
        ({"objective": "electra"}, "AutoModelForPreTraining", "ElectraForPreTraining"),
    ],
)
def test_discriminator(settings, auto_class, class_name, tmp_path):
    """The probability of "replaced" is our sigmoid."""
    pretrained = load_checkpoint(write_run(tmp_path / "run", **settings))
    export(tmp_path / "run", tmp_path / "out", "--part", "discriminator")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [class_name]
    assert config["id2label"] == {"0": "original", "1": "replaced"}
    tokens = padded_tokens(pretrained)
    real = tokens.ne(1)
    model = pretrained.model
    ours = model.detection_head(model.extract_features(tokens)).sigmoid()
    logits = outputs(tmp_path / "out", auto_class, tokens).logits
    theirs = logits.softmax(-1)[..., 1] if class_name.startswith("MPNet") else logits.sigmoid()
    assert_close(ours[real], theirs[real])


CLASSIFIERS = {
    "tanh": ({"objective": "amos", "classes": 3}, "MPNetForSequenceClassification"),
    "gelu": ({"objective": "electra", "classes": 2}, "ElectraForSequenceClassification"),
    "absolute": (
        {"objective": "amos", "classes": 3, "relative_position_scheme": "none"}, "BertForSequenceClassification"
    ),
    "regression": ({"objective": "amos", "classes": 1, "task": {"regression_target": True}}, "MPNetForSequenceClassification"),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifier(name, tmp_path):
    settings, class_name = CLASSIFIERS[name]
    pretrained = load_checkpoint(write_run(tmp_path / "run", **settings))
    names = ["no", "maybe", "yes"][: settings["classes"]]
    export(tmp_path / "run", tmp_path / "out", "--labels", ",".join(names))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [class_name]
    assert config["problem_type"] == ("regression" if name == "regression" else "single_label_classification")
    assert list(config["id2label"].values()) == names
    tokens = padded_tokens(pretrained)
    ours = pretrained.model(tokens, classification_head_name="sentence_classification_head")[0]
    assert_close(ours, outputs(tmp_path / "out", "AutoModelForSequenceClassification", tokens).logits)


@torch.no_grad()
def test_question_answering(tmp_path):
    """Against the logits of our span head in training, in which it masks tokens outside the answer text."""
    pretrained = load_checkpoint(write_run(tmp_path / "run", span_head="independent"))
    export(tmp_path / "run", tmp_path / "out")
    tokens = padded_tokens(pretrained)
    real = tokens.ne(1)
    targets = torch.zeros(len(tokens), dtype=torch.int64)
    ours = pretrained.model(tokens, answer_mask=real, span_targets=(targets, targets))
    theirs = outputs(tmp_path / "out", "AutoModelForQuestionAnswering", tokens)
    assert_close(ours.start_logits[real], theirs.start_logits[real])
    assert_close(ours.end_logits[real], theirs.end_logits[real])


@torch.no_grad()
def test_token_types_of_a_pair(tmp_path):
    """From two texts on both sides: our model derives the types from ``</s>``, theirs gets them from the tokenizer."""
    run = write_run(tmp_path / "run", "electra", classes=2, token_types=2)
    export(run, tmp_path / "out")
    pretrained = load_checkpoint(run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    inputs = tokenizer("the quick fox", "a lazy dog", return_tensors="pt")
    assert inputs["token_type_ids"].unique().tolist() == [0, 1]
    ours = pretrained.model(inputs["input_ids"], classification_head_name="sentence_classification_head")[0]
    assert_close(ours, model(**inputs).logits)
    without = model(**(inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])})).logits
    assert (without - ours).abs().max() > 1e-3, "types matter"


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["t5", "none"])
def test_ids_of_a_hugging_face_tokenizer(scheme, tmp_path):
    """[PAD] at 0 and [UNK] at 1: BERT keeps them; for MPNet, which needs padding at 1, they are exchanged."""
    write_tokenizer(tmp_path / "bert", "bert")
    run = write_run(tmp_path / "run", tokenizer=load_tokenizer(tmp_path / "bert"), relative_position_scheme=scheme)
    export(run, tmp_path / "out", check=True)
    pretrained = load_checkpoint(run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    original = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert")
    text = "the quick \u4e2d fox"
    exchanged = {0: 1, 1: 0} if scheme == "t5" else {}
    assert tokenizer(text)["input_ids"][1:-1] == [exchanged.get(index, index) for index in original(text)["input_ids"]]
    assert tokenizer.pad_token_id == (1 if scheme == "t5" else 0)
    rows = pretrained.tokens(text)[None]
    model = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
    theirs = model(
        **tokenizer([text, "the quick brown fox jumps"], padding=True, return_tensors="pt")
    ).last_hidden_state
    assert_close(pretrained.model.extract_features(rows)[0], theirs[0, : rows.size(1)])


def test_weights_are_float32_and_readable_by_all(tmp_path):
    export(write_run(tmp_path / "run"), tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    modes = {(tmp_path / "out" / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1
