"""``amos prepare squad``: convert SQuAD to the input of the task ``squad``.

Read both files -> sample training questions -> encode, align, write to a temporary directory -> rename.
"""

import argparse
import contextlib
import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.files import in_mib
from amos_fairseq.inputs.question_files import (
    LARGEST_FILE_BYTES,
    MANIFEST,
    TOKEN_ARRAYS,
    Answer,
    Example,
    Paragraph,
    named,
    read_squad,
    words_of,
)
from amos_fairseq.inputs.tables import seen_note
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.text.encoding import NUM_FAIRSEQ_SYMBOLS, UNKNOWN_ID, BinarizedFile, describe_loss, lost_shares
from amos_fairseq.text.prepared_data import (
    Sample,
    description_of,
    fill_out,
    prepared_data,
    save_tokenizer,
    say_first_example,
    write_manifest,
)
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.tokenizer import BOS, EOS, Tokenizer

# How an answer fits the text of its tokens. "exact": it scores an exact match. "wider": it ends inside a token ("1910" in
# "1910s"), so that the smallest span of tokens that contains it has more text. "lost": no token covers its characters.
# "misplaced": the context does not contain it at its ``answer_start``.
FITS = (EXACT, WIDER, LOST, MISPLACED) = ("exact", "wider", "lost", "misplaced")
NAMED_ANSWERS = 20  # of each that do not fit, in squad.json


def run(arguments: argparse.Namespace) -> None:
    sources = {"train": arguments.train, "valid": arguments.dev}
    check_sizes(sources)
    out, tokenizer = arguments.out, load_tokenizer(arguments.tokenizer)
    sample = Sample(arguments.max_train_questions, arguments.seed)
    description = description_of(sources, tokenizer, sample.describe("max_train_questions"))
    if fill_out(out, description, MANIFEST, lambda folder: _write(folder, sources, description, tokenizer, sample)):
        command = f"fairseq-train {shlex.quote(str(out))} --user-dir amos_fairseq --task squad ..."
        say(f"done: {command}; counts in {out}/{MANIFEST}")


def prepare_squad_inside(out: Path, train: Path, dev: Path, tokenizer: Tokenizer) -> Path:
    """Return what ``amos prepare squad`` makes of both files, inside of OUT of ``amos squad``."""
    sources, sample = {"train": train, "valid": dev}, Sample(None, seed=1)
    check_sizes(sources)
    description = description_of(sources, tokenizer, sample.describe("max_train_questions"))
    return prepared_data(
        out, "squad", description, lambda folder: _write(folder, sources, description, tokenizer, sample)
    )


def check_sizes(sources: Mapping[str, Path]) -> None:
    """Refuse a file that is too large to be read, before its sha256 is computed."""
    for path in sources.values():
        if path.is_file() and path.stat().st_size > LARGEST_FILE_BYTES:
            raise UserError(f"{path} holds more than {in_mib(LARGEST_FILE_BYTES)}: divide it into smaller files")


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
            sampled.append(paragraph._replace(questions=selected))
    return sampled


def _write(
    directory: Path, sources: dict[str, Path], description: dict[str, Any], tokenizer: Tokenizer, sample: Sample
) -> None:
    files = {split: read_squad(path) for split, path in sources.items()}
    save_tokenizer(tokenizer, directory)
    facts = {}
    written = {split: file.paragraphs for split, file in files.items()}
    written["train"] = sample_questions(written["train"], sample)
    first = written["train"][0]
    question, *_ = first.questions
    pieces = [*tokenizer.encode(question.text), EOS, *tokenizer.encode(first.context), EOS]
    say_first_example([BOS, *pieces], question.answers[0].text if question.answers else "no answer")
    for split, file in files.items():
        paragraphs = written[split]
        total = sum(len(paragraph.questions) for paragraph in paragraphs)
        with progress_bar(total, f"{split}: encode", "question", delay=2) as bar:
            counted = write_squad_split(directory, split, paragraphs, tokenizer, bar.update)
        facts[split] = {"version": file.version, "source_questions": len(file.questions), **counted}
        facts[split]["notes"] = list(seen_notes(written)) if split == "valid" else []
        report(split, facts[split])
    write_manifest(directory / MANIFEST, description | {"splits": facts})


def seen_notes(splits: dict[str, Sequence[Paragraph]]) -> Iterator[str]:
    """Yield a note if dev questions train too."""
    asked = {
        split: [(paragraph.context, question.text) for paragraph in paragraphs for question in paragraph.questions]
        for split, paragraphs in splits.items()
    }
    trained = set(asked["train"])
    if seen := sum(question in trained for question in asked["valid"]):
        yield seen_note(seen, len(asked["valid"]), "questions")


