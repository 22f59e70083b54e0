"""Convert labeled words to the input of the task ``sequence_tagging``; see ``prepare.sh --help``.

Read both files -> encode, find the pieces of each word, write to a temporary directory -> rename.
"""

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from amos_fairseq.data.tag_scores import mark_spans
from amos_fairseq.data.word_files import (
    COLUMN_NAME,
    CONLLU_NAMES,
    LONGEST_COLUMN_NAME,
    Sentence,
    read_columns,
    read_conllu,
)
from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.files import json_text, whole_folder
from amos_fairseq.fingerprint import file_sha256, files_sha256
from amos_fairseq.preprocess.common.command import check_names, ending_in_one_line, is_finished, progress_bar, say
from amos_fairseq.preprocess.common.reading import kind_and_compression
from amos_fairseq.tokenization import Tokenizer, load_tokenizer
from amos_fairseq.tokenization.tokenizer import UNK
from amos_fairseq.tokenization.words import encode_words

_DESCRIPTION = """Convert labeled words to the input of the task sequence_tagging: pieces, the pieces of each word, labels.

TRAIN and DEV are CoNLL-U files (.conllu), or files with one word a line and its labels in the columns behind it, as in
CoNLL-2000 and CoNLL-2003; plain or as .gz, .xz or .zst. A finished OUT, made from the same files and settings, is not
changed."""

CONLLU = ".conllu"
DEFAULT_CONLLU_COLUMN = "upos"


def read_sentences(path: Path, names: Sequence[str] | None) -> list[Sentence]:
    """Read a file as CoNLL-U if it is called so, else as columns."""
    kind, _ = kind_and_compression(path)
    if kind != CONLLU:
        return read_columns(path, names)
    if names is not None:
        raise UserError(f"--columns names those of column files; {path} is CoNLL-U, with {', '.join(CONLLU_NAMES)}")
    return read_conllu(path)


def choose_column(sentences: dict[Path, list[Sentence]], column: str | None) -> str:
    """Return ``column``, by default upos of CoNLL-U and the last one of other files.

    Raises:
        UserError: a file does not have it.
    """
    for path, own in sentences.items():
        names = list(own[0].columns)
        column = column or (DEFAULT_CONLLU_COLUMN if names == list(CONLLU_NAMES) else names[-1])
        if column not in names:
            raise UserError(f"{path} has no column {column}: it has {', '.join(names)}")
    return column


def prepare(
    train: Path, dev: Path, tokenizer: Tokenizer, out: Path, column: str | None, names: list[str] | None
) -> None:
    """Write both files to ``out``; nothing is left of it if that fails.

    Raises:
        UserError: bad input, or ``out`` contains other files.
    """
    from amos_fairseq.data.tagging import MANIFEST, read_manifest  # imports fairseq, which takes seconds

    sources = {"train": train, "valid": dev}
    description: dict[str, Any] = {
        "settings": {"column": column, "columns": names},
        "tokenizer_sha256": tokenizer.sha256,
        "sources": {split: {"name": path.name, "sha256": file_sha256(path)} for split, path in sources.items()},
    }
    if is_finished(out, description, "tagging", MANIFEST, read_manifest):
        say(f"{out} is finished already, with these files and settings: nothing to do")
        return
    sentences = {split: read_sentences(path, names) for split, path in sources.items()}
    chosen = choose_column({path: sentences[split] for split, path in sources.items()}, column)
    labels_of = {split: {label for one in own for label in one.columns[chosen]} for split, own in sentences.items()}
    if len(labels_of["train"]) == 1:
        (only,) = labels_of["train"]
        raise UserError(
            f"{train}, column {chosen}: each word has the label {only}: choose another column with --column"
        )
    labels = sorted(set().union(*labels_of.values()))
    kind = {"column": chosen, "labels": labels, "has_spans": mark_spans(labels)}
    with whole_folder(out.absolute()) as unfinished:
        tokenizer.save(unfinished / "tokenizer")
        shutil.copyfile(unfinished / "tokenizer" / "dict.txt", unfinished / "dict.txt")
        facts = {
            split: write_split(unfinished, split, own, tokenizer, chosen, labels) for split, own in sentences.items()
        }
        content = description | kind | {"splits": facts, "sha256": files_sha256(unfinished)}
        manifest = json_text(content)
        (unfinished / MANIFEST).write_text(manifest, encoding="utf-8")
    _report(kind, facts)
    if mark_spans(labels_of["train"]) and not kind["has_spans"]:
        say(f"the labels of {train} mark spans, those of {dev} do not: the score is accuracy")
    if new := sorted(labels_of["valid"] - labels_of["train"]):
        say(f"labels of {dev} that are not in {train} and cannot be learned: {shorten(' '.join(new), 100)}")
    say(f"done: amos tag --checkpoint RUN --data {out} --out RESULTS; counts in {out}/{MANIFEST}")


