"""Targets of edge probing: labeled spans of words, one JSON object per line, in the format of Tenney et al. (2019).

{"text": "The cat sat .", "raw_text": "The cat sat.", "targets": [{"span1": [1, 2], "span2": [2, 3], "label": "nsubj"}]}

Spans count the whitespace-separated words of ``text`` from 0, without their end. ``span2`` is absent in tasks of one span.
``label`` is a string, or a list of the labels that hold, which may be empty. ``raw_text``, which may be absent, is what a
model reads: the same words with other spaces between them. Other keys are ignored.
"""

import argparse
import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from amos_fairseq.errors import UserError
from amos_fairseq.files import file_sha256, json_text, whole_folder
from amos_fairseq.inputs.file_kinds import kind_and_compression
from amos_fairseq.inputs.input_files import read_lines
from amos_fairseq.inputs.schemes import notation_of, spans_of
from amos_fairseq.inputs.sentences import Sentence, join_words, spaces_in
from amos_fairseq.inputs.word_files import heads_of, read_conllu, read_sentences
from amos_fairseq.output.terminal import say
from amos_fairseq.strangers import field, parse_json, plain_name, text_in
from amos_fairseq.text.prepared_data import check_inputs, describe_source, is_finished

SPLITS = ("train", "valid", "test")
# Tasks in the order of the semantic depth that AMOS "Figure 4" takes from Tenney et al. (2019a); others follow by name.
ORDER = ("pos", "constituents", "chunks", "dependencies", "entities", "srl", "coreference", "spr2", "relations")

LONGEST_TEXT = 1_000_000  # characters; a model reads the first few thousand
# A probe has weights for each label, and a prediction for each label of each target.
MOST_LABELS, MOST_PREDICTIONS = 10_000, 2**30

Span = tuple[int, int]
MANIFEST = "probing.json"
HELD_OUT = 10  # where there is no validation file, every tenth sentence of the training file is held out

_TAGS = re.compile(r"(</?e[12]>)")
_SEMEVAL_LABEL = re.compile(r"Other|[\w-]+\((e1,e2|e2,e1)\)")

Record = dict[str, Any]
Splits = dict[str, list[Record]]


class Target(NamedTuple):
    """One or two spans of words, each (start, end) without its end, and the labels that hold."""

    spans: tuple[Span, ...]
    labels: tuple[str, ...]


class AnnotatedText(NamedTuple):
    """A text, and what is to be predicted about it; the targets may be none. ``spaces``: as in ``Tokenizer.encode_words``."""

    words: list[str]
    targets: list[Target]
    spaces: list[bool] | None = None


@dataclass(frozen=True)
class ProbingTask:
    """The texts of one task, and the sha256 of the JSON lines of each split: train, valid and, if there is one, test."""

    name: str
    splits: dict[str, list[AnnotatedText]]
    sha256: dict[str, str]

    def __post_init__(self) -> None:
        for split in self.splits:
            if not self.labels_of(split):
                raise UserError(f"{self.name}: the {split} split has no target: give a longer file")
        examples = (example for of_split in self.splits.values() for example in of_split)
        if len({len(target.spans) for example in examples for target in example.targets}) != 1:
            raise UserError(f"{self.name}: some targets have a span2 and others have none: make two tasks of them")
        if len(set(self.labels_of("train"))) == 1:
            only = f"only the label {self.labels[0]:.60}" if self.labels else "no label"
            raise UserError(f"{self.name}: the training targets have {only}: there is nothing to learn")
        num_targets = max(len(self.labels_of(split)) for split in self.splits)
        if len(self.labels) > MOST_LABELS or len(self.labels) * num_targets > MOST_PREDICTIONS:
            raise UserError(
                f"{self.name}: {len(self.labels):,} labels for {num_targets:,} targets are too many (at most {MOST_LABELS:,} "
                f"labels, and {MOST_PREDICTIONS:,} for all targets together): leave out rare labels, or targets"
            )

    @cached_property
    def labels(self) -> list[str]:
        return sorted({label for labels in self.labels_of("train") for label in labels})

    @property
    def scored_split(self) -> str:
        """The split of the scores; ``valid``, on which the weights are chosen, only if there is no test."""
        return "test" if "test" in self.splits else "valid"

    def labels_of(self, split: str) -> list[tuple[str, ...]]:
        return [target.labels for example in self.splits[split] for target in example.targets]


