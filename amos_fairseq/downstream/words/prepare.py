"""``amos prepare tagging``: convert labeled sentences, and unlabeled ones, to what the task ``sequence_tagging`` reads.

SPLIT.tokens.{bin,idx}                          ids of each sentence, without special tokens
SPLIT.word_start, SPLIT.word_end                first piece of each word, and the one after its last
SPLIT.label.{bin,idx}                           label of each word, an index of ``labels``
SPLIT.words.jsonl                               the words of each sentence
unlabeled.*                                     the same without labels and words.jsonl, for cross-view training; optional
dict.txt  tokenizer/  tagging.json              vocabulary; labels, sources, counts

This module and those it imports do without fairseq, which takes seconds to import.
"""

import argparse
import contextlib
import dataclasses
import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.raw_words import join_words
from amos_fairseq.inputs.schemes import name_of_notation, notation_of
from amos_fairseq.inputs.tables import held_out, num_seen, seen_note
from amos_fairseq.inputs.word_files import (
    HELD_OUT,
    MANIFEST,
    RAW_TEXT,
    SEEN,
    UNDIVIDED,
    UNLABELED,
    WORD_ARRAYS,
    Sentence,
    WordFile,
    count_labels,
    is_column_name,
    read_sentences,
    undivided,
)
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.text.encoding import BinarizedFile, describe_unknown, unknown_pieces
from amos_fairseq.text.prepared_data import (
    description_of,
    fill_out,
    prepared_data,
    save_tokenizer,
    say_first_example,
    write_manifest,
)
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.tokenizer import BOS, EOS, UNK, Tokenizer

ARRAYS = (*WORD_ARRAYS, "label")
_BRACKETS = re.compile(r"(\([^\s()*]+)*\*?\)*")  # of CoNLL-2012: (PER* *) (PER), and * without any
REST = "rest"  # value of --unlabeled: the training sentences that --labeled leaves


