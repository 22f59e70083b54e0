"""Folders of Hugging Face: tiny models of every family as the libraries write them, and folders of ``amos export``.

Tolerance of comparisons: float32 on both sides, the same formulas in another order; 1e-5 of the largest output is about
fifty roundings.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizer_text import learn
from torch import Tensor, nn

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.cli.main import main
from amos_fairseq.models.pretraining import PretrainingBatch, PretrainingModel

LINES = [f"the quick brown fox number {i} jumps over {i * 7} lazy dogs, doesn't it?" for i in range(40)]
# In the order of the ids in the families' own vocabularies.
_BRACKETS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_ANGLES = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
SPECIAL_TOKENS = dict.fromkeys(("bert", "distilbert", "electra", "modernbert"), _BRACKETS)
SPECIAL_TOKENS |= dict.fromkeys(("mpnet", "roberta", "xlm-roberta"), _ANGLES)
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
POSITIONS = 40
TOLERANCE = 1e-5
LONGEST = 150  # tokens of the longest row in padded_tokens


def write_tokenizer(folder: Path, family: str) -> tokenizers.Tokenizer:
    """WordPiece of some 120 pieces, byte-level BPE for RoBERTa, unigrams for XLM-R: ``tokenizer.json`` and the names of its
    special tokens."""
    special = SPECIAL_TOKENS[family]
    kind = {"roberta": "bytes", "xlm-roberta": "unigram of words"}.get(family, "wordpiece")
    tokenizer = learn(kind, [*special.values()], 400 if family == "roberta" else 120, LINES)
    names = {f"{role}_token": token for role, token in special.items()}
    folder.mkdir(parents=True)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return tokenizer


def train_wordpiece(folder: Path, lines: list[str]) -> tokenizers.Tokenizer:
    """WordPiece of BERT's kind, trained on ``lines``: a bare ``folder/tokenizer.json``."""
    tokenizer = learn("wordpiece", [*_BRACKETS.values()], 150, lines)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def randomized(model: nn.Module) -> nn.Module:
    """Random values everywhere, biases and LayerNorms too; large ones, so that attention is far from uniform."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm_weight = re.search(r"(LayerNorm|norm)\.weight$", name) is not None
            parameter.copy_(torch.randn_like(parameter) * 0.3 + is_norm_weight)
    return model.eval()


def write_model(folder: Path, family: str, class_name: str, padded_rows: int = 3, **settings: Any) -> nn.Module:
    """A folder with tokenizer, configuration and weights; the vocabulary is rounded up by ``padded_rows``."""
    tokenizer = write_tokenizer(folder, family)
    offset = 2 if SPECIAL_TOKENS[family] is _ANGLES else 0
    sizes = SIZES | settings
    if family == "distilbert":
        sizes["hidden_dim"] = sizes.pop("intermediate_size")
    if family in ("roberta", "xlm-roberta"):
        sizes = {"type_vocab_size": 1} | sizes  # as the released models have it
    if family == "modernbert":  # most pairs are outside of the window
        sizes = {"local_attention": 8} | sizes
    config = getattr(transformers, class_name).config_class(
        vocab_size=tokenizer.get_vocab_size() + padded_rows,
        max_position_embeddings=POSITIONS + offset,
        pad_token_id=tokenizer.token_to_id(SPECIAL_TOKENS[family]["pad"]),
        **sizes,
    )
    model = randomized(getattr(transformers, class_name)(config))
    model.save_pretrained(folder)
    return model


def write_electra(folder: Path) -> tuple[nn.Module, nn.Module]:
    """``folder/discriminator`` and ``folder/generator``, half as wide, with the same embeddings."""
    half = {name: SIZES[name] // 2 for name in ("hidden_size", "num_attention_heads", "intermediate_size")}
    discriminator = write_model(folder / "discriminator", "electra", "ElectraForPreTraining", embedding_size=8)
    generator = write_model(folder / "generator", "electra", "ElectraForMaskedLM", embedding_size=8, **half)
    generator.electra.embeddings.load_state_dict(discriminator.electra.embeddings.state_dict())
    generator.save_pretrained(folder / "generator")
    # Pieces that are equally frequent get their ids in another order each time that they are learned.
    shutil.copy(folder / "discriminator" / "tokenizer.json", folder / "generator")
    return discriminator, generator


def export(run: Path, out: Path, *flags: str, check: bool = False) -> None:
    """Run ``amos export``; without its own comparison unless asked for, because tests compare independently."""
    assert main(["export", str(run), str(out), *flags, *([] if check else ["--no-check"])]) == 0


def padded_tokens(pretrained: LoadedCheckpoint) -> Tensor:
    """Random tokens in our ids, right-padded, of lengths 1 to the maximum."""
    lengths = (1, 2, 3, 7, 40, 127, 128, 129, LONGEST - 1, LONGEST)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.full((len(lengths), LONGEST), pretrained.dictionary.pad())
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(3, len(pretrained.dictionary), (length,), generator=generator)
    return tokens


def predicted_everywhere(model: PretrainingModel, tokens: Tensor) -> Tensor:
    """Logits [K,B,T,V] of every depth at every position."""
    everywhere = torch.arange(tokens.size(1)).expand_as(tokens)
    return model.predict_logits(PretrainingBatch(tokens, tokens, everywhere, torch.ones(tokens.shape)))[0]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert ours.abs().max() > 0.1, "the outputs are not all near 0"
    assert (ours - theirs).abs().max() < TOLERANCE * ours.abs().max()


@torch.no_grad()
def outputs(folder: Path, auto_class: str, tokens: Tensor, **settings) -> transformers.utils.ModelOutput:
    model = getattr(transformers, auto_class).from_pretrained(folder, **settings).eval()
    return model(input_ids=tokens, attention_mask=tokens.ne(1).long())
