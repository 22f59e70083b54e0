"""``amos prepare tagging``: convert labeled words to the input of the task ``sequence_tagging``.

Read both files -> encode, find the pieces of each word, write to a temporary directory -> rename.
"""

import argparse
import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from amos_fairseq.data.tag_scores import mark_spans
from amos_fairseq.data.text_files import kind_and_compression
from amos_fairseq.data.word_files import (
    COLUMN_NAME,
    CONLLU_NAMES,
    LONGEST_COLUMN_NAME,
    Sentence,
    read_columns,
    read_conllu,
)
from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text, whole_folder
from amos_fairseq.fingerprint import files_sha256
from amos_fairseq.prepare.binarizing import BinarizedFile
from amos_fairseq.prepare.inside_out import prepared_data
from amos_fairseq.prepare.workspace import check_inputs, describe_source, is_finished, save_tokenizer
from amos_fairseq.terminal import progress_bar, say
from amos_fairseq.tokenization import Tokenizer, load_tokenizer
from amos_fairseq.tokenization.tokenizer import UNK
from amos_fairseq.tokenization.words import encode_words

CONLLU = ".conllu"
DEFAULT_CONLLU_COLUMN = "upos"


def run(given: argparse.Namespace) -> None:
    """Write both files to OUT; nothing is left of it if that fails.

    Raises:
        UserError: bad input, or OUT contains other files.
    """
    sources = {"train": given.train, "valid": given.dev}
    check_sources(given.out, sources, given.columns)
    out, tokenizer = given.out, load_tokenizer(given.tokenizer)
    from amos_fairseq.data.tagging import MANIFEST, read_tagging_manifest  # imports fairseq, which takes seconds

    description = describe_tagging(sources, tokenizer, given.column, given.columns)
    if is_finished(out, description, "tagging", MANIFEST, read_tagging_manifest):
        return
    sentences = {split: read_sentences(path, given.columns) for split, path in sources.items()}
    with whole_folder(out.absolute()) as unfinished:
        write_tagging(unfinished, sources, sentences, description, tokenizer)
    say(f"done: amos tag --checkpoint RUN --data {out} --out RESULTS; counts in {out}/{MANIFEST}")


def prepare_tagging_inside(
    out: Path, train: Path, dev: Path, tokenizer: Tokenizer, column: str | None, columns: Sequence[str] | None
) -> Path:
    """Return what ``amos prepare tagging`` makes of both files, inside of OUT of ``amos tag``.

    Args:
        column, columns: values of the options of both commands.

    Raises:
        UserError: bad input; or see :func:`~amos_fairseq.prepare.inside_out.prepared_data`.
    """
    from amos_fairseq.data.tagging import TASK_PREFIX  # imports fairseq, which takes seconds

    sources = {"train": train, "valid": dev}
    check_sources(out, sources, columns)
    # Each column has its own data and runs, however it was chosen.
    is_conllu = kind_and_compression(train)[0] == CONLLU
    chosen = column or (DEFAULT_CONLLU_COLUMN if is_conllu else list(read_columns(train, columns)[0].columns)[-1])
    if not _is_column_name(chosen):
        raise UserError(f"--column {chosen!r} is not a name: give one such as upos, pos, chunk or ner")

    def write(directory: Path) -> None:
        sentences = {split: read_sentences(path, columns) for split, path in sources.items()}
        write_tagging(directory, sources, sentences, describe_tagging(sources, tokenizer, column, columns), tokenizer)

    name, settings = TASK_PREFIX + chosen, {"column": chosen, "columns": columns}
    return prepared_data(out, name, sources, tokenizer, settings, write, used_by=[f"runs/{name}"])


def check_sources(out: Path, sources: dict[str, Path], columns: Sequence[str] | None) -> None:
    """Raise :class:`UserError` for what can be seen before any work."""
    check_inputs(list(sources.values()), "give a column file or a CoNLL-U file")
    if os.pathsep in str(out.absolute()):
        raise UserError(f"OUT {out.absolute()}: fairseq separates folders at {os.pathsep!r}: give a path without it")
    for name in columns or ():
        if not _is_column_name(name) or columns.count(name) > 1:
            raise UserError(f"--columns: {name!r} is not a name, or there twice: give names such as pos,chunk,ner")