def choose_tasks(data: Path, present: Collection[str], chosen: str | None) -> list[str]:
    """Return the tasks in the list ``chosen`` ("pos,relations"; None: all), in the order of :data:`ORDER`."""
    if unprintable := [name for name in present if not name.isprintable()]:
        raise UserError(f"{data}: the folder {unprintable[0]!r} has a name that cannot be printed: rename it")
    names = set(present) if chosen is None else {name.strip() for name in chosen.split(",")}
    if missing := names - set(present):
        raise UserError(f"{data} has no task {min(missing)!r}: give one of {', '.join(sorted(present))}")
    return sorted_tasks(names)


def sorted_tasks(names: Iterable[str]) -> list[str]:
    """Return the names in the order of :data:`ORDER`, others by name after them."""
    return sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def read_task(folder: Path) -> ProbingTask:
    """Read ``{train,valid,test}.jsonl`` in a folder with the name of the task; ``test`` may be missing."""
    paths = {split: folder / f"{split}.jsonl" for split in SPLITS}
    for split, reason in (("train", "a probe learns from it"), ("valid", "the weights of a probe are chosen on it")):
        if not paths[split].is_file():
            raise UserError(f"{paths[split]} is missing, or no file: {reason}")
    paths = {split: path for split, path in paths.items() if path.is_file()}
    splits = {split: read_examples(path) for split, path in paths.items()}
    return ProbingTask(folder.name, splits, {split: file_sha256(path) for split, path in paths.items()})


def read_examples(path: Path) -> list[AnnotatedText]:
    examples = []
    for number, line in read_lines(path):
        if line.strip():
            try:
                examples.append(parse_example(parse_json(line)))
            except ValueError as error:
                raise UserError(f"{path}, line {number}: {error}") from None
    return examples


def parse_example(content: dict[str, Any]) -> AnnotatedText:
    text = text_in(content.get("text"))
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"the text has {len(text):,} characters, at most {LONGEST_TEXT:,} are read: divide it")
    words, spaces = text.split(), None
    if "raw_text" in content and (spaces := spaces_in(text_in(content["raw_text"]), words)) is None:
        raise ValueError(
            f"raw_text is not the words of text with other spaces between them: {content['raw_text']!r:.60}"
        )
    return AnnotatedText(words, [_target(target, len(words)) for target in field(content, "targets", list)], spaces)


def _target(content: Any, num_words: int) -> Target:
    if not isinstance(content, dict) or "span1" not in content or "label" not in content:
        raise ValueError(f'a target needs "span1" and "label", got {content!r:.60}')
    spans = [content["span1"], *([content["span2"]] if content.get("span2") is not None else [])]
    for span in spans:
        is_pair = isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span)
        if not (is_pair and 0 <= span[0] < span[1] <= num_words):
            raise ValueError(
                f"the span {span!r:.60} is empty or not within the {num_words} words of the text (the end is exclusive)"
            )
    labels = [content["label"]] if isinstance(content["label"], str) else content["label"]
    if not (isinstance(labels, list) and all(isinstance(label, str) and label for label in labels)):
        raise ValueError(f"the label is a string or a list of strings, got {content['label']!r:.60}")
    return Target(tuple((span[0], span[1]) for span in spans), tuple(dict.fromkeys(map(plain_name, labels))))


def target_record(span1: tuple[int, int], label: str, span2: tuple[int, int] | None = None) -> Record:
    spans = {"span1": list(span1)} | ({} if span2 is None else {"span2": list(span2)})
    return spans | {"label": label}


