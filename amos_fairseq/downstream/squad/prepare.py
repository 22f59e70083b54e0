"""``amos prepare squad``: convert SQuAD to the input of the task ``squad``.

Read both files -> sample training questions -> encode, align, write to a temporary directory -> rename.
"""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.downstream.squad.official import (
    Answer,
    Paragraph,
    Question,
    SquadFile,
    normalize_answer,
    read_squad,
    task_name,
)
from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text, whole_folder
from amos_fairseq.fingerprint import files_sha256
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.text.encoding import NUM_FAIRSEQ_SYMBOLS, UNKNOWN_ID, BinarizedFile, SymbolIds
from amos_fairseq.text.prepared_data import (
    Sample,
    check_inputs,
    describe_source,
    is_finished,
    prepared_data,
    save_tokenizer,
)
from amos_fairseq.text.tokenization import Tokenizer, load_tokenizer

ADVICE = "give an official file of SQuAD"
NAMED_ANSWERS = 20  # of each kind that do not fit, in squad.json


def run(arguments: argparse.Namespace) -> None:
    """Write both files to OUT; nothing is left of it if that fails."""
    sources = {"train": arguments.train, "valid": arguments.dev}
    check_inputs(list(sources.values()), ADVICE)
    if arguments.max_train_questions is not None and arguments.max_train_questions < 1:
        raise UserError(f"--max-train-questions {arguments.max_train_questions} must be at least 1")
    out, tokenizer = arguments.out, load_tokenizer(arguments.tokenizer)
    sample = Sample(arguments.max_train_questions, arguments.seed)
    # fairseq takes seconds to import.
    from amos_fairseq.downstream.squad.dataset import MANIFEST

    description = _describe(sources, tokenizer, sample)
    if is_finished(out, description, "SQuAD", MANIFEST):
        return
    files = {split: read_squad(path) for split, path in sources.items()}
    with whole_folder(out.absolute()) as unfinished:
        _write(unfinished, files, description, tokenizer, sample)
    say(f"done: fairseq-train {out} --user-dir amos_fairseq --task squad ...; counts in {out}/{MANIFEST}")


def prepare_squad_inside(out: Path, train: Path, dev: Path, tokenizer: Tokenizer) -> Path:
    """Return what ``amos prepare squad`` makes of both files, inside of OUT of ``amos squad``."""
    sources, sample = {"train": train, "valid": dev}, Sample(None, seed=1)
    check_inputs(list(sources.values()), ADVICE)
    dev_file = read_squad(dev)
    name = task_name(any(question.is_impossible for question in dev_file.questions()))

    def write(directory: Path) -> None:
        files = {"train": read_squad(train), "valid": dev_file}
        _write(directory, files, _describe(sources, tokenizer, sample), tokenizer, sample)

    return prepared_data(out, name, sources, tokenizer, {}, write, used_by=[f"runs/{name}"])


def _describe(sources: dict[str, Path], tokenizer: Tokenizer, sample: Sample) -> dict[str, Any]:
    return {
        "settings": sample.describe("max_train_questions"),
        "tokenizer_sha256": tokenizer.sha256,
        "sources": {split: describe_source(path) for split, path in sources.items()},
    }


def sample_questions(paragraphs: Sequence[Paragraph], sample: Sample) -> Sequence[Paragraph]:
    """Return the chosen questions, in the file's order, without paragraphs that have none of them."""
    if sample.limit is None:
        return paragraphs
    chosen = set(sample.choose(sum(len(paragraph.questions) for paragraph in paragraphs)))
    sampled, position = [], 0
    for paragraph in paragraphs:
        selected = tuple(q for offset, q in enumerate(paragraph.questions) if position + offset in chosen)
        position += len(paragraph.questions)
        if selected:
            sampled.append(dataclasses.replace(paragraph, questions=selected))
    return sampled


def _write(
    directory: Path, files: dict[str, SquadFile], description: dict[str, Any], tokenizer: Tokenizer, sample: Sample
) -> None:
    from amos_fairseq.downstream.squad.dataset import MANIFEST

    paragraphs = {split: file.paragraphs for split, file in files.items()}
    paragraphs["train"] = sample_questions(paragraphs["train"], sample)
    save_tokenizer(tokenizer, directory)
    facts = {}
    for split, file in files.items():
        total = sum(len(paragraph.questions) for paragraph in paragraphs[split])
        with progress_bar(total, f"{split}: encode", "question", delay=2) as bar:
            counted = write_squad_split(directory, split, paragraphs[split], tokenizer, bar.update)
        in_file = {"version": file.version, "source_questions": sum(1 for _ in file.questions())}
        facts[split] = in_file | dataclasses.asdict(counted)
        report(file.path, split, facts[split])
    content = json_text(description | {"splits": facts, "sha256": files_sha256(directory)})
    (directory / MANIFEST).write_text(content, encoding="utf-8")


def report(path: Path, split: str, facts: dict[str, Any]) -> None:
    answers, total = facts["answers"], sum(facts["answers"].values())
    if 2 * answers["misplaced"] > total:
        problem = f"{answers['misplaced']} of {total} answers are not at their answer_start"
        raise UserError(f"{path}: {problem}: the starts must count characters (not bytes) of the context in the file")
    of = f" of {facts['source_questions']}" if facts["questions"] < facts["source_questions"] else ""
    say(
        f"{split}: {facts['questions']}{of} questions ({facts['impossible']} without an answer) on {facts['paragraphs']} "
        f"paragraphs; longest context {facts['longest_context']} tokens, longest question {facts['longest_question']}"
    )
    say(
        f"{split}: of {total} answers {answers['exact']} are at token boundaries; {answers['wider']} "
        f"({answers['wider'] / max(1, total):.2%}) end inside a token and include all of it; {answers['lost']} have no token, "
        f"{answers['misplaced']} are not at their answer_start: {facts['untrainable']} questions are not used in training"
    )


