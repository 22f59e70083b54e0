"""``amos prepare tagging``: convert labeled sentences, and unlabeled ones, to the input of the task ``sequence_tagging``.

Read the files -> encode, find the pieces of each word, write to a temporary directory -> rename.
"""

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from amos_fairseq.downstream.tagging.scores import mark_spans, to_bioes
from amos_fairseq.downstream.tagging.word_files import (
    COLUMN_NAME,
    CONLLU,
    CONLLU_NAMES,
    LONGEST_COLUMN_NAME,
    UNLABELED,
    Sentence,
    read_columns,
    read_conllu,
    read_words,
)
from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text, whole_folder
from amos_fairseq.fingerprint import files_sha256
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.text.encoding import BinarizedFile
from amos_fairseq.text.prepared_data import check_inputs, describe_source, is_finished, prepared_data, save_tokenizer
from amos_fairseq.text.text_files import kind_and_compression
from amos_fairseq.text.tokenization import Tokenizer, load_tokenizer
from amos_fairseq.text.tokenization.tokenizer import UNK
from amos_fairseq.text.tokenization.words import encode_words

DEFAULT_CONLLU_COLUMN = "upos"
REST = "rest"  # value of --unlabeled: what --labeled leaves
FILE, BIOES = "file", "bioes"  # values of --encoding


@dataclass(frozen=True)
class Choices:
    """What the options of ``amos tag``, ``amos parse`` and ``amos prepare tagging`` choose from the files."""

    column: str | None = None  # name of the labels; by default upos of CoNLL-U, or the last one
    columns: Sequence[str] | None = None  # names of the columns after the word
    encoding: str = FILE  # of spans: as in the file, or BIOES (thesis, section 4.3.1)
    labeled: int | None = None  # number of training sentences; None for all
    unlabeled: str | None = None  # a file of sentences without labels, REST, or None for none

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Choices":
        """Return the values of options; those that a command lacks have their default."""
        return cls(**{name: value for name, value in vars(arguments).items() if name in cls.__dataclass_fields__})

    def sources(self, train: Path, dev: Path) -> dict[str, Path]:
        if self.unlabeled == REST and self.labeled is None:
            raise UserError("--unlabeled rest is what --labeled N leaves of the training sentences: give --labeled too")
        sources = {"train": train, "valid": dev}
        return sources if self.unlabeled in (None, REST) else sources | {UNLABELED: Path(self.unlabeled)}

    def as_dict(self) -> dict[str, Any]:
        """Return the values as they are saved, without the name of a file."""
        return asdict(self) | {"unlabeled": self.unlabeled and (REST if self.unlabeled == REST else "file")}


def run(arguments: argparse.Namespace) -> None:
    """Write both files to OUT; nothing is left of it if that fails."""
    choices = Choices.of(arguments)
    sources = choices.sources(arguments.train, arguments.dev)
    check_sources(arguments.out, sources, choices.columns)
    out, tokenizer = arguments.out, load_tokenizer(arguments.tokenizer)
    # fairseq takes seconds to import.
    from amos_fairseq.downstream.tagging.dataset import MANIFEST

    description = describe_tagging(sources, tokenizer, choices)
    if is_finished(out, description, "tagging", MANIFEST):
        return
    sentences = read_splits(sources, choices)
    with whole_folder(out.absolute()) as unfinished:
        write_tagging(unfinished, sources, sentences, description, tokenizer)
    say(f"done: amos tag --checkpoint RUN --data {out} --out RESULTS; counts in {out}/{MANIFEST}")


def prepare_tagging_inside(out: Path, train: Path, dev: Path, tokenizer: Tokenizer, choices: Choices) -> Path:
    """Return what ``amos prepare tagging`` makes of the files, inside of OUT of ``amos tag``."""
    from amos_fairseq.downstream.tagging.dataset import TASK_PREFIX

    sources = choices.sources(train, dev)
    check_sources(out, sources, choices.columns)
    # Each column has its own data and runs, however it was chosen.
    is_conllu = kind_and_compression(train)[0] == CONLLU
    column = choices.column or (
        DEFAULT_CONLLU_COLUMN if is_conllu else list(read_columns(train, choices.columns)[0].columns)[-1]
    )
    if not _is_column_name(column):
        raise UserError(f"--column {column!r} is not a name: give one such as upos, pos, chunk or ner")

    def write(directory: Path) -> None:
        sentences = read_splits(sources, choices)
        write_tagging(directory, sources, sentences, describe_tagging(sources, tokenizer, choices), tokenizer)

    name, settings = TASK_PREFIX + column, choices.as_dict() | {"column": column}
    return prepared_data(out, name, sources, tokenizer, settings, write, used_by=[f"runs/{name}"])


