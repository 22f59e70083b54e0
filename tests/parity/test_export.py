"""Every class that ``amos export`` writes, of every objective, loaded with the Auto classes and compared with our own code."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from failures import error_line
from fairseq.models import BaseFairseqModel
from hugging_face_folders import assert_close, export, outputs, padded_tokens, predicted_everywhere
from saved_models import write_run
from small_models import DEBERTA, DEBERTA_PAIR, MODERN
from torch import Tensor

import amos_fairseq
from amos_fairseq.checkpoints.read import LoadedCheckpoint, load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.downstream.model import TEXT_HEAD
from amos_fairseq.models.teams import TeamsModel


def exported(tmp_path: Path, settings: dict, *flags: str, check: bool = False) -> tuple[LoadedCheckpoint, Path, dict]:
    """The checkpoint of a run with ``settings``, the folder exported from it, and the folder's configuration."""
    pretrained = load_checkpoint(write_run(tmp_path / "run", **settings))
    export(tmp_path / "run", tmp_path / "out", *flags, check=check)
    return pretrained, tmp_path / "out", json.loads((tmp_path / "out" / "config.json").read_text())


ABSOLUTE = {"relative_position_scheme": "none"}
DEEP_MODERN = {"encoder_layers": 3, "global_attention_every": 2, "global_rope_theta": 900.0}
DEBERTA_150 = {"relative_position_buckets": 16, "relative_position_max_distance": 150}  # as many as positions
ENCODERS = {
    "t5": ({}, "MPNetModel"),
    "none": (ABSOLUTE, "BertModel"),
    "electra": ({"objective": "electra"}, "ElectraModel"),
    "teams, mws": ({"objective": "teams"}, "BertModel"),
    "teams, rtd": ({"objective": "teams", "representation": "rtd"}, "BertModel"),
    "teams, extra layer": (
        {"objective": "teams", "representation": "rtd", "task_heads": "extra_layer"},
        "BertModel",
    ),
    "modernbert": (MODERN | DEEP_MODERN, "ModernBertModel"),
    "amos on deberta": (DEBERTA | DEBERTA_150, "DebertaV2Model"),
    "debertas pair": (DEBERTA_PAIR | DEBERTA_150 | {"objective": "electra"}, "DebertaV2Model"),
    "electra on modernbert": (MODERN | {"objective": "electra"}, "ModernBertModel"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name, tmp_path):
    """That of TEAMS is the branch of the chosen task, as ``discriminate`` returns it."""
    settings, class_name = ENCODERS[name]
    pretrained, out, config = exported(tmp_path, settings)
    assert config["architectures"] == [class_name]
    assert config["vocab_size"] == len(pretrained.dictionary) == 62, "no padding rows"
    tokens = padded_tokens(pretrained)
    real = tokens.ne(1)
    theirs = outputs(out, "AutoModel", tokens)
    ours = pretrained.model.extract_features(tokens)
    if name.startswith("teams"):
        of_mws, of_rtd = pretrained.model.discriminate(tokens, ~real)
        ours = of_mws if "mws" in name else of_rtd
        assert (of_mws - of_rtd)[real].abs().max() > 0.1, "the branches differ"
    assert_close(ours[real], theirs.last_hidden_state[real])
    if "pooler_output" in theirs:
        assert torch.equal(theirs.pooler_output, theirs.last_hidden_state[:, 0].tanh()), "nothing random"


SEPARATE = {"separate_generators": True, "generator_depths": "1,2,2"}
# Settings, number of layers, class.
MASKED_LMS = {
    "amos": ({}, 4, "MPNetForMaskedLM"),
    "amos, separate generators": (SEPARATE, 2, "MPNetForMaskedLM"),
    "electra": ({}, 2, "ElectraForMaskedLM"),
    "mlm": ({}, 2, "BertForMaskedLM"),
    "mlm, modernbert": (MODERN, 2, "ModernBertForMaskedLM"),
    "mlm, narrow embeddings": ({"embedding_dim": 8}, 2, "ElectraForMaskedLM"),
}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", MASKED_LMS)
def test_masked_language_model(name, tmp_path):
    """Against ``predict_logits``, which ``amos report`` shows, at every position; the encoder of an MLM as well."""
    settings, num_layers, class_name = MASKED_LMS[name]
    objective = name.partition(",")[0]
    flags = [] if objective == "mlm" else ["--part", "generator"]
    pretrained, out, config = exported(tmp_path, {"objective": objective, **settings}, *flags, check=flags == [])
    assert (config["architectures"], config["num_hidden_layers"]) == ([class_name], num_layers)
    tokens = padded_tokens(pretrained)
    real = tokens.ne(1)
    ours = predicted_everywhere(pretrained.model, tokens)[-1, ..., : len(pretrained.dictionary)]
    assert_close(ours[real], outputs(out, "AutoModelForMaskedLM", tokens).logits[real])
    if objective == "mlm":
        states = outputs(out, "AutoModel", tokens).last_hidden_state
        assert_close(pretrained.model.extract_features(tokens)[real], states[real])


def detection(model: BaseFairseqModel, tokens: Tensor) -> Tensor:
    """Our sigmoid. TEAMS detects in its RTD branch, also where the other is fine-tuned."""
    is_teams = isinstance(model, TeamsModel)
    states = model.discriminate(tokens, tokens.eq(1))[1] if is_teams else model.extract_features(tokens)
    return model.detection_head(states).sigmoid()


def answers(model: BaseFairseqModel, tokens: Tensor) -> Tensor:
    """The logits of our span head in training, in which it masks tokens outside the answer text."""
    targets = torch.zeros(len(tokens), dtype=torch.int64)
    output = model(tokens, answer_mask=tokens.ne(1), span_targets=(targets, targets))
    return torch.stack([output.start_logits, output.end_logits], dim=-1)


def labels_of_words(model: BaseFairseqModel, tokens: Tensor) -> Tensor:
    return model(tokens, word_positions=torch.arange(tokens.size(1)).expand_as(tokens)).logits["upos_labels"]


def labels_of_texts(model: BaseFairseqModel, tokens: Tensor) -> Tensor:
    return model(tokens, classification_head_name=TEXT_HEAD)[0]


# What we compute, and from the output of which kind of class it is read.
OUTPUTS = {
    "PreTraining": (detection, lambda output: output.logits.sigmoid()),
    "Detection": (detection, lambda output: output.logits.softmax(-1)[..., 1]),
    "QuestionAnswering": (answers, lambda output: torch.stack([output.start_logits, output.end_logits], dim=-1)),
    "TokenClassification": (labels_of_words, lambda output: output.logits),
    "SequenceClassification": (labels_of_texts, lambda output: output.logits),
}
DETECTOR = {"id2label": {"0": "original", "1": "replaced"}}
# A pipeline for token classification would give the labels of a detector to a head of random weights.
NO_LABELS = {"id2label": None}
SPANS = {"span_head": "independent"}
WORDS, WORD_LABELS = {"labels": 3, "names": ["B-X", "I-X", "O"]}, {"label2id": {"B-X": 0, "I-X": 1, "O": 2}}
THREE, TWO = ({"classes": number, "names": ["no", "maybe", "yes"][:number]} for number in (3, 2))
NUMBER = {"classes": 1, "task": {"regression_target": True}}
CLASSES = {"problem_type": "single_label_classification"}
THREE_CLASSES = CLASSES | {"id2label": {"0": "no", "1": "maybe", "2": "yes"}}
# Settings, family and kind of the class, what its configuration says.
HEADS = {
    "amos": ({}, "MPNet", "Detection", DETECTOR),
    "electra": ({"objective": "electra"}, "Electra", "PreTraining", NO_LABELS),
    "teams": ({"objective": "teams"}, "Bert", "Detection", DETECTOR),
    "amos on modernbert": (MODERN, "ModernBert", "Detection", DETECTOR),
    "amos on deberta": (DEBERTA | DEBERTA_150, "DebertaV2", "Detection", DETECTOR),
    "spans, deberta": (DEBERTA | DEBERTA_150 | SPANS, "DebertaV2", "QuestionAnswering", {}),
    "words, deberta": (DEBERTA | DEBERTA_150 | WORDS, "DebertaV2", "TokenClassification", WORD_LABELS),
    "texts, deberta": (
        DEBERTA | DEBERTA_150 | THREE,
        "DebertaV2",
        "SequenceClassification",
        {"pooler_hidden_act": "tanh"},
    ),
    "texts, linear, deberta": (
        DEBERTA | DEBERTA_150 | THREE | {"pooler_activation_fn": "linear"},
        "DebertaV2",
        "SequenceClassification",
        {"pooler_hidden_act": "gelu"},
    ),
    "spans": (SPANS, "MPNet", "QuestionAnswering", {}),
    "spans, modernbert": (MODERN | SPANS, "ModernBert", "QuestionAnswering", {}),
    "words": (WORDS, "MPNet", "TokenClassification", WORD_LABELS),
    "words, modernbert": (MODERN | WORDS, "ModernBert", "TokenClassification", WORD_LABELS),
    "texts": (THREE, "MPNet", "SequenceClassification", THREE_CLASSES),
    "texts, gelu": (TWO | {"objective": "electra"}, "Electra", "SequenceClassification", CLASSES),
    "texts, linear": (THREE | {"pooler_activation_fn": "linear"}, "MPNet", "SequenceClassification", THREE_CLASSES),
    "texts, modernbert": (
        MODERN | THREE | {"pooling": "mean"},
        "ModernBert",
        "SequenceClassification",
        THREE_CLASSES | {"classifier_pooling": "mean"},
    ),
    **{
        f"mean, {name}": (settings | {"pooling": "mean"}, f"Mean{family}", "SequenceClassification", facts)
        for name, settings, family, facts in (
            ("mpnet", THREE, "MPNet", THREE_CLASSES | {"model_type": "mean_mpnet"}),
            ("number", NUMBER | ABSOLUTE, "Bert", {"problem_type": "regression", "model_type": "mean_bert"}),
            ("gelu", THREE | {"objective": "electra"}, "Electra", THREE_CLASSES | {"model_type": "mean_electra"}),
            ("linear", THREE | ABSOLUTE | {"pooler_activation_fn": "linear"}, "Bert", THREE_CLASSES),
            ("deberta", THREE | DEBERTA | DEBERTA_150, "DebertaV2", THREE_CLASSES),
            ("released positions", THREE | {"relative_position_scheme": "amos"}, "Amos", THREE_CLASSES),
        )
    },
    "number": (NUMBER, "MPNet", "SequenceClassification", {"problem_type": "regression", "id2label": {"0": "LABEL_0"}}),
}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_heads(name, tmp_path, capsys, modules_cache):
    """Of labels of words, and where the folder has code, the export's own comparison is on."""
    settings, family, kind, facts = HEADS[name]
    flags = ["--part", "discriminator"] if kind in ("PreTraining", "Detection") else []
    has_code = family.startswith("Mean")
    pretrained, out, config = exported(tmp_path, settings, *flags, check=has_code or "labels" in settings)
    auto_class = "TokenClassification" if kind == "Detection" else kind
    assert config["architectures"] == [f"{family}For{auto_class}"]
    assert {key: config.get(key) for key in facts} == facts
    tokens, (ours, theirs) = padded_tokens(pretrained), OUTPUTS[kind]
    name = f"AutoModelFor{auto_class}"
    expected, found = (
        ours(pretrained.model, tokens),
        theirs(outputs(out, name, tokens, trust_remote_code=has_code or None)),
    )
    real = tokens.ne(1) if kind != "SequenceClassification" else slice(None)
    assert_close(expected[real], found[real])
    if has_code:  # no loader may build another model silently
        assert f'{name}.from_pretrained("out", trust_remote_code=True)' in (out / "README.md").read_text("utf-8")
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            outputs(out, name, tokens, trust_remote_code=False)
        assert "is none that this package computes" in error_line(capsys, main, "import", out, tmp_path / "in.pt")


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("variant", ["electric", "electra_tt"])
def test_electric_and_electra_tt(variant, tmp_path):
    """Electric: -logits are its token_log_probs. ELECTRA-TT: the probability of noise, as ELECTRA's of "replaced"."""
    settings = {"objective": "electric", "electric_variant": variant}
    pretrained, out, config = exported(tmp_path, settings, "--part", "discriminator", check=True)
    assert config["architectures"] == ["ElectraForPreTraining"]
    model, tokens = pretrained.model, padded_tokens(pretrained)
    scored = tokens.ne(1) & ~model.never_sampled_mask[tokens]
    logits = outputs(out, "AutoModelForPreTraining", tokens).logits
    if variant == "electric":
        assert_close(model.token_log_probs(tokens)[scored], -logits[scored])
    else:
        assert_close(model.detection_head(model.extract_features(tokens))[scored], logits[scored])
    card = (out / "README.md").read_text(encoding="utf-8")
    # The class of a pipeline would have a random classifier.
    assert "replaced" not in config.get("id2label", {}).values()
    assert 'pipeline("token-classification")` must not be used' in card
    assert ("-energy is the log-probability" in card) == (variant == "electric")


@torch.no_grad()
def test_states_of_each_layer_are_those_of_hugging_face(tmp_path):
    """``load(..., layer=k)`` is item k of ``hidden_states``, from the input of the first layer on."""
    pretrained, out, _ = exported(tmp_path, {})
    text = "the quick brown fox jumps"
    tokens = pretrained.tokens(text)[None]
    theirs = outputs(out, "AutoModel", tokens, output_hidden_states=True).hidden_states
    assert len(theirs) == 3
    for layer, expected in enumerate(theirs):
        assert_close(amos_fairseq.load(tmp_path / "run", layer=layer)(text).states, expected)


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
