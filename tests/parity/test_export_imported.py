"""Export of imported models: Hugging Face's models bit for bit, the released AMOS positions and tokenizer with their code."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
import transformers
from hugging_face_folders import TOLERANCE, predicted_everywhere, write_electra, write_model
from safetensors.torch import load_file
from saved_models import write_run
from tokenizer_text import SPLIT_LINES, train_bpe

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.text.tokenization.microsoft_tokenizer import MicrosoftAmosTokenizer

pytestmark = pytest.mark.usefixtures("modules_cache")
TEXT = "the quick brown fox, 14 lazy dogs!"
# Quotation marks, and punctuation that the released tokenizer splits off.
RELEASED_TEXTS = ["The fox isn't (too) lazy, it\u2019s quick \u2014 the dog\u2026", "``the'' dog & 7!", "", "\u4e2d 7"]
FAMILIES = {
    "electra": ("ElectraForPreTraining", ["--part", "discriminator"], "AutoModelForPreTraining"),
    "mpnet mlm": ("MPNetForMaskedLM", [], "AutoModel"),
    "modernbert mlm": ("ModernBertForMaskedLM", [], "AutoModel"),
}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_is_the_identity(name, tmp_path):
    """Folder, our checkpoint, folder: equal weights, ids and outputs, except rows of the vocabulary without a token."""
    family, (class_name, flags, auto_class) = name.split()[0], FAMILIES[name]
    if family == "electra":
        write_electra(tmp_path)
        (tmp_path / "discriminator").rename(tmp_path / "before")
    else:
        write_model(tmp_path / "before", family, class_name)
    arch = "electra_tiny" if family == "electra" else "mlm_tiny" if name.endswith("mlm") else "amos_tiny"
    main(["import", str(tmp_path / "before"), str(tmp_path / "ours.pt"), "--arch", arch])
    main(["export", str(tmp_path / "ours.pt"), str(tmp_path / "after"), *flags])
    assert json.loads((tmp_path / "after" / "config.json").read_text())["architectures"] == [class_name]
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("before", "after"))
    num_tokens = json.loads((tmp_path / "after" / "config.json").read_text())["vocab_size"]
    if family != "bert":  # in which a classification head starts from the pooler
        before, after = ({k: v for k, v in weights.items() if "pooler" not in k} for weights in (before, after))
    assert before.keys() == after.keys()
    for key, tensor in after.items():
        original = before[key]
        if re.search("(word|tok)_embeddings", key) or key in ("lm_head.bias", "cls.predictions.bias", "decoder.bias"):
            assert len(original) == num_tokens + 3
            original, tensor = original[:num_tokens], tensor[:num_tokens]
        if "position_embeddings" in key and family in ("mpnet", "roberta"):
            original, tensor = original[2:], tensor[2:]  # the first two belong to no position
        assert torch.equal(original, tensor), key
    tokenizers = [transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("before", "after")]
    models = [getattr(transformers, auto_class).from_pretrained(tmp_path / name).eval() for name in ("before", "after")]
    content = tokenizers[0](TEXT, add_special_tokens=False)["input_ids"]
    inputs = tokenizers[1](TEXT, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == [tokenizers[0].cls_token_id, *content, tokenizers[0].sep_token_id]
    assert torch.equal(*(model(**inputs)[0] for model in models))


@torch.no_grad()
def test_a_pair_in_a_roberta_that_is_exported_as_bert(tmp_path):
    """RoBERTa has one token type; BERT's tokenizer gives the second text another one."""
    write_model(tmp_path / "before", "roberta", "RobertaModel")
    main(["import", str(tmp_path / "before"), str(tmp_path / "ours.pt"), "--arch", "mlm_tiny"])
    main(["export", str(tmp_path / "ours.pt"), str(tmp_path / "after"), "--part", "encoder"])
    (theirs, before), (ours, after) = (
        (transformers.AutoModel.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder))
        for folder in (tmp_path / "before", tmp_path / "after")
    )
    inputs = after("the quick", "fox", return_tensors="pt")
    assert inputs["token_type_ids"].max() == 1
    special = {after.cls_token_id: before.cls_token_id, after.sep_token_id: before.sep_token_id}
    tokens = inputs["input_ids"][0].tolist()
    ids = [special.get(i, before.convert_tokens_to_ids(after.convert_ids_to_tokens(i))) for i in tokens]
    expected = theirs(torch.tensor([ids])).last_hidden_state
    # float32 sums in another order, of values up to 3
    torch.testing.assert_close(ours(**inputs).last_hidden_state, expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    """A run with the released positions and tokenizer, and its three folders."""
    root = tmp_path_factory.mktemp("released")
    model = train_bpe(SPLIT_LINES, 90)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(i) for i in range(len(processor) - 1, 0, -1)]  # not in the order of the model
    tokenizer = MicrosoftAmosTokenizer(model, pieces)
    write_run(root / "run", tokenizer=tokenizer, relative_position_scheme="amos", relative_position_buckets=64)
    for part in ("encoder", "generator", "discriminator"):
        assert main(["export", str(root / "run"), str(root / part), "--part", part]) == 0
    return root


