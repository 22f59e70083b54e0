"""A small WordPiece tokenizer, as Hugging Face's library writes it."""

from pathlib import Path
from typing import List

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers


def train_wordpiece(directory: Path, lines: List[str]) -> tokenizers.Tokenizer:
    """Train on ``lines`` and save ``directory/tokenizer.json``."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        lines, trainers.WordPieceTrainer(vocab_size=150, special_tokens=special, show_progress=False)
    )
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer
