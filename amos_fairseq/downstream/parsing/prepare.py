"""``amos parse``: convert treebanks in CoNLL-U to the input of the task ``dependency_parsing``."""

from dataclasses import replace
from pathlib import Path

from amos_fairseq.downstream.parsing.trees import HEAD, is_tree
from amos_fairseq.downstream.tagging.prepare import Choices, describe_tagging, read_splits, write_tagging
from amos_fairseq.downstream.tagging.word_files import Sentence, read_conllu
from amos_fairseq.errors import UserError
from amos_fairseq.text.encoding import BinarizedFile
from amos_fairseq.text.prepared_data import check_inputs, prepared_data
from amos_fairseq.text.text_files import InputFile
from amos_fairseq.text.tokenization import Tokenizer

TASK = "parsing"
RELATION = "deprel"


def prepare_parsing_inside(out: Path, train: Path, dev: Path, tokenizer: Tokenizer, choices: Choices) -> Path:
    """Return the treebanks prepared inside of OUT of ``amos parse``."""
    sources = choices.sources(train, dev)
    check_inputs(list(sources.values()), "give a treebank in CoNLL-U")
    choices = replace(choices, column=RELATION)

    def write(directory: Path) -> None:
        sentences = read_splits(sources, choices, read_treebank)
        if len({relation for one in sentences["train"] for relation in one.columns[RELATION]}) == 1:
            raise UserError(f"{train}: all words have one relation: give a treebank with several")
        write_tagging(directory, sources, sentences, describe_tagging(sources, tokenizer, choices), tokenizer, "LAS")
        for split in ("train", "valid"):
            with BinarizedFile(f"{directory / split}.{HEAD}", None) as file:
                for sentence in sentences[split]:
                    file.add_line(list(map(int, sentence.columns[HEAD])))
        lines = (line.decode("utf-8") for _, line in InputFile(dev).lines())
        (directory / "valid.conllu").write_text("".join(lines), encoding="utf-8", newline="")

    return prepared_data(out, TASK, sources, tokenizer, choices.as_dict(), write, used_by=[f"runs/{TASK}"])


def read_treebank(path: Path) -> list[Sentence]:
    """Read CoNLL-U; raise :class:`UserError` unless the heads of each sentence are a tree with one root."""
    sentences = read_conllu(path)
    for number, sentence in enumerate(sentences, start=1):
        heads = sentence.columns[HEAD]
        where = f"{path}, sentence {number} ({' '.join(sentence.words)[:40]!r})"
        for word, head in enumerate(heads, start=1):
            if not head.isdecimal() or len(head) > 9 or int(head) > len(heads):
                raise UserError(f"{where}: the head {head!r:.20} of word {word} is no word of the sentence: correct it")
        if not is_tree(list(map(int, heads))):
            raise UserError(f"{where}: the heads are no tree with one root: correct them")
    return sentences