def report(split: str, facts: dict[str, Any]) -> None:
    answers, total = facts["answers"], sum(facts["answers"].values())
    of_all = f" of {facts['source_questions']}" if facts["questions"] < facts["source_questions"] else ""
    say(
        f"{split}: {facts['questions']}{of_all} questions ({facts['impossible']} without an answer) on {facts['paragraphs']} "
        f"paragraphs; longest context {facts['longest_context']} tokens, longest question {facts['longest_question']}"
        f"; {describe_loss(facts)}"
    )
    say(
        f"{split}: of {total} answers {answers[EXACT]} are at token boundaries; {answers[WIDER]} "
        f"({answers[WIDER] / max(1, total):.2%}) end inside a token and include all of it; {answers[LOST]} have no token, "
        f"{answers[MISPLACED]} are not at their answer_start: {facts['untrainable']} questions are not used in training"
    )
    if unused := [answer["id"] for fit in (LOST, MISPLACED) for answer in facts["named"].get(fit, ())]:
        say(f"{split}: answers without a place in the tokens of their context: {named(unused)}")
    for note in facts["notes"]:
        say(f"{split}: {note}")


def align_answer(
    answer: Answer, context: str, starts: np.ndarray, ends: np.ndarray
) -> tuple[tuple[int, int] | None, str]:
    """Return the first and last token of an answer, or None if it is lost or misplaced, and one of :data:`FITS`. ``starts``,
    ``ends``: [length] characters ``[start, end)`` of each context token; empty for a token without characters."""
    if not answer.is_in(context):
        return None, MISPLACED
    # No token covers spaces at the ends of an answer, so they select no further tokens.
    inside = np.flatnonzero((starts < ends) & (ends > answer.start) & (starts < answer.start + len(answer.text)))
    if len(inside) == 0:
        return None, LOST
    first, last = int(inside[0]), int(inside[-1])
    of_tokens = words_of(context[starts[first] : ends[last]])
    return (first, last), EXACT if of_tokens == words_of(answer.text) else WIDER


def write_squad_split(
    directory: Path, split: str, paragraphs: Sequence[Paragraph], tokenizer: Tokenizer, on_done: Callable[[int], object]
) -> dict[str, Any]:
    """Write all paragraphs of a split, and return counts for ``squad.json``; ``on_done`` gets the number of new questions."""
    # Offsets count characters of one paragraph.
    symbols = dict.fromkeys(("question", "context"), len(tokenizer) + NUM_FAIRSEQ_SYMBOLS)
    examples, lengths, unknown = [], {"question": [], "context": []}, Counter()
    fits, named = Counter(dict.fromkeys(FITS, 0)), defaultdict(list)
    with contextlib.ExitStack() as files:
        arrays = {
            name: files.enter_context(BinarizedFile(directory / f"{split}.{name}", symbols.get(name)))
            for name in TOKEN_ARRAYS
        }
        examples_file, contexts_file = (
            files.enter_context((directory / f"{split}.{name}.jsonl").open("w", encoding="utf-8", newline="\n"))
            for name in ("examples", "contexts")
        )

        def add_ids(name: str, pieces: Sequence[str]) -> None:
            ids = tokenizer.ids_of(pieces)
            arrays[name].add_line(ids)
            lengths[name].append(len(ids))
            unknown[name] += ids.count(UNKNOWN_ID)

        for number, paragraph in enumerate(paragraphs):
            context = paragraph.context
            aligned = tokenizer.encode_with_offsets(context)
            starts, ends = (np.array([token[place] for token in aligned], dtype=np.int32) for place in (1, 2))
            add_ids("context", [piece for piece, _, _ in aligned])
            arrays["context_start"].add_line(starts)
            arrays["context_end"].add_line(ends)
            contexts_file.write(json.dumps({"title": paragraph.title, "text": context}, ensure_ascii=False) + "\n")
            for question in paragraph.questions:
                add_ids("question", tokenizer.encode(question.text))
                answers = []
                for answer in question.answers:
                    tokens, fit = align_answer(answer, context, starts, ends)
                    answers.append(answer._replace(tokens=tokens))
                    fits[fit] += 1
                    if fit != EXACT and len(named[fit]) < NAMED_ANSWERS:
                        text = "" if tokens is None else context[starts[tokens[0]] : ends[tokens[1]]]
                        named[fit].append({"id": question.id, "answer": answer.text, "tokens_give": text})
                examples.append(Example(question.id, number, tuple(answers), question.is_impossible))
                examples_file.write(examples[-1].to_json() + "\n")
            on_done(len(paragraph.questions))
    of_contexts = tokenizer.count_dropped([paragraph.context for paragraph in paragraphs])
    return {
        "paragraphs": len(paragraphs),
        "questions": len(examples),
        "impossible": sum(example.is_impossible for example in examples),
        "untrainable": sum(bool(example.answers) and not example.spans for example in examples),
        "context_tokens": sum(lengths["context"]),
        "longest_context": max(lengths["context"], default=0),
        "longest_question": max(lengths["question"], default=0),
        "unknown": unknown.total(),
        **lost_shares(unknown.total(), sum(lengths["context"]) + sum(lengths["question"]), *of_contexts),
        "answers": fits,
        "named": named,
    }
