"""``amos prepare probing``: convert free corpora to the JSON lines of ``amos probe``.

Read all files -> labeled spans -> write to a temporary directory -> rename.
"""

import argparse
import functools
import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from amos_fairseq.downstream.tagging.scores import mark_spans, spans_of
from amos_fairseq.downstream.tagging.word_files import Sentence, read_columns, read_conllu
from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text, whole_folder
from amos_fairseq.output.terminal import say
from amos_fairseq.text.input_files import kind_and_compression, read_lines
from amos_fairseq.text.prepared_data import check_inputs, describe_source, is_finished, prepared_data

MANIFEST = "probing.json"
HELD_OUT = 10  # where there is no validation file, every tenth sentence of the training file is held out

_TAGS = re.compile(r"(</?e[12]>)")
_SEMEVAL_LABEL = re.compile(r"Other|[\w-]+\((e1,e2|e2,e1)\)")

Record = dict[str, Any]
Splits = dict[str, list[Record]]


def pos_targets(sentence: Sentence) -> list[Record]:
    """Return one target for each word, labeled with its universal part of speech."""
    return [_target((i, i + 1), tag) for i, tag in enumerate(sentence.columns["upos"])]


def dependency_targets(sentence: Sentence) -> list[Record]:
    """Return one target for each word but the root: the word, its head, and their relation (Tenney et al., 2019b)."""
    targets = []
    for i, (head, relation) in enumerate(zip(sentence.columns["head"], sentence.columns["deprel"], strict=True)):
        if not head.isdecimal() or int(head) > len(sentence.words):
            raise ValueError(f"the head {head!r} of word {i + 1} is no word of the sentence")
        if int(head) > 0:
            targets.append(_target((i, i + 1), relation, (int(head) - 1, int(head))))
    return targets


def chunk_targets(sentence: Sentence) -> list[Record]:
    """Return one target for each chunk, by the rules of ``amos tag`` (conlleval)."""
    return [_target((first, last + 1), kind) for kind, first, last in spans_of(chunk_tags(sentence))]


def chunk_tags(sentence: Sentence) -> list[str]:
    """Return the last column."""
    return list(sentence.columns.values())[-1]


def _target(span1: tuple[int, int], label: str, span2: tuple[int, int] | None = None) -> Record:
    spans = {"span1": list(span1)} | ({} if span2 is None else {"span2": list(span2)})
    return spans | {"label": label}


def read_semeval(path: Path) -> list[Record]:
    """Read a file of SemEval-2010 task 8: a number and a quoted sentence, the label, a comment, an empty line.

    Words are separated at spaces and at the tags of both nominals, so that spans are exact.
    """
    records = []
    lines = ((number, line.decode("utf-8").strip()) for number, line in read_lines(path))
    for number, line in lines:
        if not line or line.startswith("Comment"):
            continue
        _, tab, quoted = line.partition("\t")
        words, spans = tagged_words(quoted.removeprefix('"').removesuffix('"'))
        if not tab or set(spans) != {"e1", "e2"} or any(start >= end for start, end in spans.values()):
            raise UserError(
                f"{path}, line {number}: expected a number, a tab, and a sentence with <e1>...</e1> and <e2>...</e2>"
            )
        label = next(lines, (0, ""))[1]
        if not _SEMEVAL_LABEL.fullmatch(label):
            raise UserError(
                f"{path}, line {number + 1}: expected a label such as Cause-Effect(e1,e2) or Other, got {label!r:.60}"
            )
        records.append({"text": " ".join(words), "targets": [_target(spans["e1"], label, spans["e2"])]})
    if not records:
        raise UserError(f"{path} has no sentence: give a file of SemEval-2010 task 8")
    return records


def tagged_words(text: str) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """Return the words of a text with tags, and the span of words (start, end) of each pair of tags."""
    words: list[str] = []
    starts: dict[str, int] = {}
    spans: dict[str, tuple[int, int]] = {}
    for part in _TAGS.split(text):
        if not _TAGS.fullmatch(part):
            words += part.split()
        elif part.startswith("</"):
            spans[part[2:-1]] = (starts.get(part[2:-1], len(words)), len(words))
        else:
            starts[part[1:-1]] = len(words)
    return words, spans


def sentence_record(sentence: Sentence, targets: list[Record]) -> Record:
    """Return a line of JSON. The few words with a space inside lose it: spans count words between spaces.

    A word of spaces alone, such as a no-break space, becomes ``_``.
    """
    return {"text": " ".join("".join(word.split()) or "_" for word in sentence.words), "targets": targets}


