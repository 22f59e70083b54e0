"""Convert SQuAD to the input of the task ``squad``; see ``prepare.sh --help``.

Read both files -> sample training questions -> encode, align, write to a temporary directory -> rename.
"""

import argparse
import dataclasses
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from amos_fairseq.data.official_squad import Paragraph, SquadFile, read_squad
from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.files import json_text, whole_folder
from amos_fairseq.fingerprint import file_sha256, files_sha256
from amos_fairseq.preprocess.common.command import check_names, ending_in_one_line, is_finished, progress_bar, say
from amos_fairseq.tokenization import Tokenizer, load_tokenizer

_DESCRIPTION = """Convert SQuAD 1.1 or 2.0 to the input of the task squad: questions, paragraphs and characters of every token.

TRAIN_JSON and DEV_JSON are official files, plain or as .gz, .xz or .zst. Lengths of windows are flags of the task, not
of this command. Answers that do not fit the tokens are counted, and listed in OUT/squad.json. A finished OUT, made from
the same files and settings, is not changed."""


@dataclass(frozen=True)
class Settings:
    """The settings that determine the content of OUT. ``max_train_questions`` None: all questions."""

    max_train_questions: Optional[int]
    seed: int

    def describe(self) -> Dict[str, Any]:
        """Return the settings for ``squad.json``. The seed matters only if questions are sampled."""
        return dataclasses.asdict(self) | ({"seed": None} if self.max_train_questions is None else {})


def prepare(train: Path, dev: Path, tokenizer: Tokenizer, out: Path, settings: Settings) -> None:
    """Write both files to ``out``; nothing is left of it if that fails.

    Raises:
        UserError: bad input, or ``out`` contains other files.
    """
    from amos_fairseq.data.squad import MANIFEST, read_manifest  # imports fairseq, which takes seconds

    sources = {"train": train, "valid": dev}
    description = {
        "settings": settings.describe(),
        "tokenizer_sha256": tokenizer.sha256,
        "sources": {split: {"name": path.name, "sha256": file_sha256(path)} for split, path in sources.items()},
    }
    if is_finished(out, description, "SQuAD", MANIFEST, read_manifest):
        say(f"{out} is finished already, with these files and settings: nothing to do")
        return
    files = {split: read_squad(path) for split, path in sources.items()}
    paragraphs = {split: file.paragraphs for split, file in files.items()}
    if settings.max_train_questions is not None:
        paragraphs["train"] = sample_questions(paragraphs["train"], settings.max_train_questions, settings.seed)
    with whole_folder(out.absolute()) as unfinished:
        facts = _write(unfinished, files, paragraphs, tokenizer)
        content = description | {"splits": facts, "sha256": files_sha256(unfinished)}
        manifest = json_text(content)
        (unfinished / MANIFEST).write_text(manifest, encoding="utf-8")
    say(f"done: fairseq-train {out} --user-dir amos_fairseq --task squad ...; counts in {out}/{MANIFEST}")


def sample_questions(paragraphs: Sequence[Paragraph], number: int, seed: int) -> List[Paragraph]:
    """Sample ``number`` questions without replacement, in the file's order, and drop paragraphs without any."""
    total = sum(len(paragraph.questions) for paragraph in paragraphs)
    chosen = set(random.Random(seed).sample(range(total), min(number, total)))
    sampled, position = [], 0
    for paragraph in paragraphs:
        selected = tuple(q for offset, q in enumerate(paragraph.questions) if position + offset in chosen)
        position += len(paragraph.questions)
        if selected:
            sampled.append(dataclasses.replace(paragraph, questions=selected))
    return sampled


def _write(
    directory: Path, files: Dict[str, SquadFile], paragraphs: Dict[str, Sequence[Paragraph]], tokenizer: Tokenizer
) -> Dict[str, Any]:
    from fairseq.data import Dictionary

    from amos_fairseq.preprocess.squad.encoding import write_split

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
            f"{path}: {answers['misplaced']} of {total} answers are not at their answer_start: the starts must count "
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
        f"{split}: of {total} answers {answers['exact']} are at token boundaries; {answers['wider']} "
        f"({answers['wider'] / total:.2%}) end inside a token and include all of it; {answers['lost']} have no token, "
        f"{answers['misplaced']} are not at their answer_start: {facts['untrainable']} questions are not used in training"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "prepare.sh", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("train", type=Path, metavar="TRAIN_JSON", help="train-v1.1.json or train-v2.0.json")
    add("dev", type=Path, metavar="DEV_JSON", help="the dev file of the same version")
    add(
        "tokenizer",
        type=Path,
        metavar="TOKENIZER_DIR",
        help="tokenizer directory of a corpus or run, or tokenizer.json",
    )
    add("out", type=Path, metavar="OUT", help="output directory")
    add("--max-train-questions", type=int, default=None, metavar="N", help="sample N training questions (default: all)")
    add("--seed", type=int, default=1, help="samples the questions of --max-train-questions (default: %(default)s)")
    return parser


@report_user_errors()
def main(arguments: Optional[List[str]] = None) -> None:
    """Run the command. Exit with code 1 and one line on a user's mistake, with code 130 after Ctrl-C."""
    with ending_in_one_line("nothing was left"):
        given = build_parser().parse_args(arguments)
        # Check as much as possible before any work.
        check_names(given.train, given.dev)
        for path in (given.train, given.dev):
            if not path.is_file():
                raise UserError(f"{path}: no such file: give an official file of SQuAD")
        if given.max_train_questions is not None and given.max_train_questions < 1:
            raise UserError(f"--max-train-questions {given.max_train_questions} must be at least 1")
        settings = Settings(given.max_train_questions, given.seed)
        prepare(given.train, given.dev, load_tokenizer(given.tokenizer), given.out, settings)


if __name__ == "__main__":
    main()