def convert_relations(path: Path) -> dict[str, list[Record]]:
    """Read a file of SemEval-2010 task 8: a number and a quoted sentence, the label, a comment, an empty line.

    Words are separated at spaces and at the tags of both nominals, so that spans are exact.
    """
    records = []
    lines = ((number, line.strip()) for number, line in read_lines(path))
    for number, line in lines:
        if not line or line.startswith("Comment"):
            continue
        _, tab, quoted = line.partition("\t")
        text = quoted.removeprefix('"').removesuffix('"')
        words, spans = tagged_words(text)
        has_each_tag_once = sorted(_TAGS.findall(quoted)) == ["</e1>", "</e2>", "<e1>", "<e2>"]
        if not (tab and has_each_tag_once and all(start < end for start, end in spans.values())):
            raise UserError(
                f"{path}, line {number}: expected a number, a tab, and a sentence with one <e1> and one <e2>"
            )
        label = next(lines, (0, ""))[1]
        if not _SEMEVAL_LABEL.fullmatch(label):
            raise UserError(f"{path}, line {number + 1}: expected Cause-Effect(e1,e2) or such, got {label!r:.60}")
        records.append(_record(words, _TAGS.sub("", text), [target_record(spans["e1"], label, spans["e2"])]))
    if not records:
        raise UserError(f"{path} has no sentence: give a file of SemEval-2010 task 8")
    return {"relations": records}


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
    words = ["".join(word.split()) or "_" for word in sentence.words]
    return _record(words, join_words(words, sentence.spaces), targets)


def _record(words: list[str], raw: str, targets: list[Record]) -> Record:
    text, raw = " ".join(words), " ".join(raw.split())
    return {"text": text, **({"raw_text": raw} if raw != text else {}), "targets": targets}


class CorpusFormat(NamedTuple):
    flag: str
    tasks: tuple[str, ...]
    convert: Callable[[Path], dict[str, list[Record]]]  # reads a file and returns its records by task
    # Patterns of the names of train, valid and test where a folder is searched, in lower case and without .xz.
    names: tuple[str, str, str]


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
                tasks[task] = {"train": kept, "valid": train[HELD_OUT - 1 :: HELD_OUT], "test": splits["test"]}
        return tasks


def convert_treebank(path: Path) -> dict[str, list[Record]]:
    """Return the tag of each word, and for each word but the root its relation to its head (Tenney et al., 2019b). A word whose
    tag or relation is ``_``, which CoNLL-U writes where there is none, is no target."""
    tasks: dict[str, list[Record]] = {"pos": [], "dependencies": []}
    file = read_conllu(path)
    file.report()
    for sentence in file.sentences:
        tags = [target_record((i, i + 1), tag) for i, tag in enumerate(sentence.columns["upos"]) if tag != "_"]
        arcs = []
        for i, (head, relation) in enumerate(zip(heads_of(path, sentence), sentence.columns["deprel"], strict=True)):
            if head > 0 and relation != "_":
                arcs.append(target_record((i, i + 1), relation, (head - 1, head)))
        tasks["pos"].append(sentence_record(sentence, tags))
        tasks["dependencies"].append(sentence_record(sentence, arcs))
    return tasks


def convert_chunks(path: Path) -> dict[str, list[Record]]:
    """Return one target for each chunk, which the last column marks, by the rules of ``amos tag`` (conlleval)."""
    file = read_sentences(path)
    file.report()
    sentences = file.sentences
    all_tags = [list(sentence.columns.values())[-1] for sentence in sentences]
    counts = Counter(tag for tags in all_tags for tag in tags)
    notation = notation_of(counts)
    if not notation.keys() >= counts.keys():
        raise UserError(f"{path}: the last column does not mark chunks by tags such as B-NP, I-NP and O")
    records = []
    for sentence, tags in zip(sentences, all_tags, strict=True):
        spans = spans_of([notation[tag] for tag in tags])
        chunks = [target_record((first, last + 1), label) for label, first, last in spans]
        records.append(sentence_record(sentence, chunks))
    return {"chunks": records}


_TREEBANK_FILES = (r"(.*[-_.])?train\.conllu", r"(.*[-_.])?dev\.conllu", r"(.*[-_.])?test\.conllu")
_CHUNK_FILES = (r"train\.txt", r"dev\.txt", r"test\.txt")
_RELATION_FILES = (r"train_file\.txt", r"dev_file\.txt", r"test_file_full\.txt")
FORMATS = (
    CorpusFormat("treebank", ("pos", "dependencies"), convert_treebank, _TREEBANK_FILES),
    CorpusFormat("chunks", ("chunks",), convert_chunks, _CHUNK_FILES),
    CorpusFormat("relations", ("relations",), convert_relations, _RELATION_FILES),
)