def read_splits(
    sources: dict[str, Path], choices: Choices, read: Callable[[Path], list[Sentence]] | None = None
) -> dict[str, list[Sentence]]:
    """Read all files; the sentences without labels are the split ``unlabeled``.

    ``read``: reads a file of labeled sentences; by default :func:`read_sentences`.
    """
    read = read or (lambda path: read_sentences(path, choices.columns))
    splits = {split: read(sources[split]) for split in ("train", "valid")}
    if choices.encoding == BIOES:
        column = choose_column({sources[split]: sentences for split, sentences in splits.items()}, choices.column)
        labeled = [*splits["train"], *splits["valid"]]
        if not mark_spans(label for sentence in labeled for label in sentence.columns[column]):
            where = f"column {column} of {sources['train']} and {sources['valid']}"
            raise UserError(f"--encoding bioes is for labels that mark spans (B-, I-, O), not {where}: leave it out")
        for sentence in labeled:
            sentence.columns[column] = to_bioes(sentence.columns[column])
    splits["train"], rest = choose_labeled(splits["train"], choices.labeled, sources["train"])
    if choices.unlabeled == REST:
        if not rest:
            raise UserError(f"--labeled {choices.labeled} leaves no sentence of {sources['train']}: give fewer")
        splits[UNLABELED] = rest
    elif choices.unlabeled is not None:
        words, how = read_words(sources[UNLABELED])
        say(f"{sources[UNLABELED]}: {len(words):,} sentences without labels ({how})")
        splits[UNLABELED] = [Sentence(sentence, {}) for sentence in words]
    return splits


