"""``amos_fairseq.load`` on imported checkpoints against transformers: texts in, pairs too, in batches, to pooled vectors.

Tolerance: both compute in float32 with the same formulas in another order; 1e-5 of the largest value is some fifty
roundings.
"""

import pytest
import torch
import transformers
from hugging_face_folders import POSITIONS, SPECIAL_TOKENS, write_model
from tokenizers.processors import TemplateProcessing

import amos_fairseq
from amos_fairseq.cli.main import main

FAMILIES = {"bert": ("BertForPreTraining", "BertModel"), "mpnet": ("MPNetForMaskedLM", "MPNetModel")}
SINGLES = ["fox", "the quick brown fox, 14 lazy dogs!", "it jumps", "lazy", "it jumps over the dogs"]
PAIRS = [("fox", "it jumps"), ("the lazy dogs", "fox"), ("number 7", "doesn't it jump? " * 9), ("it", "it")]


def paired_tokenizer(folder, family: str) -> transformers.PreTrainedTokenizerFast:
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
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("texts", [SINGLES, PAIRS], ids=["singles", "pairs"])
def test_features_equal_those_of_transformers(family, texts, tmp_path):
    """The longest pair is cut to 40 positions on both sides: ``longest_first``."""
    pretraining_class, encoder_class = FAMILIES[family]
    write_model(tmp_path / "folder", family, pretraining_class)
    main(["import", str(tmp_path / "folder"), str(tmp_path / "model.pt"), "--arch", "amos_tiny"])
    theirs = getattr(transformers, encoder_class).from_pretrained(tmp_path / "folder").eval()
    tokenizer = paired_tokenizer(tmp_path / "folder", family)
    batch = tokenizer(
        texts, return_tensors="pt", padding=True, truncation=True, max_length=POSITIONS,
        return_token_type_ids=family == "bert",
    )  # fmt: skip
    assert (batch["input_ids"].size(1) == POSITIONS) == (texts is PAIRS)
    expected = theirs(**batch).last_hidden_state
    features = amos_fairseq.load(tmp_path / "model.pt", batch_size=2)(texts, truncate=True)
    mask = batch["attention_mask"].bool()
    assert torch.equal(features.mask, mask)
    tolerance = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(features.states[mask], expected[mask], atol=tolerance, rtol=0)
    mean = (expected * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(features.pooled(), mean, atol=tolerance, rtol=0)
