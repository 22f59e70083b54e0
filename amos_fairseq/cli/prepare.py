"""``amos prepare KIND``: raw files to what training reads. The scripts of ``preprocess`` in a checkout call it.

The arguments of all kinds are here and not beside the work, whose imports would slow down ``amos --help``. A new kind is a
function ``add_KIND``, its line in :func:`add_parser` and in ``KINDS``, and a module with ``run(arguments)``.
"""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amos_fairseq import root_logger_kept
from amos_fairseq.cli.arguments import SIZE, HelpFormatter, add_label_columns, add_subcommand, add_unlabeled, number
from amos_fairseq.downstream.texts.glue.tasks import TASKS
from amos_fairseq.inputs import BLANK, LINE, TEXT_COLUMN
from amos_fairseq.output.terminal import ending_in_one_line
from amos_fairseq.text import DEFAULT_VOCAB_SIZE, LARGEST_VOCABULARY

DESCRIPTION = """\
Convert raw files to what training reads. Each kind has its own --help.

amos prepare FILE ... means amos prepare text FILE ... The first word is a kind if it is the name of one, even where a file
has that name: give such a file as ./NAME."""
TEXT = "text"
# The module that does the work, and what the same command does when it was interrupted.
KINDS = {
    TEXT: ("text.prepare", "it continues after the last finished part"),
    "glue": ("downstream.texts.glue.prepare", "finished tasks are skipped"),
    "squad": ("downstream.spans.prepare", "it starts again"),
    "tagging": ("downstream.words.prepare", "it starts again"),
    "probing": ("probing.tasks", "it starts again"),
}


class KindFormatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "prepare", "convert text, GLUE, SQuAD, ... to binarized data", DESCRIPTION, run)
    parser.formatter_class = KindFormatter
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for add in (add_text, add_glue, add_squad, add_tagging, add_probing):
        add(kinds)


def with_kind(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of ``amos``, with the kind ``text`` behind ``prepare`` where none is given."""
    has_kind = list(arguments[:1]) != ["prepare"] or set(arguments[1:2]) <= {*KINDS, "-h", "--help"}
    return list(arguments) if has_kind else ["prepare", TEXT, *arguments[1:]]


def run(arguments: argparse.Namespace) -> None:
    if "out" not in arguments:
        arguments.parser.error("give the output directory, as OUT or by --out DIR")
    if arguments.kind == TEXT and arguments.vocabulary is not None and arguments.tokenizer is None:
        arguments.parser.error("--vocabulary needs --tokenizer CODES, the codes of fastBPE")
    arguments.out = Path(arguments.out)
    name, repeated = KINDS[arguments.kind]
    with root_logger_kept():
        module = importlib.import_module(f"amos_fairseq.{name}")
    with ending_in_one_line(repeated, "prepare"):
        module.run(arguments)


def add_kind(kinds: Any, name: str, help: str, description: str) -> Any:
    """Add the parser of a kind, and return its ``add_argument``; ``help`` is its line in ``amos prepare --help``."""
    return kinds.add_parser(name, help=help, description=description, formatter_class=KindFormatter).add_argument


def add_tokenizer_and_out(add: Any) -> None:
    text = "tokenizer directory of a corpus or run, or tokenizer.json"
    add("tokenizer", type=Path, metavar="TOKENIZER_DIR", help=text)
    add_out(add)


def add_out(add: Any) -> None:
    # Without a default or type, which argparse would apply where it is not given.
    add("out", nargs="?", default=argparse.SUPPRESS, metavar="OUT", help="output directory, the last argument")
    add("--out", type=Path, default=argparse.SUPPRESS, metavar="DIR", help="the same as OUT")


def add_workers(add: Any) -> None:
    text = "processes; the result is the same (default: all processors)"
    add("--workers", type=number(int, 1, 1024), metavar="N", help=text)


def add_text(kinds: Any) -> None:
    description = """\
Convert raw text to a binarized corpus for fairseq-train.

Inputs are UTF-8, and the suffix says what they are: .jsonl (or .json) has a document per line ({"text": ...}); .tsv, .csv,
.parquet and folders that save_to_disk of Hugging Face's datasets wrote have one in the column text of each row (the last two
need pip install 'amos_fairseq[data]'); anything else is plain text with one paragraph per line and a blank line between
documents. .gz, .xz and .zst behind it are decompressed. The first document of each file is printed before any work. NUL
characters are removed. All processors are used, in constant memory. An interrupted run continues when the command is
repeated."""
    add = add_kind(kinds, TEXT, "text to a corpus for pretraining (where no kind is given)", description)
    add("text", nargs="+", type=Path, metavar="TEXT", help="input files, in the order of the corpus")
    text = "column of tables, or field of .jsonl, that has the text; of nested objects such as meta.body"
    add("--text-column", metavar="NAME", default=TEXT_COLUMN, help=text)
    add("--document", choices=(BLANK, LINE), default=BLANK, help="what ends a document of plain text")
    add("--out", required=True, type=Path, metavar="DIR", help="output directory; its path must not contain a colon")
    text = (
        "use an existing one: a SentencePiece model, fastBPE's codes, tokenizer.json, vocab.json beside merges.txt, vocab.txt, "
        "or the tokenizer directory of a corpus, a run or Hugging Face; it is tried on the first lines of each input"
    )
    add("--tokenizer", type=Path, metavar="TOKENIZER", help=text)
    add("--vocabulary", type=Path, metavar="FILE", help="the vocabulary of fastBPE's codes, as its getvocab writes it")
    text = f"pieces to learn, without special symbols (default: {DEFAULT_VOCAB_SIZE})"
    add("--vocab-size", type=number(int, 1, LARGEST_VOCABULARY), metavar="N", help=text)
    text = (
        "a marker, such as [E1], that is one token wherever the text spells it, and is never masked, sampled or predicted; "
        "may be repeated; added to --vocab-size, or a piece of --tokenizer (what tokenizer.json calls special is protected)"
    )
    add("--protect", action="append", default=[], metavar="TOKEN", help=text)
    case = kinds.choices[TEXT].add_mutually_exclusive_group().add_argument
    case("--cased", action="store_true", default=None, help="keep case (default)")
    case("--uncased", action="store_false", dest="cased", default=None, help="lower-case")
    add_workers(add)
    add("--seed", type=int, default=1, help="of the choice of validation documents and of the sample")
    add("--valid-share", type=number(float, 1e-6, 0.99), default=0.01, help="share of the text to hold out")
    megabytes = number(float, 1e-6, 10**9)
    add("--valid-megabytes", type=megabytes, default=4, help="hold out no more than this")
    add("--sample-megabytes", type=megabytes, default=200, help="text to learn pieces from")
    add("--shard-megabytes", type=megabytes, default=1000, help="maximum text of one shard")


def add_glue(kinds: Any) -> None:
    description = f"""\
