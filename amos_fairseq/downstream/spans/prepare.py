"""``amos prepare squad``: convert SQuAD to the input of the task ``squad``.

Read both files -> encode, align, write to a temporary directory -> rename.
"""

import argparse
import contextlib
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.inputs.question_files import MANIFEST, TOKEN_ARRAYS, Answer, Example, Paragraph, read_squad, words_of
from amos_fairseq.inputs.tables import seen_note
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.text.encoding import NUM_FAIRSEQ_SYMBOLS, UNKNOWN_ID, BinarizedFile, describe_unknown, unknown_pieces
from amos_fairseq.text.prepared_data import (
    Write,
    description_of,
    fill_out,
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


def run(arguments: argparse.Namespace) -> None:
    out, tokenizer = arguments.out, load_tokenizer(arguments.tokenizer)
    description, write = preparation(arguments.train, arguments.dev, tokenizer)
    if fill_out(out, description, MANIFEST, write):
        command = f"fairseq-train {shlex.quote(str(out))} --user-dir amos_fairseq --task squad ..."
        say(f"done: {command}; counts in {out}/{MANIFEST}")


def preparation(train: Path, dev: Path, tokenizer: Tokenizer) -> tuple[dict[str, Any], Write]:
    """Return what determines the prepared data, and the function that fills an empty folder with them."""
    sources = {"train": train, "valid": dev}
    description = description_of(sources, tokenizer, {})
    return description, lambda folder: _write(folder, sources, description, tokenizer)


def _write(directory: Path, sources: dict[str, Path], description: dict[str, Any], tokenizer: Tokenizer) -> None:
    files = {split: read_squad(path) for split, path in sources.items()}
    splits = {split: file.paragraphs for split, file in files.items()}
    first = splits["train"][0]
    question, *_ = first.questions
    pieces = [*tokenizer.encode(question.text), EOS, *tokenizer.encode(first.context), EOS]
    say_first_example([BOS, *pieces], question.answers[0].text if question.answers else "no answer")
    save_tokenizer(tokenizer, directory)
    facts = {}
    for split, paragraphs in splits.items():
        counted = write_squad_split(directory, split, paragraphs, tokenizer)
        facts[split] = {"version": files[split].version, **counted}
        report(split, facts[split])
    asked = {
        split: [(paragraph.context, question.text) for paragraph in paragraphs for question in paragraph.questions]
        for split, paragraphs in splits.items()
    }
    trained = set(asked["train"])
    facts["valid"]["notes"] = []
    if seen := sum(question in trained for question in asked["valid"]):
        facts["valid"]["notes"].append(seen_note(seen, len(asked["valid"]), "questions"))
        say(f"valid: {facts['valid']['notes'][0]}")
    write_manifest(directory / MANIFEST, description | {"splits": facts})


def report(split: str, facts: dict[str, Any]) -> None:
    answers, total = facts["answers"], sum(facts["answers"].values())
    say(
        f"{split}: {facts['questions']} questions ({facts['impossible']} without an answer) on {facts['paragraphs']} "
        f"paragraphs; longest context {facts['longest_context']} tokens, longest question {facts['longest_question']}"
        f"; {describe_unknown(facts)}"
    )
    say(
        f"{split}: of {total} answers {answers[EXACT]} are at token boundaries; {answers[WIDER]} "
        f"({answers[WIDER] / max(1, total):.2%}) end inside a token and include all of it; {answers[LOST]} have no token, "
        f"{answers[MISPLACED]} are not at their answer_start: {facts['untrainable']} questions are not used in training"
    )


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
    text = context[starts[first] : ends[last]]
    return (first, last), EXACT if words_of(text) == words_of(answer.text) else WIDER


def write_squad_split(
    directory: Path, split: str, paragraphs: Sequence[Paragraph], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Write all paragraphs of a split, and return counts for ``squad.json``."""
    # Offsets count characters of one paragraph.
    symbols = dict.fromkeys(("question", "context"), len(tokenizer) + NUM_FAIRSEQ_SYMBOLS)
    examples, lengths, unknown = [], {"question": [], "context": []}, 0
    fits, num_questions = Counter(dict.fromkeys(FITS, 0)), sum(len(paragraph.questions) for paragraph in paragraphs)
    with contextlib.ExitStack() as files:
        bar = files.enter_context(progress_bar(num_questions, f"{split}: encode", "question", delay=2))
        arrays = {
            name: files.enter_context(BinarizedFile(directory / f"{split}.{name}", symbols.get(name)))
            for name in TOKEN_ARRAYS
        }
        examples_file, contexts_file = (
            files.enter_context((directory / f"{split}.{name}.jsonl").open("w", encoding="utf-8", newline="\n"))
            for name in ("examples", "contexts")
        )

        def add_ids(name: str, pieces: Sequence[str]) -> int:
            ids = tokenizer.ids_of(pieces)
            arrays[name].add_line(ids)
            lengths[name].append(len(ids))
            return ids.count(UNKNOWN_ID)

        for number, paragraph in enumerate(paragraphs):
            aligned = tokenizer.encode_with_offsets(paragraph.context)
            starts, ends = (np.array([token[place] for token in aligned], dtype=np.int32) for place in (1, 2))
            unknown += add_ids("context", [piece for piece, _, _ in aligned])
            arrays["context_start"].add_line(starts)
            arrays["context_end"].add_line(ends)
            text = {"title": paragraph.title, "text": paragraph.context}
            contexts_file.write(json.dumps(text, ensure_ascii=False) + "\n")
            for question in paragraph.questions:
                unknown += add_ids("question", tokenizer.encode(question.text))
                answers = []
                for answer in question.answers:
                    tokens, fit = align_answer(answer, paragraph.context, starts, ends)
                    answers.append(answer._replace(tokens=tokens))
                    fits[fit] += 1
                examples.append(Example(question.id, number, tuple(answers), question.is_impossible))
                examples_file.write(examples[-1].to_json() + "\n")
            bar.update(len(paragraph.questions))
    return {
        "paragraphs": len(paragraphs),
        "questions": len(examples),
        "impossible": sum(example.is_impossible for example in examples),
        "untrainable": sum(bool(example.answers) and not example.spans for example in examples),
        "longest_context": max(lengths["context"], default=0),
        "longest_question": max(lengths["question"], default=0),
        **unknown_pieces(unknown, sum(lengths["context"]) + sum(lengths["question"])),
        "answers": fits,
    }
