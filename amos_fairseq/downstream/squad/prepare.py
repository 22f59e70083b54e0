"""``amos prepare squad``: convert SQuAD to the input of the task ``squad``.

Read both files -> sample training questions -> encode, align, write to a temporary directory -> rename.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amos_fairseq.downstream.squad.official import Paragraph, SquadFile, read_squad, task_name
from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text, whole_folder
from amos_fairseq.fingerprint import files_sha256
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.text.inside_out import prepared_data
from amos_fairseq.text.tokenization import Tokenizer, load_tokenizer
from amos_fairseq.text.workspace import Sample, check_inputs, describe_source, is_finished, save_tokenizer

ADVICE = "give an official file of SQuAD"


def run(given: argparse.Namespace) -> None:
    """Write both files to OUT; nothing is left of it if that fails.

    Raises:
        UserError: bad input, or OUT contains other files.
    """
    # Check as much as possible before any work.
    check_inputs([given.train, given.dev], ADVICE)
    if given.max_train_questions is not None and given.max_train_questions < 1:
        raise UserError(f"--max-train-questions {given.max_train_questions} must be at least 1")
    out, sample, tokenizer = given.out, Sample(given.max_train_questions, given.seed), load_tokenizer(given.tokenizer)
    from amos_fairseq.downstream.squad.dataset import (
        MANIFEST,
        read_squad_manifest,
    )  # imports fairseq, which takes seconds

    sources = {"train": given.train, "valid": given.dev}
    description = _describe(sources, tokenizer, sample)
    if is_finished(out, description, "SQuAD", MANIFEST, read_squad_manifest):
        return
    files = {split: read_squad(path) for split, path in sources.items()}
    with whole_folder(out.absolute()) as unfinished:
        _write(unfinished, files, description, tokenizer, sample)
    say(f"done: fairseq-train {out} --user-dir amos_fairseq --task squad ...; counts in {out}/{MANIFEST}")


def prepare_squad_inside(out: Path, train: Path, dev: Path, tokenizer: Tokenizer) -> Path:
    """Return what ``amos prepare squad`` makes of both files, inside of OUT of ``amos squad``.

    Raises:
        UserError: bad input; or see :func:`~amos_fairseq.text.inside_out.prepared_data`.
    """
    sources, sample = {"train": train, "valid": dev}, Sample(None, seed=1)
    check_inputs(list(sources.values()), ADVICE)
    dev_file = read_squad(dev)
    name = task_name(any(question.is_impossible for question in dev_file.questions()))

    def write(directory: Path) -> None:
        files = {"train": read_squad(train), "valid": dev_file}
        _write(directory, files, _describe(sources, tokenizer, sample), tokenizer, sample)

    return prepared_data(out, name, sources, tokenizer, {}, write, used_by=[f"runs/{name}"])


def _describe(sources: dict[str, Path], tokenizer: Tokenizer, sample: Sample) -> dict[str, Any]:
    """Return what determines the data, for the manifest."""
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
    """Write both splits and the manifest into an empty folder."""
    from amos_fairseq.downstream.squad.dataset import MANIFEST  # imports fairseq, which takes seconds
    from amos_fairseq.downstream.squad.encoding import write_squad_split  # imports fairseq, too

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
        _refuse_misplaced(file.path, counted.answers)
        _report(split, facts[split])
    content = json_text(description | {"splits": facts, "sha256": files_sha256(directory)})
    (directory / MANIFEST).write_text(content, encoding="utf-8")


def _refuse_misplaced(path: Path, answers: dict[str, int]) -> None:
    total = sum(answers.values())
    if 2 * answers["misplaced"] > total:
        raise UserError(
            f"{path}: {answers['misplaced']} of {total} answers are not at their answer_start: the starts must count "
            "characters (not bytes) of the context as it is in the file"
        )


def _report(split: str, facts: dict[str, Any]) -> None:
    answers, total = facts["answers"], max(1, sum(facts["answers"].values()))
    of = f" of {facts['source_questions']}" if facts["questions"] < facts["source_questions"] else ""
    say(
        f"{split}: {facts['questions']}{of} questions ({facts['impossible']} without an answer) on {facts['paragraphs']} "
        f"paragraphs; longest context {facts['longest_context']} tokens, longest question {facts['longest_question']}"
    )
    say(
        f"{split}: of {total} answers {answers['exact']} are at token boundaries; {answers['wider']} "
        f"({answers['wider'] / total:.2%}) end inside a token and include all of it; {answers['lost']} have no token, "
        f"{answers['misplaced']} are not at their answer_start: {facts['untrainable']} questions are not used in training"
    )