Convert GLUE's official TSV files to the input of fairseq's sentence_prediction.

Tasks: {", ".join(TASKS)}. Files are UTF-8, plain or as .gz, .xz or .zst; test files may be missing. OUT gets a
directory for each task. A task that is there, made from the same files with the same settings, is skipped.
docs/glue.md describes both layouts."""
    add = add_kind(kinds, "glue", "GLUE's files to the tasks that amos glue fine-tunes on", description)
    add("glue", type=Path, metavar="GLUE_DIR", help="directory of the official download: CoLA/train.tsv, ...")
    add("tasks", metavar="TASK|ALL", help="a task, several separated by commas, or ALL that are in GLUE_DIR")
    add_tokenizer_and_out(add)
    add_workers(add)
    add("--max-train-rows", type=SIZE, metavar="N", help="sample at most N training rows (default: all)")
    add("--seed", type=int, default=1, help="samples the rows of --max-train-rows")


def add_squad(kinds: Any) -> None:
    description = """\
Convert SQuAD 1.1 or 2.0 to the input of the task squad: questions, paragraphs and characters of every token.

TRAIN_JSON and DEV_JSON are official files, or the flat rows of datasets (id, context, question, answers) as JSON, JSON lines,
Parquet or a folder of save_to_disk; plain or as .gz, .xz or .zst. Lengths of windows are flags of the task, not of this
command. Answers that do not fit the tokens are counted. A finished OUT, made from
the same files and settings, is not changed."""
    add = add_kind(kinds, "squad", "SQuAD's files to the data that amos squad fine-tunes on", description)
    add("train", type=Path, metavar="TRAIN_JSON", help="train-v1.1.json or train-v2.0.json")
    add("dev", type=Path, metavar="DEV_JSON", help="the dev file of the same version")
    add_tokenizer_and_out(add)


def add_tagging(kinds: Any) -> None:
    description = """\
Convert labeled words to the input of the task sequence_tagging: pieces, the pieces of each word, labels.

TRAIN and DEV are CoNLL-U, files with one word a line and its label in the last column, as in CoNLL-2000 and CoNLL-2003, or
tables (JSON lines, Parquet, a folder of save_to_disk) with the lists tokens and tags or ner_tags; text may be compressed as
.gz, .xz or .zst. A finished OUT, made from the same files and settings, is not changed."""
    add = add_kind(kinds, "tagging", "labeled words to the data that amos tag fine-tunes on", description)
    add("train", type=Path, metavar="TRAIN", help="labeled words to train on")
    add("dev", type=Path, metavar="DEV", help="labeled words to score on, in the same format")
    add_tokenizer_and_out(add)
    add_label_columns(add)
    add_unlabeled(add)


def add_probing(kinds: Any) -> None:
    description = """\
Convert corpora to the JSON lines of amos probe: OUT/TASK/{train,valid,test}.jsonl.

--treebank: CoNLL-U (Universal Dependencies). pos: the universal tag of each word. dependencies: span1 is the word, span2 its
head, the label its relation with subtype (nmod:poss); the root has no head and is left out.
--chunks: columns of CoNLL-2000, the last one the chunk in IOB. chunks: the chunk of its words, a proxy of constituents, which
need the OntoNotes corpus.
--relations: files of SemEval-2010 task 8. relations: spans of both nominals, 19 labels with direction.
Without DEV, every tenth sentence of TRAIN becomes the validation split. Files may be compressed (.gz, .xz, .zst)."""
    add = add_kind(kinds, "probing", "treebanks, chunks and relations to the targets of amos probe", description)
    add_out(add)
    add("--treebank", type=Path, nargs=3, metavar=("TRAIN", "DEV", "TEST"), help="CoNLL-U files: pos, dependencies")
    add("--chunks", type=Path, nargs="+", metavar="FILE", help="TRAIN [DEV] TEST of CoNLL-2000: chunks")
    add("--relations", type=Path, nargs="+", metavar="FILE", help="TRAIN [DEV] TEST of SemEval-2010 task 8: relations")