def choose_labeled(sentences: list[Sentence], number: int | None, path: Path) -> tuple[list[Sentence], list[Sentence]]:
    """Return ``number`` sentences at equal distances, by default all, and the others."""
    if number is None:
        return sentences, []
    if not 1 <= number <= len(sentences):
        raise UserError(f"--labeled {number}: {path} has {len(sentences):,} sentences: give 1 to as many")
    chosen = {place * len(sentences) // number for place in range(number)}
    rest = [sentence for place, sentence in enumerate(sentences) if place not in chosen]
    return [sentences[place] for place in sorted(chosen)], rest


def check_sources(out: Path, sources: dict[str, Path], columns: Sequence[str] | None) -> None:
    check_inputs(list(sources.values()), "give a column file or a CoNLL-U file")
    if os.pathsep in str(out.absolute()):
        raise UserError(f"OUT {out.absolute()}: fairseq separates folders at {os.pathsep!r}: give a path without it")
    for name in columns or ():
        if not _is_column_name(name) or columns.count(name) > 1:
            raise UserError(f"--columns: {name!r} is not a name, or there twice: give names such as pos,chunk,ner")


def _is_column_name(name: str) -> bool:
    return bool(COLUMN_NAME.fullmatch(name)) and len(name) <= LONGEST_COLUMN_NAME


def describe_tagging(sources: dict[str, Path], tokenizer: Tokenizer, choices: Choices) -> dict[str, Any]:
    return {
        "settings": choices.as_dict(),
        "tokenizer_sha256": tokenizer.sha256,
        "sources": {split: describe_source(path) for split, path in sources.items()},
    }


def write_tagging(
    directory: Path,
    sources: dict[str, Path],
    sentences: dict[str, list[Sentence]],
    description: dict[str, Any],
    tokenizer: Tokenizer,
    score: str | None = None,
) -> None:
    """Write the splits of the column and the manifest into an empty folder; ``score``: of a task other than tagging."""
    from amos_fairseq.downstream.tagging.dataset import MANIFEST

    train, dev = sources["train"], sources["valid"]
    settings = description["settings"]
    column = choose_column({train: sentences["train"], dev: sentences["valid"]}, settings["column"])
    in_train, in_dev = (
        {label for sentence in sentences[split] for label in sentence.columns[column]} for split in ("train", "valid")
    )
    if len(in_train) == 1:
        (only,) = in_train
        if number := settings["labeled"]:
            raise UserError(f"--labeled {number}: all words of these sentences have the label {only}: give more")
        raise UserError(f"{train}, column {column}: each word has the label {only}: choose another --column")
    labels = sorted(in_train | in_dev)
    has_spans = mark_spans(labels)
    save_tokenizer(tokenizer, directory)
    facts = {
        split: write_tagging_split(directory, split, of_split, tokenizer, column, labels)
        for split, of_split in sentences.items()
    }
    content = description | {"column": column, "labels": labels, "has_spans": has_spans}
    content |= {"splits": facts, "sha256": files_sha256(directory)}
    (directory / MANIFEST).write_text(json_text(content), encoding="utf-8")
    say(f"column {column}: {len(labels)} labels, scored by {score or ('span F1' if has_spans else 'accuracy')}")
    for split, numbers in facts.items():
        say(
            f"{split}: {numbers['sentences']} sentences, {numbers['words']} words, {numbers['pieces']} pieces "
            f"({numbers['unknown']} unknown); longest sentence {numbers['longest']} pieces"
        )
    if mark_spans(in_train) and not has_spans:
        say(f"the labels of {train} mark spans, those of {dev} do not: the score is accuracy")
    if new := sorted(in_dev - in_train):
        say(f"labels of {dev} that are not in {train} and cannot be learned: {shorten(' '.join(new), 100)}")


def read_sentences(path: Path, names: Sequence[str] | None) -> list[Sentence]:
    """Read a file as CoNLL-U if it is called so, else as columns."""
    kind, _ = kind_and_compression(path)
    if kind != CONLLU:
        return read_columns(path, names)
    if names is not None:
        raise UserError(f"--columns names those of column files; {path} is CoNLL-U, with {', '.join(CONLLU_NAMES)}")
    return read_conllu(path)


def choose_column(sentences: dict[Path, list[Sentence]], column: str | None) -> str:
    """Return ``column``, by default upos of CoNLL-U and the last one of other files."""
    for path, of_file in sentences.items():
        names = list(of_file[0].columns)
        column = column or (DEFAULT_CONLLU_COLUMN if names == list(CONLLU_NAMES) else names[-1])
        if column not in names:
            raise UserError(f"{path} has no column {column}: it has {', '.join(names)}")
    return column


def write_tagging_split(
    directory: Path, split: str, sentences: list[Sentence], tokenizer: Tokenizer, column: str, labels: list[str]
) -> dict[str, int]:
    """Write all sentences of a split, of the split ``unlabeled`` the words alone; return counts."""
    from amos_fairseq.downstream.tagging.dataset import ARRAYS, WORD_ARRAYS

    indices, is_labeled = {label: index for index, label in enumerate(labels)}, split != UNLABELED
    unknown = tokenizer.embedding_rows[UNK]
    facts = {"sentences": len(sentences), "words": 0, "pieces": 0, "unknown": 0, "longest": 0}
    with (
        contextlib.ExitStack() as files,
        progress_bar(len(sentences), f"{split}: encode", "sentence", delay=2) as bar,
    ):
        # The ids of the dictionary take the least type that holds them, as in the other preparations.
        symbols = {"tokens": len(tokenizer.embedding_rows)}
        arrays = [
            files.enter_context(BinarizedFile(f"{directory / split}.{name}", symbols.get(name)))
            for name in (ARRAYS if is_labeled else WORD_ARRAYS)
        ]
        if is_labeled:
            path = directory / f"{split}.words.jsonl"
            words_file = files.enter_context(path.open("w", encoding="utf-8", newline="\n"))
        for sentence in sentences:
            ids, ranges = encode_words(tokenizer, sentence.words)
            starts, ends = zip(*ranges, strict=True)
            rows = [ids, starts, ends]
            if is_labeled:
                rows.append([indices[label] for label in sentence.columns[column]])
                words_file.write(json.dumps(sentence.words, ensure_ascii=False) + "\n")
            for array, row in zip(arrays, rows, strict=True):
                array.add_line(row)
            facts["words"] += len(ranges)
            facts["pieces"] += len(ids)
            facts["unknown"] += ids.count(unknown)
            facts["longest"] = max(facts["longest"], len(ids))
            bar.update(1)
    return facts
