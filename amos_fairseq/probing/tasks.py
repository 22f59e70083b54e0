"""Targets of edge probing: labeled spans of words, one JSON object per line, in the format of Tenney et al. (2019).

{"text": "The cat sat .", "raw_text": "The cat sat.", "targets": [{"span1": [1, 2], "span2": [2, 3], "label": "nsubj"}]}

A span is [start, end) in the whitespace-separated words of ``text``, counted from 0. ``span2`` is absent in tasks of one span.
``label`` is a string, or a list of the labels that hold, which may be empty. ``raw_text``, which may be absent, is what a
model reads: the same words with other spaces between them. Other keys are ignored.
"""

import argparse
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from amos_fairseq.errors import UserError
from amos_fairseq.files import file_sha256, json_text
from amos_fairseq.inputs.files import read_lines
from amos_fairseq.inputs.raw_words import join_words
from amos_fairseq.inputs.schemes import notation_of, spans_of
from amos_fairseq.inputs.word_files import Sentence, heads_of, read_conllu, read_sentences, spaces_in
from amos_fairseq.output.terminal import say
from amos_fairseq.text.prepared_data import check_paths, describe_source, fill_out
from amos_fairseq.untrusted import field, parse_json, plain_name, text_in

SPLITS = ("train", "valid", "test")
# Tasks in the order of the semantic depth that AMOS "Figure 4" takes from Tenney et al. (2019a); others follow by name.
ORDER = ("pos", "constituents", "chunks", "dependencies", "entities", "srl", "coreference", "spr2", "relations")

# A probe has weights for each label, and a prediction for each label of each target.
MOST_LABELS, MOST_PREDICTIONS = 10_000, 2**30

Span = tuple[int, int]
MANIFEST = "probing.json"
HELD_OUT = 10  # where there is no validation file, every tenth sentence of the training file is held out

_TAGS = re.compile(r"(</?e[12]>)")
_SEMEVAL_SENTENCE = re.compile(r'\d+\t"?(.*?)"?')
_SEMEVAL_LABEL = re.compile(r"Other|[\w-]+\((e1,e2|e2,e1)\)")

Record = dict[str, Any]
Splits = dict[str, list[Record]]


class Target(NamedTuple):
    """One or two spans of words, each (start, end) with an exclusive end, and the labels that hold."""

    spans: tuple[Span, ...]
    labels: tuple[str, ...]


class AnnotatedText(NamedTuple):
    """A text, and what is to be predicted about it; ``targets`` may be empty. ``spaces``: as in ``Tokenizer.encode_words``."""

    words: list[str]
    targets: list[Target]
    spaces: list[bool] | None = None


@dataclass(frozen=True)
class ProbingTask:
    """The texts of one task by split: train, valid and, if there is one, test; the sha256 of the file of each."""

    name: str
    splits: dict[str, list[AnnotatedText]]
    sha256: dict[str, str]

    def __post_init__(self) -> None:
        if reason := self._why_unusable():
            raise UserError(f"{self.name}: {reason}")

    def _why_unusable(self) -> str | None:
        if empty := next((split for split in self.splits if not self.labels_of(split)), None):
            return f"the {empty} split has no target: give a longer file"
        examples = itertools.chain.from_iterable(self.splits.values())
        if len({len(target.spans) for example in examples for target in example.targets}) != 1:
            return "some targets have a span2 and others have none: make two tasks of them"
        if len(set(self.labels_of("train"))) == 1:
            only = f"only the label {self.labels[0]:.60}" if self.labels else "no label"
            return f"the training targets have {only}: there is nothing to learn"
        num_targets = max(len(self.labels_of(split)) for split in self.splits)
        if len(self.labels) > MOST_LABELS or len(self.labels) * num_targets > MOST_PREDICTIONS:
            limits = f"at most {MOST_LABELS:,} labels, and {MOST_PREDICTIONS:,} for all targets together"
            return f"{len(self.labels):,} labels for {num_targets:,} targets are too many ({limits}): omit rare ones"
        return None

    @cached_property
    def labels(self) -> list[str]:
        return sorted({label for labels in self.labels_of("train") for label in labels})

    @property
    def scored_split(self) -> str:
        """The split of the scores; ``valid``, on which the weights are chosen, only if there is no test."""
        return "test" if "test" in self.splits else "valid"

    def labels_of(self, split: str) -> list[tuple[str, ...]]:
        return [target.labels for example in self.splits[split] for target in example.targets]

    def describe(self) -> str:
        """Return the numbers of labels and targets, and the first target as a probe sees it."""
        counts = ", ".join(f"{split} {len(self.labels_of(split)):,}" for split in self.splits)
        words, target = next((text.words, text.targets[0]) for text in self.splits["train"] if text.targets)
        spans = " and ".join(f"{' '.join(words[start:end])!r:.60}" for start, end in target.spans)
        first = f"{spans} -> {', '.join(target.labels) or 'no label'}"
        return f"{self.name}: {len(self.labels)} labels; targets: {counts}; the first: {first}"


def read_tasks(data: Path, chosen: str | None) -> list[ProbingTask]:
    """Return the tasks ("pos,relations"; None: all) of a folder with TASK/train.jsonl, in the order of :data:`ORDER`."""
    # Tables print the names of tasks.
    folders = {path.parent.name: path.parent for path in data.glob("*/train.jsonl") if path.parent.name.isprintable()}
    names = set(folders) if chosen is None else {name.strip() for name in chosen.split(",")}
    if not folders or not names <= folders.keys():
        wanted = f"no task {min(names - folders.keys())!r}" if names else "no folder TASK/train.jsonl"
        present = ", ".join(sorted(map(repr, folders))) or "none; amos prepare probing writes them"
        raise UserError(f"{data} has {wanted}; the tasks there: {present}")
    rank = {name: place for place, name in enumerate(ORDER)}
    return [read_task(folders[name]) for name in sorted(names, key=lambda name: (rank.get(name, len(ORDER)), name))]


def read_task(folder: Path) -> ProbingTask:
    """Read ``{train,valid,test}.jsonl`` in a folder with the name of the task; ``test`` may be missing."""
    paths = {split: folder / f"{split}.jsonl" for split in SPLITS}
    paths = {split: path for split, path in paths.items() if split != "test" or path.is_file()}
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


def parse_example(content: Record) -> AnnotatedText:
    words, spaces = text_in(content.get("text")).split(), None
    if "raw_text" in content and (spaces := spaces_in(text_in(content["raw_text"]), words)) is None:
        raise ValueError(f"raw_text is not the words of text with other spaces between: {content['raw_text']!r:.60}")
    return AnnotatedText(words, [_target(target, len(words)) for target in field(content, "targets", list)], spaces)


def _target(content: Any, num_words: int) -> Target:
    record = content if isinstance(content, dict) else {}
    spans, labels = [record.get("span1")], record.get("label")
    if record.get("span2") is not None:
        spans.append(record["span2"])
    if isinstance(labels, str):
        labels = [labels]
    if not isinstance(labels, list) or not all(_is_span(span, num_words) for span in spans):
        form = f'{{"span1": [start, end], "label": text or list of texts}}, the end exclusive, within {num_words} words'
        raise ValueError(f"a target is {form}, also span2: got {content!r:.100}")
    return Target(tuple(map(tuple, spans)), tuple(dict.fromkeys(map(plain_name, labels))))


def _is_span(span: Any, num_words: int) -> bool:
    is_pair = isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span)
    return is_pair and 0 <= span[0] < span[1] <= num_words


def target_record(span1: tuple[int, int], label: str, span2: tuple[int, int] | None = None) -> Record:
    spans = {"span1": list(span1)} | ({} if span2 is None else {"span2": list(span2)})
    return spans | {"label": plain_name(label)}


def convert_relations(path: Path) -> dict[str, list[Record]]:
    """Read a file of SemEval-2010 task 8: a number and a quoted sentence, the label, a comment, an empty line. Words are
    separated at spaces and at the tags of both nominals, so that spans are exact."""
    records = []
    lines = ((number, line.strip()) for number, line in read_lines(path))
    for number, line in lines:
        if not line or line.startswith("Comment"):
            continue
        sentence, label = _SEMEVAL_SENTENCE.fullmatch(line), next(lines, (0, ""))[1]
        text = sentence[1] if sentence else ""
        words, spans = tagged_words(text)
        has_each_tag_once = sorted(_TAGS.findall(text)) == ["</e1>", "</e2>", "<e1>", "<e2>"]
        is_tagged = has_each_tag_once and all(start < end for start, end in spans.values())
        if not (is_tagged and _SEMEVAL_LABEL.fullmatch(label)):
            form = (
                "a number, a tab and a sentence with one <e1>...</e1> and one <e2>...</e2>, then a line with the label"
            )
            raise UserError(f"{path}, line {number}: expected {form}, Cause-Effect(e1,e2) or Other; got {label!r:.60}")
        records.append(_record(words, _TAGS.sub("", text), [target_record(spans["e1"], label, spans["e2"])]))
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
    """Return a line of JSON. The few words with a space inside lose it, as spans count words between spaces; one of spaces
    alone becomes ``_``."""
    words = ["".join(word.split()) or "_" for word in sentence.words]
    return _record(words, join_words(words, sentence.spaces), targets)


def _record(words: list[str], raw: str, targets: list[Record]) -> Record:
    text, raw = " ".join(words), " ".join(raw.split())
    return {"text": text, **({"raw_text": raw} if raw != text else {}), "targets": targets}


def convert_treebank(path: Path) -> dict[str, list[Record]]:
    """Return the tag of each word, and for each word but the root its relation to its head (Tenney et al., 2019b). A word whose
    tag or relation is ``_``, which CoNLL-U writes where there is none, is no target."""
    tasks: dict[str, list[Record]] = {"pos": [], "dependencies": []}
    file = read_conllu(path)
    file.report(column="upos")
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
    file.report(column=file.label_column())
    sentences = file.sentences
    all_tags = [sentence.columns[file.label_column()] for sentence in sentences]
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


# By the flag of ``amos prepare probing``: reads a file and returns its records by task.
CONVERTERS: dict[str, Callable[[Path], dict[str, list[Record]]]] = {
    "treebank": convert_treebank,
    "chunks": convert_chunks,
    "relations": convert_relations,
}


def run(args: argparse.Namespace) -> None:
    corpora, out = corpora_of(args), args.out
    sources = [
        {"read_by": flag, "split": split, **describe_source(path)}
        for flag, paths in corpora.items()
        for split, path in paths.items()
    ]

    def write(directory: Path) -> None:
        counts = {}
        for flag, paths in corpora.items():
            for name, splits in convert(flag, paths).items():
                counts[name] = write_task(directory / name, splits)
        (directory / MANIFEST).write_text(json_text({"sources": sources, "tasks": counts}), encoding="utf-8")

    if fill_out(out, {"sources": sources}, MANIFEST, write):
        say(f"done: amos probe --checkpoint RUN --data {shlex.quote(str(out))} --out RESULTS")


def corpora_of(args: argparse.Namespace) -> dict[str, dict[str, Path]]:
    """Return the files of each corpus that was given, by flag and split; ``valid`` may be missing."""
    paths = {flag: getattr(args, flag) for flag in CONVERTERS if getattr(args, flag) is not None}
    if not paths or any(len(files) not in (2, 3) for files in paths.values()):
        raise UserError("give --treebank, --chunks or --relations with two or three files, TRAIN [DEV] TEST")
    check_paths([path for files in paths.values() for path in files])
    names = {2: ("train", "test"), 3: SPLITS}
    return {flag: dict(zip(names[len(files)], files, strict=True)) for flag, files in paths.items()}


def convert(flag: str, paths: dict[str, Path]) -> dict[str, Splits]:
    """Return the splits of every task of a corpus; ``valid`` is held out of ``train`` where there is no file."""
    tasks: dict[str, Splits] = {}
    for split, path in paths.items():
        try:
            converted = CONVERTERS[flag](path)
        except ValueError as error:  # a label that is no name
            raise UserError(f"{path}: {error}") from error
        for task, records in converted.items():
            tasks.setdefault(task, {})[split] = records
    for splits in tasks.values():
        if "valid" not in splits:
            train = splits["train"]
            splits["train"] = [record for i, record in enumerate(train) if i % HELD_OUT != HELD_OUT - 1]
            splits["valid"] = train[HELD_OUT - 1 :: HELD_OUT]
    return tasks


def write_task(folder: Path, splits: Splits) -> dict[str, Any]:
    """Write the splits of a task as JSON lines, and return what the manifest says about them."""
    examples = {split: [parse_example(record) for record in splits[split]] for split in SPLITS}
    task = ProbingTask(folder.name, examples, {})
    say(task.describe())
    folder.mkdir()
    for split in SPLITS:
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in splits[split])
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    counts = {split: {"texts": len(task.splits[split]), "targets": len(task.labels_of(split))} for split in SPLITS}
    return {"labels": len(task.labels), "splits": counts}
