"""Targets of edge probing: labeled spans of words, one JSON object per line, in the format of Tenney et al. (2019).

{"text": "The cat sat .", "raw_text": "The cat sat.", "targets": [{"span1": [1, 2], "span2": [2, 3], "label": "nsubj"}]}

Spans count the whitespace-separated words of ``text`` from 0, without their end. ``span2`` is absent in tasks of one span.
``label`` is a string, or a list of the labels that hold, which may be empty. ``raw_text``, which may be absent, is what a
model reads: the same words with other spaces between them. Other keys are ignored.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from amos_fairseq.downstream.tagging.sentences import spaces_in
from amos_fairseq.errors import UserError
from amos_fairseq.files import file_sha256
from amos_fairseq.strangers import field, parse_json, plain_name, text_in
from amos_fairseq.text.input_files import read_lines

SPLITS = ("train", "valid", "test")
# Tasks in the order of the semantic depth that AMOS "Figure 4" takes from Tenney et al. (2019a); others follow by name.
ORDER = ("pos", "constituents", "chunks", "dependencies", "entities", "srl", "coreference", "spr2", "relations")

LONGEST_TEXT = 1_000_000  # characters; a model reads the first few thousand
# A probe has weights for each label, and a prediction for each label of each target.
MOST_LABELS, MOST_PREDICTIONS = 10_000, 2**30

Span = tuple[int, int]


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
