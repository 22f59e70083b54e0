"""The commands of fine-tuning: ``amos classify``, ``glue``, ``squad``, ``tag`` and ``parse``."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli.arguments import add_label_columns, add_subcommand, add_unlabeled, import_fairseq, refuse_given
from amos_fairseq.downstream.classification.glue.tasks import AVERAGED
from amos_fairseq.downstream.squad.official import print_scores
from amos_fairseq.downstream.views import PARSING_VIEWS, TAGGING_VIEWS, VIEW_LAYERS
from amos_fairseq.errors import UserError
from amos_fairseq.output.terminal import say
from amos_fairseq.recipes import PRECISIONS

SIZES = ("small", "base", "large")
INPUTS = ("train", "dev", "data", "predict", "teachers", "own_tasks")  # arguments that name existing files and folders
BASELINES = {
    "random": "random: every seed from random weights",
    "linear": "linear: logistic or ridge regression on states of the frozen encoder, in seconds",
}


def add_arguments(
    parser: argparse.ArgumentParser,
    data_help: str | None,
    required: bool = True,
    has_pairs: bool = True,
    has_pooling: bool = True,
    raw_help: str | None = None,
    several_data: bool = False,
    baselines: tuple[str, ...] = (),
) -> None:
    """Add what to fine-tune, the recipe and options that override it (None leaves the recipe's value), and the devices.

    Args:
        data_help: of --data; None for a command without it.
        required: whether the parser itself requires --checkpoint, --data and --out.
        has_pairs: whether an input can be a pair of texts.
        has_pooling: whether the head reads one vector for each input.
        raw_help: what a raw file is, for --train and --dev, which may then replace --data (:func:`check_data`).
        several_data: whether --data takes several directories.
        baselines: choices of --baseline, of a command for one's own labels, which has the recipe for them.
    """
    add = parser.add_argument
    text = "checkpoint, or SAVE_DIR of a run (its last checkpoint)"
    add("--checkpoint", metavar="CKPT", required=required, help=text)
    if raw_help is not None:
        text = f"raw files, converted with the tokenizer of the checkpoint and kept in OUT/data: {raw_help}"
        add("--train", metavar="FILE", type=Path, help=text)
        add("--dev", metavar="FILE", type=Path, help="the same, to score on")
        data_help = None if data_help is None else f"instead of --train and --dev: {data_help}"
    if data_help is not None:
        several = {"nargs": "+", "action": "extend"} if several_data else {}
        add("--data", metavar="DIR", required=required and raw_help is None, help=data_help, **several)
    text = "directory for runs, tables and predictions; the same command continues there"
    add("--out", metavar="DIR", required=required, help=text)
    add("--seeds", type=int, metavar="N", default=5, help="runs per task, with seeds 1 to N")
    add("--from-scratch", action="store_true", help="baseline: initialize the checkpoint's architecture randomly")

    if baselines:
        text = "also train these, for rows of the table. " + "; ".join(BASELINES[name] for name in baselines)
        add("--baseline", nargs="+", choices=baselines, default=(), help=text)
    text = "own_labels, amos, amos_grid, bam, electra, electric, mlm, teams, or the path of a YAML file"
    add("--recipe", metavar="NAME", default="own_labels" if baselines else "amos", help=text)
    text = "small, base or large, where the recipe depends on it (default: from the encoder's width)"
    add("--size", choices=SIZES, metavar="SIZE", help=text)
    add("--lr", type=float, help="learning rate of every task (default: the recipe's)")
    add("--epochs", type=int, metavar="N", help="epochs of every task (default: the recipe's)")
    add("--batch-size", type=int, metavar="N", help="batch size of every task (default: the recipe's)")
    if has_pairs:
        text = "</s> between the texts of a pair, 1 or 2 (default: the recipe's: 2 in amos and amos_grid, else 1)"
        add("--num-separators", type=int, choices=(1, 2), metavar="N", help=text)
    text = "repeat all epochs until there are N updates or more, for small data (default: the recipe's, 0)"
    add("--min-updates", type=int, metavar="N", help=text)
    text = "the head reads layer K (a number from 1 on), and the layers above it are left out; mix: a learned mixture of all "
    text += "layers; or last (default: the recipe's, last)"
    add("--layers", metavar="K", help=text)
    text = "start the N upper layers from new random weights, for small data (default: the recipe's, 0)"
    add("--new-top-layers", type=int, metavar="N", help=text)
    if has_pooling:
        text = "the head reads the state of the first token, or the mean of all (default: the recipe's, first)"
        add("--pooling", choices=("first", "mean"), help=text)
    text = "batches of examples of similar length, which need little padding, or random ones (default: the recipe's)"
    add("--similar-lengths", action=argparse.BooleanOptionalAction, help=text)

    add("--parallel", type=int, metavar="N", default=1, help="concurrent runs on the CPU; each GPU runs one at a time")
    add("--cpu", action="store_true", help="do not use GPUs")
    text = "dtype of the training; auto: as in the results in OUT, and for new ones bf16 where the CPU, or every GPU, "
    text += "supports bfloat16 in hardware, else float32; fp16 needs a GPU"
    add("--precision", choices=PRECISIONS, default="float32", help=text)
    text = "keep all checkpoints of every run, not only the weights of each task's best run"
    add("--keep-checkpoints", action="store_true", help=text)


def add_cross_views(parser: argparse.ArgumentParser, views: tuple[str, ...]) -> None:
    """Add the options of cross-view training, of labels of words or of trees; ``views``: those of the head."""
    add = parser.add_argument
    text = "cross-view training on the sentences of --unlabeled: views separated by ',', of "
    text += f"{', '.join(views)}, and the baseline word_dropout (default: the recipe's, none)"
    add("--views", metavar="A,B,...", help=text)
    text = "layers that compute the one-sided states: the lower half, or all (default: the recipe's, half)"
    add("--view-layers", choices=VIEW_LAYERS, help=text)
    text = "fraction of the updates before unlabeled sentences train the model itself; until then they train only the "
    text += "modules of the views (default: the recipe's, 0.1)"
    add("--unlabeled-start", type=float, metavar="F", help=text)


def check_prediction(arguments: argparse.Namespace, *used: str) -> None:
    """Refuse an option that was given with ``--predict`` and is not among the ``used`` ones."""
    used += ("subcommand", "checkpoint", "predict", "out", "cpu")
    refuse_given(arguments, [name for name in vars(arguments) if name not in used], "has no effect with --predict")


def check_baseline(arguments: argparse.Namespace) -> None:
    if arguments.from_scratch and arguments.baseline:
        raise UserError("--baseline compares with pretrained weights, --from-scratch has none: leave one of them out")


def check_data(arguments: argparse.Namespace) -> None:
    flags = [f"--{name}" for name in ("train", "dev") if getattr(arguments, name) is not None]
    if arguments.data is not None and flags:
        raise UserError(f"{' and '.join(flags)} and --data are two ways to give the data: leave one of them out")
    if arguments.data is None and not flags:
        raise UserError("there are no data: give raw files as --train FILE --dev FILE, or prepared ones as --data DIR")
    if len(flags) == 1:
        missing = "--dev" if flags == ["--train"] else "--train"
        raise UserError(f"{flags[0]} needs {missing} too, the other raw file")


def start(arguments: argparse.Namespace) -> None:
    """Say what is read, look for the files, and import PyTorch and fairseq, which takes seconds."""
    given = [getattr(arguments, name, None) for name in INPUTS]
    inputs = [path for value in given for path in (value if isinstance(value, list) else [value])]
    if getattr(arguments, "predict", None) is None:
        import_fairseq(arguments.checkpoint, arguments.subcommand, inputs)
    else:
        say(f"reading {arguments.checkpoint} and {arguments.predict}", arguments.subcommand)
        import_fairseq(inputs=inputs)


CLASSIFY_DESCRIPTION = """\
Fine-tune a checkpoint of this package on any table of texts, or pairs of texts, with a class, several labels or a number: TSV,
CSV, JSON lines, Parquet, or a folder that datasets saved. The command prints and saves medians and standard deviations over the
seeds (classification.md, .csv and .json in OUT) beside a model that always predicts the most frequent class; each run also has
its predictions. After a stop the same command continues. With --predict the run that is best on dev labels another table.
"""


def add_classify(subparsers: Any) -> None:
    parser = add_subcommand(
        subparsers, "classify", "fine-tune a checkpoint on your own labeled texts", CLASSIFY_DESCRIPTION, run_classify
    )
    add = parser.add_argument
    text = "table with a header: .tsv, .csv, JSON lines, Parquet, or a folder of datasets"
    add("--train", metavar="FILE", type=Path, help=text)
    text = "table to score on (default: a tenth of the rows of --train, at random)"
    add("--dev", metavar="FILE", type=Path, help=text)
    text = "OUT of this command as --checkpoint: label all rows of FILE with its best run, and write them to the file --out"
    add("--predict", metavar="FILE", type=Path, help=text)
    text = "column of the texts, or two for pairs (default: one with a usual name, such as text, or the only one)"
    add("--text", metavar="COLUMN", nargs="+", help=text)
    text = "column of the labels (default: one with a usual name, such as label, or the only one besides the texts)"
    add("--label", metavar="COLUMN", help=text)
    text = "classes: one of several; labels: any number a row; number (default: inferred, unless it is in doubt)"
    add("--kind", choices=("classes", "labels", "number"), help=text)
    text = "between the labels of a row, with --kind labels; lists in JSON lines and Parquet need none"
    add("--label-separator", metavar="TEXT", default=",", help=text)
    add("--no-header", action="store_true", help="the first line is a row; the columns are called 1, 2, ...")
    add("--csv-quotes", action="store_true", help="quotes in .tsv are those of CSV (default: ordinary characters)")
    add_arguments(parser, None, baselines=("random", "linear"))


def run_classify(arguments: argparse.Namespace) -> None:
    if arguments.predict is not None:
        check_prediction(arguments, "text", "no_header", "csv_quotes")
    elif arguments.train is None:
        raise UserError("give the table to train on as --train, or one to label as --predict")
    else:
        from amos_fairseq.downstream.classification.prepare import tables_of

        arguments.tables = tables_of(arguments)
    check_baseline(arguments)
    start(arguments)
    from amos_fairseq.downstream.classification.command import main

    main(arguments)


GLUE_DESCRIPTION = """\
Fine-tune a checkpoint of this package, of any objective and size, on GLUE: one fairseq-train process per task and seed, one at
a time on each GPU. The command prints and saves medians and standard deviations over the seeds as in AMOS Table 1 (glue.md,
glue.csv and glue.json in OUT). After a stop the same command continues; it does not repeat finished runs.
Official files are converted with the tokenizer of the checkpoint, once; OUT/data keeps the result.
"""


def add_glue(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "glue", "fine-tune a checkpoint on GLUE", GLUE_DESCRIPTION, run_glue)
    add_arguments(parser, "GLUE's official files (CoLA/train.tsv, ...), or what amos prepare glue wrote")
    add = parser.add_argument
    text = f"tasks, separated by commas, or ALL that are in --data of {', '.join(AVERAGED)}; WNLI is known too and never part "
    add("--tasks", metavar="LIST", default="ALL", help=text + "of the average")
    text = "start RTE, STS-B and MRPC from the MNLI run that is best on dev, of this command or in OUT (default: from CKPT)"
    add("--intermediate", metavar="OUT", nargs="?", const="", help=text)
    text = "predict the test sets with each task's best run on dev and write the archive for the leaderboard"
    add("--write-test", action="store_true", help=text)
    text = "train on N rows of a task, chosen at random, if it has more (default: all)"
    add("--max-rows", type=int, metavar="N", help=text)
    text = "YAML of your own tasks, run beside GLUE's: NAME: {train: FILE, dev: FILE, text: [COLUMN], label: COLUMN, ...}, the "
    text += "options of amos classify"
    add("--own-tasks", metavar="FILE", type=Path, help=text)
    add("--multi-task", action="store_true", help="train one model for all tasks, with a head for each")
    text = "also train on predictions of other models: OUT of this command with --write-train, or a folder of TASK.tsv"
    add("--teachers", metavar="DIR", type=Path, help=text)
    text = "learn from the mean of the teachers of all seeds (default: each seed from the teacher of the same seed)"
    add("--ensemble", action="store_true", help=text)
    text = "weight of the labels beside the teachers' predictions: a number from 0 to 1, or annealed, from 0 to 1 over the "
    text += "updates (default: annealed)"
    add("--gold-weight", metavar="W", help=text)
    text = "write each run's predictions of the rows that it was trained on, for --teachers"
    add("--write-train", action="store_true", help=text)


def run_glue(arguments: argparse.Namespace) -> None:
    if arguments.max_rows is not None and arguments.max_rows < 1:
        raise UserError(f"--max-rows {arguments.max_rows} must be at least 1")
    if arguments.teachers is None:
        refuse_given(arguments, ("ensemble", "gold_weight"), "has no effect without --teachers")
    start(arguments)
    from amos_fairseq.downstream.classification.glue.command import main

    main(arguments)


SQUAD_DESCRIPTION = """\
Fine-tune a checkpoint of this package on SQuAD 1.1 or 2.0, whichever the dev file is of: one fairseq-train process per seed,
one at a time on each GPU. The command prints and saves medians and standard deviations of EM and F1 (squad.md, squad.csv and
squad.json in OUT); each run also has its predictions in the official format, its n best answers and its null odds. After a
stop the same command continues. Raw files are converted with the tokenizer of the checkpoint, once; OUT/data keeps the
result. With --evaluate the command trains nothing and prints the official scores of a prediction file.
"""


def add_squad(subparsers: Any) -> None:
    parser = add_subcommand(
        subparsers, "squad", "fine-tune a checkpoint on SQuAD, or score predictions", SQUAD_DESCRIPTION, run_squad
    )
    add_arguments(
        parser,
        "directory that amos prepare squad wrote",
        required=False,
        has_pooling=False,
        raw_help="a JSON file of SQuAD 1.1 or 2.0, or flat rows of datasets (JSON, JSON lines, Parquet, a folder)",
    )
    add = parser.add_argument
    text = "independent start and end, or XLNet's joint head (default: joint for electra and electric)"
    add("--span-head", choices=("independent", "joint"), help=text)
    text = "tokens of question and context together (default: 512, or the maximum of the encoder)"
    add("--tokens-per-window", type=int, metavar="N", help=text)
    text = "tokens from one window to the next (default: 128, or a quarter of a shorter window)"
    add("--doc-stride", type=int, metavar="N", help=text)
    text = "maximum number of tokens of a question (default: 64, or half of a shorter window)"
    add("--max-question-length", type=int, metavar="N", help=text)
    add("--max-answer-length", type=int, metavar="N", default=30, help="maximum number of tokens of an answer")
    add("--n-best", type=int, metavar="N", default=20, help="answers to keep for each question")
    text = "what EM and F1 compare: words between spaces, or each character of Chinese, Japanese, Thai ... (default: "
    text += "characters if most letters of the dev contexts are of such scripts)"
    add("--score-by", choices=("words", "characters"), help=text)
    add = parser.add_argument_group("scores of a prediction file").add_argument
    text = "print EM and F1 of predictions.json on an official dev file (default: fine-tune)"
    add("--evaluate", nargs=2, type=Path, metavar=("PREDICTIONS", "DATASET"), help=text)
    text = "null_odds.json, on any scale, to search the best thresholds with (default: do not search)"
    add("--null-odds", type=Path, metavar="FILE", help=text)
    text = "odds above it mean no answer (default: use the predictions unchanged)"
    add("--null-threshold", type=float, metavar="X", help=text)


def run_squad(arguments: argparse.Namespace) -> None:
    if arguments.evaluate is not None:
        print_scores(arguments)
        return
    refuse_given(arguments, ("null_odds", "null_threshold"), "is for --evaluate")
    missing = [f"--{name}" for name in ("checkpoint", "out") if getattr(arguments, name) is None]
    if missing:
        arguments.parser.error(f"the following arguments are required: {', '.join(missing)} (or --evaluate)")
    check_data(arguments)
    start(arguments)
    from amos_fairseq.downstream.squad.command import main

    main(arguments)


TAG_DESCRIPTION = """\
Fine-tune a checkpoint of this package on a column of labeled words (parts of speech, chunks, named entities): one
fairseq-train process per seed, one at a time on each GPU. The command prints and saves medians and standard deviations of
accuracy or, for labels that mark spans, span F1 (tagging.md, tagging.csv and tagging.json in OUT); each run also has its
predictions.
Several columns may share one OUT and then one table; given as --data A B they are learned together, by one model. With --views
the model also learns from sentences without labels (cross-view training). After a stop the same command continues. Raw files
are converted with the tokenizer of the checkpoint, once; OUT/data keeps the result.
"""


def add_tag(subparsers: Any) -> None:
    parser = add_subcommand(
        subparsers, "tag", "fine-tune a checkpoint on sequence tagging (POS, chunks, NER)", TAG_DESCRIPTION, run_tag
    )
    add_arguments(
        parser,
        "directory that amos prepare tagging wrote",
        has_pairs=False,
        has_pooling=False,
        raw_help="CoNLL-U, one word a line with its labels behind it, or a table with lists of words and labels",
        several_data=True,
        baselines=("linear",),
    )
    add_label_columns(parser.add_argument)
    add_unlabeled(parser.add_argument)
    add_cross_views(parser, TAGGING_VIEWS)
    text = "share of a word's label that is spread over all labels in training (default: the recipe's, 0; thesis: 0.1)"
    parser.add_argument("--label-smoothing", type=float, metavar="F", help=text)


def run_tag(arguments: argparse.Namespace) -> None:
    check_data(arguments)
    check_baseline(arguments)
    if arguments.data is not None:
        reason = "chooses from raw files; --data have it from amos prepare tagging"
        refuse_given(arguments, ("column", "columns", "encoding", "labeled", "unlabeled"), reason)
    start(arguments)
    from amos_fairseq.downstream.tagging.command import main

    main(arguments)


PARSE_DESCRIPTION = """\
Fine-tune a checkpoint of this package on the dependency trees of a treebank: one fairseq-train process per seed, one at a time
on each GPU. The command prints and saves medians and standard deviations of LAS and UAS (parsing.md, parsing.csv and
parsing.json in OUT); each run also has the dev file with its trees (predictions.conllu). After a stop the same command
continues. The files are converted with the tokenizer of the checkpoint, once; OUT/data keeps the result. With --predict the run
that is best on dev parses other sentences. With --views the model also learns from sentences without trees (cross-view
training).
"""


def add_parse(subparsers: Any) -> None:
    parser = add_subcommand(
        subparsers, "parse", "fine-tune a checkpoint on dependency trees", PARSE_DESCRIPTION, run_parse
    )
    add_arguments(
        parser,
        None,
        has_pairs=False,
        has_pooling=False,
        raw_help="treebank in CoNLL-U, plain or as .gz, .xz or .zst",
    )
    add_unlabeled(parser.add_argument)
    add_cross_views(parser, PARSING_VIEWS)
    text = "OUT of this command as --checkpoint: write the sentences of FILE with the trees of its best run to the file --out"
    parser.add_argument("--predict", metavar="FILE", type=Path, help=text)


def run_parse(arguments: argparse.Namespace) -> None:
    if arguments.predict is not None:
        check_prediction(arguments)
    elif arguments.train is None or arguments.dev is None:
        raise UserError("give the treebanks as --train FILE --dev FILE, or sentences to parse as --predict FILE")
    start(arguments)
    from amos_fairseq.downstream.parsing.command import main

    main(arguments)
