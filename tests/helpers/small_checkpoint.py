"""A run small enough to write in a test: tokenizer, dictionary and an untrained AMOS model in one checkpoint."""

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sentencepiece
import torch
from fairseq.data import Dictionary

from amos_fairseq.data.fingerprint import directory_sha256, file_sha256
from amos_fairseq.models.amos import AmosConfig, AmosModel
from amos_fairseq.tokenization.conversion import from_sentencepiece, sentencepiece_rules
from amos_fairseq.tokenization.fast_tokenizer import FastTokenizer

TEXT = "the quick brown fox jumps over the lazy dog & <script>alert(1)</script>\nthe end"
CORPUS = [TEXT, "a lazy fox and a quick dog", "jumps over the end of the brown dog"]


def small_tokenizer() -> FastTokenizer:
    """57 pieces learned from three lines: with special symbols, two rows fewer than the embedding's 64."""
    model, normalizer = io.BytesIO(), sentencepiece_rules(cased=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=map(normalizer.normalize_str, CORPUS), model_writer=model, model_type="bpe", vocab_size=58,
        normalization_rule_name="identity", bos_id=-1, eos_id=-1, pad_id=-1, minloglevel=2,
    )  # fmt: skip
    return from_sentencepiece(model.getvalue(), normalizer)


def write_checkpoint(
    directory: Path, tokenizer: FastTokenizer, name: str = "checkpoint_last.pt", **changes: Any
) -> None:
    """What fairseq-train saves, as far as a reader looks; ``changes`` replace or add parts of the file."""
    settings = AmosConfig(
        encoder_layers=2, encoder_embed_dim=16, encoder_ffn_embed_dim=24, encoder_attention_heads=2,
        max_positions=80, generator_depths="1,2,4", init_std=0.3, linear_init_std=0.3, max_update=30,
    )  # fmt: skip
    dictionary = Dictionary()
    for symbol in [*tokenizer.dictionary_symbols, "<mask>"]:
        dictionary.add_symbol(symbol)
    torch.manual_seed(0)
    model = AmosModel.build_model(settings, SimpleNamespace(source_dictionary=dictionary, masked_share=0.15))
    state = {
        "args": None,
        "cfg": {"model": dataclasses.asdict(settings) | {"_name": "amos"}, "task": {"mask_prob": 0.15}},
        "model": model.state_dict(),
        "optimizer_history": [{"num_updates": 7}],
        "task_state": {
            "tokenizer_sha256": directory_sha256(directory / "tokenizer"),
            "dictionary_sha256": file_sha256(directory / "tokenizer" / "dict.txt"),
        },
    }
    torch.save(state | changes, directory / name)


def write_save_dir(directory: Path) -> FastTokenizer:
    """A SAVE_DIR as a run leaves it: an untrained model of three depths and its tokenizer, which is returned."""
    tokenizer = small_tokenizer()
    tokenizer.save(directory / "tokenizer")
    write_checkpoint(directory, tokenizer)
    return tokenizer