def write_split(
    directory: Path, split: str, sentences: list[Sentence], tokenizer: Tokenizer, column: str, labels: list[str]
) -> dict[str, int]:
    """Write all sentences of a split; return counts."""
    import numpy as np
    import torch
    from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder, best_fitting_int_dtype

    from amos_fairseq.data.tagging import ARRAYS

    # The ids of the dictionary take the least type that holds them, as in the other preparations.
    types = {"tokens": best_fitting_int_dtype(len(tokenizer.embedding_rows))}
    builders = {
        name: MMapIndexedDatasetBuilder(f"{directory / split}.{name}.bin", dtype=types.get(name, np.int32))
        for name in ARRAYS
    }
    indices = {label: index for index, label in enumerate(labels)}
    unknown = tokenizer.embedding_rows[UNK]
    facts = {"sentences": len(sentences), "words": 0, "pieces": 0, "unknown": 0, "longest": 0}
    with (
        (directory / f"{split}.words.jsonl").open("w", encoding="utf-8", newline="\n") as words_file,
        progress_bar(len(sentences), f"{split}: encode", "sentence", delay=2) as bar,
    ):
        for sentence in sentences:
            ids, ranges = encode_words(tokenizer, sentence.words)
            starts, ends = zip(*ranges, strict=True)
            rows = (ids, starts, ends, [indices[label] for label in sentence.columns[column]])
            for name, row in zip(ARRAYS, rows, strict=True):
                builders[name].add_item(torch.tensor(row, dtype=torch.int64))
            words_file.write(json.dumps(sentence.words, ensure_ascii=False) + "\n")
            facts["words"] += len(ranges)
            facts["pieces"] += len(ids)
            facts["unknown"] += ids.count(unknown)
            facts["longest"] = max(facts["longest"], len(ids))
            bar.update(1)
    for name, builder in builders.items():
        builder.finalize(f"{directory / split}.{name}.idx")
    return facts


def _report(kind: dict[str, Any], facts: dict[str, dict[str, int]]) -> None:
    score = "span F1" if kind["has_spans"] else "accuracy"
    say(f"column {kind['column']}: {len(kind['labels'])} labels, scored by {score}")
    for split, own in facts.items():
        say(
            f"{split}: {own['sentences']} sentences, {own['words']} words, {own['pieces']} pieces ({own['unknown']} unknown); "
            f"longest sentence {own['longest']} pieces"
        )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "prepare.sh", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("train", type=Path, metavar="TRAIN", help="labeled words to train on")
    add("dev", type=Path, metavar="DEV", help="labeled words to score on, in the same format")
    add("tokenizer", type=Path, metavar="TOKENIZER_DIR",
        help="tokenizer directory of a corpus or run, or tokenizer.json")  # fmt: skip
    add("out", type=Path, metavar="OUT", help="output directory")
    add("--column", metavar="NAME",
        help="labels to predict, such as upos, xpos, deprel, pos, chunk, ner (default: upos, or the last column)")  # fmt: skip
    add("--columns", metavar="A,B,...", type=lambda value: value.split(","),
        help="names of the columns after the word (default: pos,chunk of two and pos,chunk,ner of three)")  # fmt: skip
    return parser


@report_user_errors()
def main(arguments: list[str] | None = None) -> None:
    """Run the command. Exit with code 1 and one line on a user's mistake, with code 130 after Ctrl-C."""
    with ending_in_one_line("nothing was left"):
        given = build_parser().parse_args(arguments)
        # Check as much as possible before any work.
        check_names(given.train, given.dev)
        for path in (given.train, given.dev):
            if not path.is_file():
                raise UserError(f"{path}: no such file: give a column file or a CoNLL-U file")
        if os.pathsep in str(given.out.absolute()):
            raise UserError(
                f"OUT {given.out.absolute()}: fairseq separates folders at {os.pathsep!r}: give a path without it"
            )
        for name in given.columns or ():
            if not COLUMN_NAME.fullmatch(name) or len(name) > LONGEST_COLUMN_NAME or given.columns.count(name) > 1:
                raise UserError(f"--columns: {name!r} is not a name, or there twice: give names such as pos,chunk,ner")
        prepare(given.train, given.dev, load_tokenizer(given.tokenizer), given.out, given.column, given.columns)


if __name__ == "__main__":
    main()