class CorpusFormat(NamedTuple):
    """The files that one flag takes.

    Attributes:
        convert: reads a file and returns its records by task.
        names: of each split, how its file is called where a folder is searched, in lower case and without ``.xz``.
    """

    flag: str
    tasks: tuple[str, ...]
    convert: Callable[[Path], dict[str, list[Record]]]
    names: dict[str, re.Pattern]


class Corpus(NamedTuple):
    """The files of one corpus by split; ``valid`` may be missing."""

    paths: dict[str, Path]
    format: CorpusFormat

    def tasks(self) -> dict[str, Splits]:
        """Return the splits of every task; ``valid`` is held out of ``train`` where there is no file."""
        tasks: dict[str, Splits] = {}
        for split, path in self.paths.items():
            for task, records in self.format.convert(path).items():
                tasks.setdefault(task, {})[split] = records
        for task, splits in tasks.items():
            if "valid" not in splits:
                train = splits["train"]
                kept = [record for i, record in enumerate(train) if i % HELD_OUT != HELD_OUT - 1]
                tasks[task] = splits = {"train": kept, "valid": train[HELD_OUT - 1 :: HELD_OUT], "test": splits["test"]}
            self._check(task, splits)
        return tasks

    def _check(self, task: str, splits: Splits) -> None:
        for split, records in splits.items():
            if not any(record["targets"] for record in records):
                path = self.paths.get(split, self.paths["train"])
                raise UserError(f"{task}: {path} gives no target for the {split} split: give a longer file")
        labels = {target["label"] for record in splits["train"] for target in record["targets"]}
        if len(labels) == 1:
            raise UserError(
                f"{task}: {self.paths['train']} has only the label {min(labels)}: there is nothing to learn"
            )


def convert_treebank(path: Path) -> dict[str, list[Record]]:
    tasks: dict[str, list[Record]] = {"pos": [], "dependencies": []}
    for number, sentence in enumerate(read_conllu(path), start=1):
        try:
            dependencies = dependency_targets(sentence)
        except ValueError as error:
            raise UserError(f"{path}, sentence {number}: {error}") from None
        tasks["pos"].append(sentence_record(sentence, pos_targets(sentence)))
        tasks["dependencies"].append(sentence_record(sentence, dependencies))
    return tasks


def convert_chunks(path: Path) -> dict[str, list[Record]]:
    sentences = read_columns(path)
    if not mark_spans(tag for sentence in sentences for tag in chunk_tags(sentence)):
        raise UserError(f"{path}: the last column does not mark chunks by tags such as B-NP, I-NP and O")
    return {"chunks": [sentence_record(one, chunk_targets(one)) for one in sentences]}


def convert_relations(path: Path) -> dict[str, list[Record]]:
    return {"relations": read_semeval(path)}


FORMATS = (
    CorpusFormat(
        "treebank",
        ("pos", "dependencies"),
        convert_treebank,
        {
            "train": re.compile(r"(.*[-_.])?train\.conllu"),
            "valid": re.compile(r"(.*[-_.])?dev\.conllu"),
            "test": re.compile(r"(.*[-_.])?test\.conllu"),
        },
    ),
    CorpusFormat(
        "chunks",
        ("chunks",),
        convert_chunks,
        {"train": re.compile(r"train\.txt"), "valid": re.compile(r"dev\.txt"), "test": re.compile(r"test\.txt")},
    ),
    CorpusFormat(
        "relations",
        ("relations",),
        convert_relations,
        {
            "train": re.compile(r"train_file\.txt"),
            "valid": re.compile(r"dev_file\.txt"),
            "test": re.compile(r"test_file_full\.txt"),
        },
    ),
)


def run(given: argparse.Namespace) -> None:
    """Write all tasks to OUT; nothing is left of it if that fails."""
    corpora, out = corpora_of(given), given.out
    sources = [
        {"read_by": corpus.format.convert.__name__, "split": split, **describe_source(path)}
        for corpus in corpora
        for split, path in corpus.paths.items()
    ]
    if is_finished(out, {"sources": sources}, "probing", MANIFEST):
        return
    tasks = {name: splits for corpus in corpora for name, splits in corpus.tasks().items()}
    with whole_folder(out.absolute()) as unfinished:
        counts = {}
        for name, splits in tasks.items():
            (unfinished / name).mkdir()
            _write_task(unfinished / name, splits)
            counts[name] = _counts(splits)
            say(f"{name}: {_described(counts[name])}")
        content = json_text({"sources": sources, "tasks": counts})
        (unfinished / MANIFEST).write_text(content, encoding="utf-8")
    say(f"done: amos probe --checkpoint RUN --data {shlex.quote(str(out))} --out RESULTS")


