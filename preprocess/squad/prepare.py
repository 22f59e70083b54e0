"""SQuAD to what the task ``squad`` reads; see ``prepare.sh --help``.

read both files -> draw training questions -> encode, align, write beside OUT -> rename
"""

import dataclasses
import glob
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from amos_fairseq.data.fingerprint import file_sha256
from amos_fairseq.data.squad_files import MANIFEST, read_manifest
from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.finetuning.squad.official import Paragraph, SquadFile, read_squad
from amos_fairseq.interop.tokenizer import Tokenizer, load_tokenizer
from preprocess.common.command import ending_in_one_line, progress_bar, say
from preprocess.squad.arguments import Settings, build_parser, read_settings


def prepare(train: Path, dev: Path, tokenizer: Tokenizer, out: Path, settings: Settings) -> None:
    """Make ``out`` of both files; nothing is left of it where that fails.

    Raises:
        UserError: bad input, or ``out`` holds something else.
    """
    sources = {"train": train, "valid": dev}
    description = {
        "settings": settings.describe(),
        "tokenizer_sha256": tokenizer.sha256,
        "sources": {split: {"name": path.name, "sha256": file_sha256(path)} for split, path in sources.items()},
    }
    if _is_finished(out, description):
        say(f"{out} is finished already, with these files and settings: nothing to do")
        return
    files = {split: read_squad(path) for split, path in sources.items()}
    paragraphs = {split: file.paragraphs for split, file in files.items()}
    if settings.max_train_questions is not None:
        paragraphs["train"] = draw_questions(paragraphs["train"], settings.max_train_questions, settings.seed)
    unfinished = _place_beside(out.absolute())
    try:
        facts = _write(unfinished, files, paragraphs, tokenizer)
        manifest = json.dumps(description | {"splits": facts}, indent=2, ensure_ascii=False) + "\n"
        (unfinished / MANIFEST).write_text(manifest, encoding="utf-8")
        os.rename(unfinished, out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    say(f"done: fairseq-train {out} --user-dir amos_fairseq --task squad ...; facts in {out}/{MANIFEST}")


def _place_beside(out: Path) -> Path:
    """A fresh hidden directory on the file system of ``out``; what killed runs left there is removed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.name}.unfinished."
    for left in out.parent.glob(f"{glob.escape(prefix)}*"):
        try:
            os.kill(int(left.name.removeprefix(prefix)), 0)  # signal 0 only asks
        except (ProcessLookupError, ValueError):
            shutil.rmtree(left, ignore_errors=True)
        except PermissionError:
            pass  # somebody else's, at work
    unfinished = out.with_name(f"{prefix}{os.getpid()}")
    unfinished.mkdir()
    return unfinished


def draw_questions(paragraphs: Sequence[Paragraph], number: int, seed: int) -> List[Paragraph]:
    """``number`` questions, drawn without replacement, in the file's order; paragraphs without any are left out."""
    total = sum(len(paragraph.questions) for paragraph in paragraphs)
    chosen = set(random.Random(seed).sample(range(total), min(number, total)))
    drawn, place = [], 0
    for paragraph in paragraphs:
        kept = tuple(q for offset, q in enumerate(paragraph.questions) if place + offset in chosen)
        place += len(paragraph.questions)
        if kept:
            drawn.append(dataclasses.replace(paragraph, questions=kept))
    return drawn


def _write(
    directory: Path, files: Dict[str, SquadFile], paragraphs: Dict[str, Sequence[Paragraph]], tokenizer: Tokenizer
) -> Dict[str, Any]:
    from fairseq.data import Dictionary  # seconds to import

    from preprocess.squad.writing import write_split

    tokenizer.save(directory / "tokenizer")
    shutil.copyfile(directory / "tokenizer" / "dict.txt", directory / "dict.txt")
    dictionary = Dictionary.load(str(directory / "dict.txt"))
    facts = {}
    for split, file in files.items():
        total = sum(len(paragraph.questions) for paragraph in paragraphs[split])
        with progress_bar(total, f"{split}: encode", "question", delay=2) as bar:
            counted = write_split(directory, split, paragraphs[split], tokenizer, dictionary, bar.update)
        in_file = {"version": file.version, "source_questions": sum(1 for _ in file.questions())}
        facts[split] = in_file | dataclasses.asdict(counted)
        _refuse_misplaced(file.path, counted.answers)
        _report(split, facts[split])
    return facts


def _refuse_misplaced(path: Path, answers: Dict[str, int]) -> None:
    total = sum(answers.values())
    if 2 * answers["misplaced"] > total:
        raise UserError(
            f"{path}: {answers['misplaced']} of {total} answers do not stand at their answer_start: the starts must count "
            "characters (not bytes) of the context as it is in the file"
        )


def _report(split: str, facts: Dict[str, Any]) -> None:
    answers, total = facts["answers"], max(1, sum(facts["answers"].values()))
    of = f" of {facts['source_questions']}" if facts["questions"] < facts["source_questions"] else ""
    say(
        f"{split}: {facts['questions']}{of} questions ({facts['impossible']} without an answer) on {facts['paragraphs']} "
        f"paragraphs; longest context {facts['longest_context']} tokens, longest question {facts['longest_question']}"
    )
    say(
        f"{split}: of {total} answers {answers['exact']} lie on token borders; {answers['wider']} "
        f"({answers['wider'] / total:.2%}) end inside a token and take it whole; {answers['lost']} have no token, "
        f"{answers['misplaced']} are not at their answer_start: {facts['untrainable']} questions train nobody"
    )


def _is_finished(out: Path, description: Dict[str, Any]) -> bool:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not out.is_dir():
        raise UserError(f"OUT {out} is not a directory")
    if not (out / MANIFEST).is_file():
        raise UserError(f"OUT {out} is not empty and holds no SQuAD data of prepare.sh: give another directory")
    manifest = read_manifest(out)
    for name, value in description.items():
        if manifest.get(name) != value:
            kind = {"settings": "settings", "tokenizer_sha256": "tokenizer", "sources": "files"}[name]
            raise UserError(f"{out} was made with other {kind}: give another OUT, or remove it")
    return True


@report_user_errors()
def main(arguments: Optional[List[str]] = None) -> None:
    """The command. Exit status 1 and one line on a user's mistake, 130 after Ctrl-C."""
    with ending_in_one_line("nothing was left"):
        given = build_parser().parse_args(arguments)
        settings = read_settings(given)
        prepare(given.train, given.dev, load_tokenizer(given.tokenizer), given.out, settings)


if __name__ == "__main__":
    main()
