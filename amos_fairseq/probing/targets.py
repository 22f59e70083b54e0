"""Targets of edge probing: labeled spans of words, one JSON object per line, in the format of Tenney et al. (2019).

{"text": "The cat sat down .", "targets": [{"span1": [1, 2], "span2": [2, 3], "label": "nsubj"}]}

Spans count the whitespace-separated words of ``text`` from 0, without their end. ``span2`` is absent in tasks of one span.
``label`` is a string, or a list of the labels that hold, which may be empty. Other keys are ignored.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from amos_fairseq.errors import UserError
from amos_fairseq.files import file_sha256
from amos_fairseq.strangers import is_unicode, parse_json, plain_name
from amos_fairseq.text.input_files import read_lines

SPLITS = ("train", "valid", "test")
# Tasks in the order of the semantic depth that AMOS "Figure 4" takes from Tenney et al. (2019a); others follow by name.
ORDER = ("pos", "constituents", "chunks", "dependencies", "entities", "srl", "coreference", "spr2", "relations")

NOT_JSON = 'not JSON: expected an object with "text" and "targets" in each line'
Span = tuple[int, int]


class Target(NamedTuple):
    """One or two spans of words, each (start, end) without its end, and the labels that hold."""

    spans: tuple[Span, ...]
    labels: tuple[str, ...]


class AnnotatedText(NamedTuple):
    """A text, and what is to be predicted about it; the targets may be none."""

    words: list[str]
    targets: list[Target]


@dataclass(frozen=True)
class ProbingTask:
    """The files of one task.

    Attributes:
        splits: train, valid and, if there is one, test.
        labels: those of the training targets, sorted. Others cannot be predicted.
        num_spans: 1 or 2.
        sha256: of each file.
    """

    name: str
    splits: dict[str, list[AnnotatedText]]
    labels: list[str]
    num_spans: int
    sha256: dict[str, str]

    @property
    def scored_split(self) -> str:
        """The split of the scores; ``valid``, on which the weights are chosen, only if there is no test."""
        return "test" if "test" in self.splits else "valid"

    def labels_of(self, split: str) -> list[tuple[str, ...]]:
        """Return the labels of every target of a split."""
        return [target.labels for example in self.splits[split] for target in example.targets]


def task_names(data: Path, chosen: str | None = None) -> list[str]:
    """Return the tasks of a folder, or those of the list ``chosen`` ("pos,relations"), in the order of :data:`ORDER`."""
    present = {path.parent.name for path in data.glob("*/train.jsonl")}
    if unprintable := [name for name in present if not name.isprintable()]:
        raise UserError(f"{data}: the folder {unprintable[0]!r} has a name that cannot be printed: rename it")
    if not present:
        raise UserError(
            f"{data} has no task (TASK/train.jsonl, TASK/valid.jsonl): give the folder of a treebank, of CoNLL-2000 or of "
            "SemEval-2010 task 8, or what amos prepare wrote"
        )
    names = present if chosen is None else {name.strip() for name in chosen.split(",")}
    if missing := names - present:
        raise UserError(f"{data} has no task {min(missing)!r}: give one of {', '.join(sorted(present))}")
    return sorted_tasks(names)


def sorted_tasks(names: Iterable[str]) -> list[str]:
    """Return the names in the order of :data:`ORDER`, others by name after them."""
    return sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def read_task(data: Path, name: str) -> ProbingTask:
    """Read ``data/name/{train,valid,test}.jsonl``."""
    paths = {split: data / name / f"{split}.jsonl" for split in SPLITS}
    for split, reason in (("train", "a probe learns from it"), ("valid", "the weights of a probe are chosen on it")):
        if not paths[split].is_file():
            raise UserError(f"{paths[split]} is missing, or no file: {reason}")
    paths = {split: path for split, path in paths.items() if path.is_file()}
    splits = {split: read_examples(path) for split, path in paths.items()}
    num_spans = {len(target.spans) for examples in splits.values() for one in examples for target in one.targets}
    if len(num_spans) != 1:
        raise UserError(f"{data / name}: some targets have a span2 and others have none: make two tasks of them")
    labels = sorted({label for one in splits["train"] for target in one.targets for label in target.labels})
    if not labels:
        raise UserError(f"{paths['train']} has no label: there is nothing to learn")
    return ProbingTask(name, splits, labels, num_spans.pop(), {s: file_sha256(path) for s, path in paths.items()})


def read_examples(path: Path) -> list[AnnotatedText]:
    """Read one file."""
    examples = []
    for number, line in read_lines(path):
        if line.strip():
            reason = NOT_JSON
            try:
                content = parse_json(line, object)
                reason = ""
                examples.append(_example(content))
            except ValueError as error:
                raise UserError(f"{path}, line {number}: {reason or error}") from None
    if not any(example.targets for example in examples):
        raise UserError(f"{path} has no target: give a file of labeled spans")
    return examples


def _example(content: Any) -> AnnotatedText:
    if not (isinstance(content, dict) and isinstance(content.get("text"), str)):
        raise ValueError('expected an object with a string "text"')
    if not isinstance(content.get("targets"), list):
        raise ValueError('expected a list "targets"')
    if not is_unicode(content["text"]):
        raise ValueError('"text" is not Unicode: it has half of a surrogate pair')
    words = content["text"].split()
    return AnnotatedText(words, [_target(target, len(words)) for target in content["targets"]])


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
