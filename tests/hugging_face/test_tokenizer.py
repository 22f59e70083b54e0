"""The tokenizer of an exported folder against the input of our models: our tokenizer, then fairseq's own dictionary."""

from pathlib import Path
from typing import Any

import pytest
from fairseq.data import Dictionary
from hugging_face_folders import LINES, write_tokenizer
from saved_models import small_tokenizer
from tokenizer_text import ALPHABETS, HOSTILE, random_texts
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.exported import exported_tokenizer, with_padding_at_1
from amos_fairseq.text.tokenization.fast_tokenizer import row_map


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_imported_tokenizers_keep_their_ids(family, tmp_path):
    """WordPiece and byte-level BPE keep their ids, which are also our models' input."""
    write_tokenizer(tmp_path / family, family)
    tokenizer = load_tokenizer(tmp_path / family)
    exported, ids = exported_tokenizer(tokenizer), row_map(tokenizer)
    exported.encode_special_tokens = True  # as on our side, spelled symbols are text
    dictionary = Dictionary()
    for symbol in [*tokenizer.dictionary_symbols, "<mask>"]:
        dictionary.add_symbol(symbol)
    texts = [text for alphabet in ALPHABETS.values() for text in random_texts(alphabet, 100)]
    for text, encoding in zip(texts, exported.encode_batch(texts), strict=True):
        rows = [dictionary.index(piece) for piece in tokenizer.encode(text)]
        assert encoding.ids == ids[[dictionary.bos(), *rows, dictionary.eos()]].tolist(), ascii(text)
    library = Library.from_file(str(tmp_path / family / "tokenizer.json"))
    text = "the quick brown fox"
    assert exported.encode(text).ids[1:-1] == library.encode(text, add_special_tokens=False).ids


SETTINGS = {"special_tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], "show_progress": False}


def unigram_folder(folder: Path) -> None:
    """A model whose vocabulary is a list, in which the position is the id."""
    trainer = trainers.UnigramTrainer(vocab_size=90, unk_token="[UNK]", **SETTINGS)
    save_learned(folder, models.Unigram(), pre_tokenizers.Metaspace(), trainer)


def byte_level_folder(folder: Path) -> None:
    """A tokenizer that is exported with two post-processors."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizer.alphabet(), **SETTINGS)
    save_learned(folder, models.BPE(), pre_tokenizer, trainer)


def save_learned(folder: Path, model: Any, pre_tokenizer: Any, trainer: Any) -> None:
    library = Library(model)
    library.pre_tokenizer = pre_tokenizer
    library.train_from_iterator(LINES, trainer)
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("write", [lambda folder: write_tokenizer(folder, "bert"), unigram_folder, byte_level_folder])
def test_padding_moves_to_id_1_and_nothing_else_changes(write, tmp_path):
    write(tmp_path / "folder")
    tokenizer = load_tokenizer(tmp_path / "folder")
    before, ids = exported_tokenizer(tokenizer), row_map(tokenizer)
    after, moved = with_padding_at_1(before, "[PAD]", ids)
    assert (before.token_to_id("[PAD]"), after.token_to_id("[PAD]")) == (0, 1)
    exchanged = {0: 1, 1: 0}
    assert moved.tolist() == [exchanged.get(index, index) for index in ids.tolist()]
    for text in [*HOSTILE, "the \u4e2d fox"]:
        found = before.encode(text, "dogs").ids
        assert after.encode(text, "dogs").ids == [exchanged.get(index, index) for index in found]
    assert with_padding_at_1(after, "[PAD]", moved)[0] is after


def test_a_no_break_space_is_no_beginning_of_a_word_for_the_pipeline_and_a_plain_one_is():
    """transformers' pipeline for tokens looks for a plain space in the two characters at the start of a piece."""
    exported = exported_tokenizer(small_tokenizer())
    text = "a \xa0fox"
    given, replaced = (exported.encode(each, add_special_tokens=False) for each in (text, text.replace("\xa0", " ")))
    assert given.ids == replaced.ids
    assert given.offsets == replaced.offsets
    begins = next(start for start, end in given.offsets if text[start:end].startswith("f"))
    assert " " not in text[begins - 1 : begins + 1]
    assert " " in text.replace("\xa0", " ")[begins - 1 : begins + 1]