@pytest.mark.slow
def test_released_tokenizer_with_two_separators(released, tmp_path):
    """Ids of single texts, pairs and truncated pairs are compared by the export itself."""
    pretrained = load_checkpoint(released / "run")
    settings = {"relative_position_scheme": "amos", "relative_position_buckets": 64}
    settings |= {"tokenizer": pretrained.tokenizer, "task": {"separator_token": 2}}
    run = write_run(tmp_path / "run", classes=2, **settings)
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    pair = tokenizer("the fox", "a dog", return_special_tokens_mask=True)
    assert pair["input_ids"].count(2) == 3
    assert pair["special_tokens_mask"] == [int(index in (0, 2)) for index in pair["input_ids"]]


ELSEWHERE = """
import json, sys
sys.modules["amos_fairseq"] = None  # importing it fails from here on
import torch, transformers
folder, auto_class, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True).eval()
inputs = tokenizer(texts, padding=True, return_tensors="pt")
with torch.no_grad():
    states = model(**inputs)[0]
mask = inputs["attention_mask"].bool()
rows = zip(inputs["input_ids"], states, mask)
print(json.dumps({"type": type(model).__name__, "rows": [(ids[m].tolist(), s[m].tolist()) for ids, s, m in rows]}))
"""


@pytest.mark.slow
@torch.no_grad()
def test_released_positions_and_tokenizer_without_this_package(released, tmp_path):
    """Against our own code, in a process that cannot import this package."""
    command = [sys.executable, "-c", ELSEWHERE, released / "encoder", "AutoModel", json.dumps(RELEASED_TEXTS)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert found["type"] == "AmosModel"
    pretrained = load_checkpoint(released / "run")
    dictionary = pretrained.dictionary
    for text, (ids, states) in zip(RELEASED_TEXTS, found["rows"], strict=True):
        rows = [dictionary.index(piece) for piece in pretrained.tokenizer.encode(text)]
        tokens = [dictionary.bos(), *rows, dictionary.eos()]
        assert ids == tokens
        ours = pretrained.model.extract_features(torch.tensor([tokens]))[0]
        assert (ours - torch.tensor(states)).abs().max() < TOLERANCE * ours.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("part", ["generator", "discriminator"])
def test_heads_on_released_positions(released, part):
    """Beyond the maximum distance, with padding."""
    pretrained = load_checkpoint(released / "run")
    auto = getattr(transformers, f"AutoModelFor{'MaskedLM' if part == 'generator' else 'TokenClassification'}")
    theirs = auto.from_pretrained(released / part, trust_remote_code=True).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, len(pretrained.dictionary), (2, 150), generator=generator)
    tokens[1, 60:] = 1
    real, model = tokens.ne(1), pretrained.model
    logits = theirs(input_ids=tokens, attention_mask=real.long()).logits[real]
    if part == "discriminator":
        ours, logits = model.detection_head(model.extract_features(tokens))[real], logits[:, 1] - logits[:, 0]
    else:
        ours = predicted_everywhere(model, tokens)[-1][real][:, : len(pretrained.dictionary)]
    assert (ours - logits).abs().max() < TOLERANCE * ours.abs().max()