@dataclass(frozen=True)
class WordSource:
    """The files of ``amos tag``, ``amos parse`` or ``amos prepare tagging``, and what their options choose from them.

    Attributes:
        column: name of the labels; by default upos of CoNLL-U, or the last one.
        columns: names of all columns of files with one word a line.
        labeled: number of training sentences; None for all.
        unlabeled: a file of sentences without labels, ``rest``, or None for none.
    """

    train: Path
    dev: Path | None  # None to choose sentences of ``train``
    column: str | None = None
    columns: Sequence[str] | None = None
    labeled: int | None = None
    unlabeled: str | None = None

    scored_by = ""  # the score that is announced, if the labels do not decide it
    other_labels = "give another column, or more sentences"

    @classmethod
    def of(cls, args: argparse.Namespace) -> "WordSource":
        """Return the files and options of a command line."""
        source = cls(**{name: value for name, value in vars(args).items() if name in cls.__dataclass_fields__})
        names = list(source.columns or ())
        if len(set(names)) < len(names) or not all(map(is_column_name, [*names, source.column or "label"])):
            raise UserError(
                f"--columns {','.join(names)}, --column {source.column}: give each name once, such as pos,ner"
            )
        return source

    @property
    def files(self) -> dict[str, Path]:
        files = {"train": self.train} | ({} if self.dev is None else {"valid": self.dev})
        return files if self.unlabeled in (None, REST) else files | {UNLABELED: Path(self.unlabeled)}

    def read_labeled(self, path: Path) -> WordFile:
        return read_sentences(path, self.columns, self.column)

    def read(self) -> tuple[str, dict[str, list[Sentence]], bool]:
        """Return the column of the labels, which an option or the training file names; the sentences of all splits, of which
        those of ``unlabeled`` have no labels; and whether the labels mark spans."""
        train = self.read_labeled(self.train)
        column = self.column or train.label_column()
        train, dev = files = split_off_dev(train) if self.dev is None else [train, self.read_labeled(self.dev)]
        for file in files:
            check_column(file, column)
        has_spans = convert_spans(files, column)
        for file in files:
            file.report(column=column)
        labeled, rest = choose_labeled(train.sentences, self.labeled)
        splits = {"train": labeled, "valid": dev.sentences}
        if self.unlabeled == REST:
            if not rest:
                raise UserError(f"--unlabeled rest: --labeled N leaves no sentence of {self.train}: give a smaller N")
            splits[UNLABELED] = rest
        elif self.unlabeled is not None:
            file = read_sentences(Path(self.unlabeled), labeled=False)
            file.report()
            splits[UNLABELED] = file.sentences
        return column, splits, has_spans

    def describe(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return what determines the prepared data."""
        settings = {name: getattr(self, name) for name in ("column", "columns", "labeled", "unlabeled")}
        if UNLABELED in self.files:
            settings["unlabeled"] = "file"
        return description_of(self.files, tokenizer, settings)

    def write(self, directory: Path, tokenizer: Tokenizer, description: dict[str, Any]) -> dict[str, list[Sentence]]:
        """Write all splits and the manifest, which begins with ``description``, into an empty folder; return the sentences."""
        column, splits, has_spans = self.read()
        in_train, in_dev = (count_labels(splits[split], column) for split in ("train", "valid"))
        if len(in_train) == 1:
            problem = f"{self.train}, column {column}: all words that train have the label {min(in_train)}"
            raise UserError(f"{problem}: {self.other_labels}")
        labels = sorted(in_train | in_dev)
        first = splits["train"][0]
        ids, _ = tokenizer.encode_words(first.words, first.spaces)
        symbols = list(tokenizer.embedding_rows)
        say_first_example([BOS, *(symbols[row] for row in ids), EOS], " ".join(first.columns[column]))
        seen = num_seen((each.words for each in splits["train"]), (each.words for each in splits["valid"]))
        facts = {
            split: write_split(directory, split, sentences, tokenizer, column, labels)
            for split, sentences in splits.items()
        }
        save_tokenizer(tokenizer, directory)
        content = {"column": column, "labels": labels, "has_spans": has_spans, SEEN: seen, "splits": facts}
        content[UNDIVIDED] = undivided(splits["train"])
        if any(sentence.text != join_words(sentence.words) for sentence in splits["train"]):
            content[RAW_TEXT] = True
        if self.dev is None:
            content[HELD_OUT] = self.train.name
        write_manifest(directory / MANIFEST, description | content)
        most, number = in_dev.most_common(1)[0]
        accuracy = f"accuracy ({most} is {number / in_dev.total():.1%} of the dev words)"
        score = self.scored_by or ("span F1" if has_spans else accuracy)
        say(f"column {column}: {len(labels)} labels, scored by {score}")
        for split, numbers in facts.items():
            say(
                f"{split}: {numbers['sentences']} sentences, {numbers['words']} words, {numbers['pieces']} pieces; "
                f"longest sentence {numbers['longest']} pieces; {describe_unknown(numbers)}"
            )
        if seen:
            say(seen_note(seen, len(splits["valid"]), "sentences"))
        if new := sorted(in_dev.keys() - in_train.keys()):
            unknown = shorten(" ".join(new), 100)
            say(f"labels of {self.dev or 'the dev set'} that are not in {self.train} and cannot be learned: {unknown}")
        return splits


def run(args: argparse.Namespace) -> None:
    source, out = WordSource.of(args), args.out
    tokenizer = load_tokenizer(args.tokenizer)
    description = source.describe(tokenizer)
    if fill_out(out, description, MANIFEST, lambda folder: source.write(folder, tokenizer, description)):
        say(f"done: amos tag --checkpoint RUN --data {shlex.quote(str(out))} --out RESULTS; counts in {out}/{MANIFEST}")


def prepare_tagging_inside(out: Path, source: WordSource, tokenizer: Tokenizer) -> Path:
    """Return what ``amos prepare tagging`` makes of the files, inside of OUT of ``amos tag``."""
    description = source.describe(tokenizer)
    return prepared_data(out, "tagging", description, lambda folder: source.write(folder, tokenizer, description))


def check_column(file: WordFile, column: str) -> None:
    if column not in file.names:
        advice = f"give --column with one of {', '.join(file.names)}, or its names as --columns"
        raise UserError(f"{file.path} has no column {column}: {advice}")


def convert_spans(files: Sequence[WordFile], column: str, known: Sequence[str] = ()) -> bool:
    """Convert labels that mark spans to IOB or IOBES, and return whether they do; refuse a label that does not fit the rest, or
    the ``known`` ones."""
    counts = count_labels([sentence for file in files for sentence in file.sentences], column) + Counter(known)
    if "*" in counts and all(map(_BRACKETS.fullmatch, counts)):
        problem = (
            f"{max(counts, key=len):.60} is a bracket of CoNLL-2012: convert them to IOB (docs/converting.md, Words)"
        )
        raise UserError(f"{files[0].path}, column {column}: the label {problem}")
    notation = notation_of(counts)
    if not notation:
        return False
    for file in files:
        for sentence in file.sentences:
            labels = sentence.columns[column]
            for line, word, label in zip(sentence.lines, sentence.words, labels, strict=True):
                if label not in notation:
                    problem = f"the label {label!r:.60} of the word {word!r:.60} marks no span, as the others do"
                    raise UserError(f"{file.path}, line {line}: {problem}: correct it, or remove it if it is a header")
            sentence.columns[column] = [notation[label] for label in labels]
    say(f"column {column}: {name_of_notation(counts)} labels, scored as spans")
    return True


def split_off_dev(file: WordFile) -> list[WordFile]:
    """Return the sentences to train on and those to score on."""
    chosen = set(held_out([tuple(sentence.words) for sentence in file.sentences], file.path, "sentences"))
    train = [sentence for place, sentence in enumerate(file.sentences) if place not in chosen]
    dev = [file.sentences[place] for place in sorted(chosen)]
    return [dataclasses.replace(file, sentences=train), WordFile(file.path, file.kind, dev)]


def choose_labeled(sentences: list[Sentence], number: int | None) -> tuple[list[Sentence], list[Sentence]]:
    """Return ``number`` sentences at equal distances, by default or where there are fewer all, and the others."""
    if number is None or number >= len(sentences):
        return sentences, []
    chosen = {place * len(sentences) // number for place in range(number)}
    rest = [sentence for place, sentence in enumerate(sentences) if place not in chosen]
    return [sentences[place] for place in sorted(chosen)], rest


def write_split(
    directory: Path, split: str, sentences: list[Sentence], tokenizer: Tokenizer, column: str, labels: list[str]
) -> dict[str, Any]:
    label_ids, is_labeled = {label: index for index, label in enumerate(labels)}, split != UNLABELED
    unknown = tokenizer.embedding_rows[UNK]
    facts = {"sentences": len(sentences), "words": 0, "pieces": 0, "unknown": 0, "longest": 0}
    with contextlib.ExitStack() as files, progress_bar(len(sentences), f"{split}: encode", "sentence", delay=2) as bar:
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
            ids, ranges = tokenizer.encode_words(sentence.words, sentence.spaces)
            starts, ends = zip(*ranges, strict=True)
            rows = [ids, starts, ends]
            if is_labeled:
                rows.append([label_ids[label] for label in sentence.columns[column]])
                words_file.write(json.dumps(sentence.words, ensure_ascii=False) + "\n")
            for array, row in zip(arrays, rows, strict=True):
                array.add_line(row)
            facts["words"] += len(ranges)
            facts["pieces"] += len(ids)
            facts["unknown"] += ids.count(unknown)
            facts["longest"] = max(facts["longest"], len(ids))
            bar.update(1)
    return facts | unknown_pieces(facts["unknown"], facts["pieces"])