def _is_column_name(name: str) -> bool:
    return bool(COLUMN_NAME.fullmatch(name)) and len(name) <= LONGEST_COLUMN_NAME


def describe_tagging(
    sources: dict[str, Path], tokenizer: Tokenizer, column: str | None, columns: Sequence[str] | None
) -> dict[str, Any]:
    """Return what determines the data, for the manifest."""
    return {
        "settings": {"column": column, "columns": columns},
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
    """Write both splits of the column and the manifest into an empty folder; ``score``: of a task other than tagging."""
    from amos_fairseq.data.tagging import MANIFEST  # imports fairseq, which takes seconds

    chosen = choose_column({sources[split]: own for split, own in sentences.items()}, description["settings"]["column"])
    labels_of = {split: {label for one in own for label in one.columns[chosen]} for split, own in sentences.items()}
    if len(labels_of["train"]) == 1:
        (only,) = labels_of["train"]
        raise UserError(
            f"{sources['train']}, column {chosen}: each word has the label {only}: choose another column with --column"
        )
    labels = sorted(set().union(*labels_of.values()))
    kind = {"column": chosen, "labels": labels, "has_spans": mark_spans(labels)}
    save_tokenizer(tokenizer, directory)
    facts = {
        split: write_tagging_split(directory, split, own, tokenizer, chosen, labels) for split, own in sentences.items()
    }
    content = json_text(description | kind | {"splits": facts, "sha256": files_sha256(directory)})
    (directory / MANIFEST).write_text(content, encoding="utf-8")
    _report(kind, facts, score or ("span F1" if kind["has_spans"] else "accuracy"))
    if mark_spans(labels_of["train"]) and not kind["has_spans"]:
        say(f"the labels of {sources['train']} mark spans, those of {sources['valid']} do not: the score is accuracy")
    if new := sorted(labels_of["valid"] - labels_of["train"]):
        say(
            f"labels of {sources['valid']} that are not in {sources['train']} and cannot be learned: "
            f"{shorten(' '.join(new), 100)}"
        )


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


def write_tagging_split(
    directory: Path, split: str, sentences: list[Sentence], tokenizer: Tokenizer, column: str, labels: list[str]
) -> dict[str, int]:
    """Write all sentences of a split; return counts."""
    from amos_fairseq.data.tagging import ARRAYS  # imports fairseq, which takes seconds

    indices = {label: index for index, label in enumerate(labels)}
    unknown = tokenizer.embedding_rows[UNK]
    facts = {"sentences": len(sentences), "words": 0, "pieces": 0, "unknown": 0, "longest": 0}
    with (
        contextlib.ExitStack() as files,
        (directory / f"{split}.words.jsonl").open("w", encoding="utf-8", newline="\n") as words_file,
        progress_bar(len(sentences), f"{split}: encode", "sentence", delay=2) as bar,
    ):
        # The ids of the dictionary take the least type that holds them, as in the other preparations.
        symbols = {"tokens": len(tokenizer.embedding_rows)}
        arrays = [
            files.enter_context(BinarizedFile(f"{directory / split}.{name}", symbols.get(name))) for name in ARRAYS
        ]
        for sentence in sentences:
            ids, ranges = encode_words(tokenizer, sentence.words)
            starts, ends = zip(*ranges, strict=True)
            rows = (ids, starts, ends, [indices[label] for label in sentence.columns[column]])
            for array, row in zip(arrays, rows, strict=True):
                array.add_line(row)
            words_file.write(json.dumps(sentence.words, ensure_ascii=False) + "\n")
            facts["words"] += len(ranges)
            facts["pieces"] += len(ids)
            facts["unknown"] += ids.count(unknown)
            facts["longest"] = max(facts["longest"], len(ids))
            bar.update(1)
    return facts


def _report(kind: dict[str, Any], facts: dict[str, dict[str, int]], score: str) -> None:
    say(f"column {kind['column']}: {len(kind['labels'])} labels, scored by {score}")
    for split, own in facts.items():
        say(
            f"{split}: {own['sentences']} sentences, {own['words']} words, {own['pieces']} pieces ({own['unknown']} unknown); "
            f"longest sentence {own['longest']} pieces"
        )