class Fit(str, Enum):
    """The match between an answer and the text of its tokens.

    ``exact``: it scores an exact match. ``wider``: the answer ends inside a token ("1910" in "1910s"), so the smallest span
    of tokens that contains it has more text. ``lost``: no token covers its characters. ``misplaced``: the context does not
    contain the answer at its ``answer_start``.
    """

    EXACT = "exact"
    WIDER = "wider"
    LOST = "lost"
    MISPLACED = "misplaced"


def align_answer(
    answer: Answer, context: str, starts: np.ndarray, ends: np.ndarray
) -> tuple[tuple[int, int] | None, Fit]:
    """Return the first and last token of an answer, or None if it is lost or misplaced.

    Args:
        starts, ends: [length] characters ``[start, end)`` of each context token; empty for a token without characters.
    """
    if context[answer.start : answer.start + len(answer.text)] != answer.text or answer.start < 0:
        return None, Fit.MISPLACED
    # No token covers spaces at the ends of an answer, so they select no further tokens.
    inside = np.flatnonzero((starts < ends) & (ends > answer.start) & (starts < answer.start + len(answer.text)))
    if len(inside) == 0:
        return None, Fit.LOST
    first, last = int(inside[0]), int(inside[-1])
    found = context[starts[first] : ends[last]]
    fits = normalize_answer(found) == normalize_answer(answer.text)
    return (first, last), Fit.EXACT if fits else Fit.WIDER


@dataclass
class SplitFacts:
    """Counts for ``squad.json``. ``untrainable``: questions with answers that are all lost or misplaced."""

    paragraphs: int = 0
    questions: int = 0
    impossible: int = 0
    untrainable: int = 0
    context_tokens: int = 0
    longest_context: int = 0
    longest_question: int = 0
    unknown: int = 0
    answers: dict[str, int] = field(default_factory=lambda: {fit.value: 0 for fit in Fit})
    named: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add_answer(self, fit: Fit, question: Question, answer: Answer, text_of_tokens: str) -> None:
        self.answers[fit.value] += 1
        if fit is not Fit.EXACT:
            named = self.named.setdefault(fit.value, [])
            if len(named) < NAMED_ANSWERS:
                named.append({"id": question.id, "answer": answer.text, "tokens_give": text_of_tokens})


def write_squad_split(
    directory: Path, split: str, paragraphs: Sequence[Paragraph], tokenizer: Tokenizer, on_done: Callable[[int], object]
) -> SplitFacts:
    """Write all paragraphs of a split. ``on_done`` is called with the number of questions newly written."""
    from amos_fairseq.downstream.squad.dataset import TOKEN_ARRAYS, AlignedAnswer, Example

    ids_of, facts = SymbolIds(tokenizer).of, SplitFacts()
    # Offsets count characters of one paragraph.
    symbols = dict.fromkeys(("question", "context"), len(tokenizer) + NUM_FAIRSEQ_SYMBOLS)
    with contextlib.ExitStack() as files:
        arrays = {
            name: files.enter_context(BinarizedFile(directory / f"{split}.{name}", symbols.get(name)))
            for name in TOKEN_ARRAYS
        }
        examples, contexts = (
            files.enter_context((directory / f"{split}.{name}.jsonl").open("w", encoding="utf-8", newline="\n"))
            for name in ("examples", "contexts")
        )

        def add_ids(name: str, pieces: Sequence[str]) -> None:
            ids = ids_of(pieces)
            facts.unknown += ids.count(UNKNOWN_ID)
            arrays[name].add_line(ids)

        for paragraph in paragraphs:
            context = paragraph.context
            aligned = tokenizer.encode_with_offsets(context)
            starts, ends = (np.array([token[place] for token in aligned], dtype=np.int32) for place in (1, 2))
            add_ids("context", [piece for piece, _, _ in aligned])
            arrays["context_start"].add_line(starts)
            arrays["context_end"].add_line(ends)
            contexts.write(json.dumps({"title": paragraph.title, "text": context}, ensure_ascii=False) + "\n")
            for question in paragraph.questions:
                pieces = tokenizer.encode(question.text)
                add_ids("question", pieces)
                answers = []
                for answer in question.answers:
                    tokens, fit = align_answer(answer, context, starts, ends)
                    answers.append(AlignedAnswer(answer.text, answer.start, tokens))
                    text_of_tokens = "" if tokens is None else context[starts[tokens[0]] : ends[tokens[1]]]
                    facts.add_answer(fit, question, answer, text_of_tokens)
                example = Example(question.id, facts.paragraphs, tuple(answers), question.is_impossible)
                examples.write(example.to_json() + "\n")
                facts.questions += 1
                facts.impossible += question.is_impossible
                facts.untrainable += bool(answers) and example.target is None
                facts.longest_question = max(facts.longest_question, len(pieces))
            facts.paragraphs += 1
            facts.context_tokens += len(aligned)
            facts.longest_context = max(facts.longest_context, len(aligned))
            on_done(len(paragraph.questions))
    return facts