def prepare_probing_inside(
    out: Path, corpora: Sequence[Corpus], tasks: Sequence[str] | None, used_by: Callable[[str], Sequence[str]]
) -> list[str]:
    """Write ``tasks`` (None: all that the corpora give) to ``OUT/data/probing``, in OUT of ``amos probe``; return them.

    ``used_by``: of a task, the last argument of :func:`~amos_fairseq.text.prepared_data.prepared_data`.
    """
    corpus_of = {task: corpus for corpus in corpora for task in corpus.format.tasks}
    chosen = list(corpus_of) if tasks is None else list(tasks)
    if missing := [task for task in chosen if task not in corpus_of]:
        raise UserError(f"the corpora give no task {missing[0]!r}: choose from {', '.join(corpus_of)}")
    converted: dict[str, dict[str, Splits]] = {}  # a treebank, which gives two tasks, is read once

    def write(directory: Path, task: str) -> None:
        corpus = corpus_of[task]
        if corpus.format.flag not in converted:
            converted[corpus.format.flag] = corpus.tasks()
        splits = converted[corpus.format.flag][task]
        _write_task(directory, splits)
        say(f"{task}: {_described(_counts(splits))}")

    for task in chosen:
        sources = corpus_of[task].paths
        prepared_data(out, f"probing/{task}", sources, None, {}, functools.partial(write, task=task), used_by(task))
    return chosen


def _write_task(directory: Path, splits: Splits) -> None:
    for split, records in splits.items():
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (directory / f"{split}.jsonl").write_text(text, encoding="utf-8")


def _counts(splits: Splits) -> dict[str, Any]:
    labels = {target["label"] for record in splits["train"] for target in record["targets"]}
    sizes = {
        split: {"texts": len(records), "targets": sum(len(record["targets"]) for record in records)}
        for split, records in splits.items()
    }
    return {"labels": len(labels), "splits": sizes}


def _described(counts: dict[str, Any]) -> str:
    sizes = (f"{split} {own['targets']:,} in {own['texts']:,} texts" for split, own in counts["splits"].items())
    return f"{counts['labels']} labels; targets: {', '.join(sizes)}"


def corpora_of(given: argparse.Namespace) -> list[Corpus]:
    """Return the corpora that the flags name; raise :class:`UserError` for a missing file or none at all."""
    corpora = []
    for format in FORMATS:
        paths = getattr(given, format.flag)
        if paths is None:
            continue
        if len(paths) not in (2, 3):
            raise UserError(
                f"--{format.flag} takes TRAIN TEST or TRAIN DEV TEST: give two or three files, not {len(paths)}"
            )
        check_inputs(paths, f"give it after --{format.flag}")
        names = ("train", "test") if len(paths) == 2 else ("train", "valid", "test")
        corpora.append(Corpus(dict(zip(names, paths, strict=True)), format))
    if not corpora:
        raise UserError("there is nothing to convert: give --treebank, --chunks or --relations")
    return corpora


def corpora_in(folder: Path) -> list[Corpus]:
    """Return the corpora in a folder and in the folders in it, found by the names of their files; none is no error."""
    files = sorted(path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file())
    corpora = []
    for format in FORMATS:
        paths: dict[str, Path] = {}
        for split, name in format.names.items():
            found = [path for path in files if name.fullmatch(_plain_name(path))]
            if len(found) > 1:
                raise UserError(f"{found[0]} and {found[1]} are the {split} split of --{format.flag}: keep one of them")
            if found:
                paths[split] = found[0]
        if paths and not {"train", "test"} <= paths.keys():
            missing = "test" if "train" in paths else "training"
            raise UserError(f"{next(iter(paths.values()))}: there is no {missing} file to it in {folder}: add it")
        corpora += [Corpus(paths, format)] if paths else []
    return corpora


def _plain_name(path: Path) -> str:
    """Return the name in lower case, without the suffix of a compression."""
    return path.name.lower().removesuffix(kind_and_compression(path)[1])