def run(args: argparse.Namespace) -> None:
    corpora, out = corpora_of(args), args.out
    sources = [
        {"read_by": corpus.format.convert.__name__, "split": split, **describe_source(path)}
        for corpus in corpora
        for split, path in corpus.paths.items()
    ]
    if is_finished(out, {"sources": sources}, "probing", MANIFEST):
        return
    tasks = {name: splits for corpus in corpora for name, splits in corpus.tasks().items()}
    num_labels = {name: len(task_of(name, splits).labels) for name, splits in tasks.items()}
    counts: dict[str, Any] = {}
    with whole_folder(out.absolute()) as unfinished:
        for name, splits in tasks.items():
            (unfinished / name).mkdir()
            counts[name] = {"labels": num_labels[name], "splits": {}}
            for split, records in splits.items():
                (unfinished / name / f"{split}.jsonl").write_text(json_lines(records), encoding="utf-8")
                num_targets = sum(len(record["targets"]) for record in records)
                counts[name]["splits"][split] = {"texts": len(records), "targets": num_targets}
                say(f"{name}, {split}: {num_targets:,} targets in {len(records):,} texts; labels: {num_labels[name]}")
        manifest = {"sources": sources, "tasks": counts}
        (unfinished / MANIFEST).write_text(json_text(manifest), encoding="utf-8")
    say(f"done: amos probe --checkpoint RUN --data {shlex.quote(str(out))} --out RESULTS")


def read_tasks(data: Path, chosen: str | None) -> list[ProbingTask]:
    """Return the tasks ("pos,relations"; None: all) of a folder with TASK/train.jsonl, or of the corpora in it."""
    if folders := {path.parent.name: path.parent for path in data.glob("*/train.jsonl")}:
        return [read_task(folders[name]) for name in choose_tasks(data, folders, chosen)]
    corpora = corpora_in(data)
    if not corpora:
        raise UserError(f"{data} has no task (TASK/train.jsonl) and no corpus: give what docs/probing.md names")
    names = choose_tasks(data, [task for corpus in corpora for task in corpus.format.tasks], chosen)
    tasks: dict[str, Splits] = {}
    for corpus in corpora:
        if not set(names).isdisjoint(corpus.format.tasks):
            tasks |= corpus.tasks()
    return [task_of(name, tasks[name]) for name in names]


def task_of(name: str, splits: Splits) -> ProbingTask:
    """Return a task as it would be read from the JSON lines of its records."""
    try:
        examples = {split: [parse_example(record) for record in splits[split]] for split in SPLITS}
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    sha256 = {split: hashlib.sha256(json_lines(splits[split]).encode("utf-8")).hexdigest() for split in SPLITS}
    return ProbingTask(name, examples, sha256)


def json_lines(records: Sequence[Record]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def corpora_of(args: argparse.Namespace) -> list[Corpus]:
    corpora = []
    for format in FORMATS:
        paths = getattr(args, format.flag)
        if paths is None:
            continue
        if len(paths) not in (2, 3):
            raise UserError(f"--{format.flag} takes two or three files, TRAIN [DEV] TEST, not {len(paths)}")
        check_inputs(paths, f"give it after --{format.flag}")
        names = ("train", "test") if len(paths) == 2 else ("train", "valid", "test")
        corpora.append(Corpus(dict(zip(names, paths, strict=True)), format))
    if not corpora:
        raise UserError("there is nothing to convert: give --treebank, --chunks or --relations")
    return corpora


def corpora_in(folder: Path) -> list[Corpus]:
    """Return the corpora in a folder and in the folders in it, found by the names of their files; none is no error."""
    files = sorted(path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file())
    # In lower case, without the suffix of a compression.
    names = {path: path.name.lower().removesuffix(kind_and_compression(path)[1]) for path in files}
    corpora = []
    for format in FORMATS:
        paths: dict[str, Path] = {}
        for split, name in zip(SPLITS, format.names, strict=True):
            matching = [path for path in files if re.fullmatch(name, names[path])]
            if len(matching) > 1:
                one, other = matching[:2]
                raise UserError(f"{one} and {other} are the {split} split of --{format.flag}: keep one of them")
            if matching:
                paths[split] = matching[0]
        if paths and not {"train", "test"} <= paths.keys():
            missing = "test" if "train" in paths else "training"
            raise UserError(f"{next(iter(paths.values()))}: there is no {missing} file to it in {folder}: add it")
        corpora += [Corpus(paths, format)] if paths else []
    return corpora
