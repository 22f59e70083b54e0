"""``amos parse``: convert treebanks in CoNLL-U to the input of the task ``dependency_parsing``."""

from pathlib import Path

from amos_fairseq.data.text_files import InputFile
from amos_fairseq.data.word_files import Sentence, read_conllu
from amos_fairseq.errors import UserError
from amos_fairseq.prepare.binarizing import BinarizedFile
from amos_fairseq.prepare.inside_out import prepared_data
from amos_fairseq.prepare.tagging import describe_tagging, write_tagging
from amos_fairseq.prepare.workspace import check_inputs
from amos_fairseq.tokenization import Tokenizer

TASK = "parsing"
RELATION = "deprel"


def prepare_parsing_inside(out: Path, train: Path, dev: Path, tokenizer: Tokenizer) -> Path:
    """Return both treebanks prepared inside of OUT of ``amos parse``.

    Raises:
        UserError: bad input; or see :func:`~amos_fairseq.prepare.inside_out.prepared_data`.
    """
    sources = {"train": train, "valid": dev}
    check_inputs(list(sources.values()), "give a treebank in CoNLL-U")

    def write(directory: Path) -> None:
        from amos_fairseq.data.parsing import HEAD  # imports fairseq, which takes seconds

        sentences = {split: read_conllu(path) for split, path in sources.items()}
        heads = {
            split: [heads_of(sources[split], number, one) for number, one in enumerate(own, start=1)]
            for split, own in sentences.items()
        }
        if len({relation for one in sentences["train"] for relation in one.columns[RELATION]}) == 1:
            raise UserError(f"{train}: all words have one relation: give a treebank with several")
        write_tagging(
            directory, sources, sentences, describe_tagging(sources, tokenizer, RELATION, None), tokenizer, "LAS"
        )
        for split, own in heads.items():
            with BinarizedFile(f"{directory / split}.{HEAD}", None) as file:
                for row in own:
                    file.add_line(row)
            lines = (line.decode("utf-8") for _, line in InputFile(sources[split]).lines())
            (directory / f"{split}.conllu").write_text("".join(lines), encoding="utf-8", newline="")

    return prepared_data(out, TASK, sources, tokenizer, {}, write, used_by=[f"runs/{TASK}"])


def heads_of(path: Path, number: int, sentence: Sentence) -> list[int]:
    """Return the heads of a sentence; raise :class:`UserError` unless they are a tree with one root."""
    from amos_fairseq.data.parsing import is_tree

    heads = sentence.columns["head"]
    where = f"{path}, sentence {number} ({' '.join(sentence.words)[:40]!r})"
    for word, head in enumerate(heads, start=1):
        if not head.isdecimal() or len(head) > 9 or int(head) > len(heads):
            raise UserError(f"{where}: the head {head!r:.20} of word {word} is no word of the sentence: correct it")
    numbers = [int(head) for head in heads]
    if not is_tree(numbers):
        raise UserError(f"{where}: the heads are no tree with one root: correct them")
    return numbers
