"""``amos adapt``: train a released encoder further on a text, by one command."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.adaptation import NEW, OBJECTIVES, SELF, Adaptation, check_settings, has_begun, weights_sha256
from amos_fairseq.cli import prepare
from amos_fairseq.cli.arguments import SIZE, add_overrides, add_subcommand, import_fairseq, number, refuse_ranks
from amos_fairseq.inputs import BLANK, LINE, TEXT_COLUMN

DESCRIPTION = """\
Train MODEL further on TEXT: MODEL is imported, the text is encoded with its tokenizer, and the training begins with a new
schedule. At the end MODEL and the result are compared: on held-out text, and by the cosine of unrelated lines. The same
command continues after an interruption. OUT/run is then a run like any other: amos export, classify, tag ... take it.
OUT/adapt.yaml is a recipe for amos train, for example to go on with several GPUs.
"""
# 20,000 tokens or more where a fifth of the text has them, at 4 to 12 bytes a token; what is validated takes a minute of a CPU.
HELD_OUT = ("--valid-share", "0.2", "--valid-megabytes", "0.25")
AS_GIVEN = ("document", "text_column", "updates", "minutes", "length", "batch_size")  # fields of an Adaptation


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "adapt", "train a released encoder further on a text", DESCRIPTION, run)
    add = parser.add_argument
    text = "folder of Hugging Face (BERT, RoBERTa, MPNet, DistilBERT, ModernBERT, DeBERTaV3, ELECTRA), SAVE_DIR of a run, or "
    text += "checkpoint"
    add("model", metavar="MODEL", type=Path, help=text)
    add(
        "text",
        metavar="TEXT",
        nargs="+",
        type=Path,
        help="files as for amos prepare text; general text against forgetting too",
    )
    add("--out", required=True, type=Path, metavar="DIR", help="output directory; its path must not contain a colon")
    text = "predict masked tokens, or detect replaced ones with one generator or a mixture (default: that of MODEL)"
    add("--objective", choices=OBJECTIVES, help=text)
    text = "for detection: new (an MLM trained on TEXT first), self (MODEL), or a folder or checkpoint with an MLM head and "
    text += "same tokens; it is not trained with MODEL; may be given several times with --objective amos (default: new; where "
    text += "MODEL was trained with this objective, its own)"
    add("--generator", metavar="new|self|PATH", action="append", default=[], help=text)
    add("--tokenizer", metavar="DIR", type=Path, help="folder of the tokenizer of MODEL (default: MODEL)")
    add("--updates", type=SIZE, default=2000, metavar="N", help="updates of the training, and of a new generator")
    text = "train for this time instead of --updates, which remain those of a new generator (as for amos train)"
    add("--minutes", type=number(float, 0, 1e7), default=0.0, metavar="N", help=text)
    add("--length", type=number(int, 2), default=128, metavar="TOKENS", help="tokens of a block of text")
    add("--batch-size", type=SIZE, default=32, metavar="N", help="blocks of an update")
    add("--document", choices=(BLANK, LINE), default=BLANK, help="what ends a document, as for amos prepare text")
    add("--text-column", default=TEXT_COLUMN, metavar="NAME", help="of tables, as for amos prepare text")
    add("--cpu", action="store_true", help="do not use GPUs, as --set common.cpu=true")
    add_overrides(parser, "optimization.lr=[1e-4]")
    parser.set_defaults(prepare=subparsers.choices["prepare"])


def run(arguments: argparse.Namespace) -> None:
    refuse_ranks("adapt")
    settings = [*arguments.overrides, *("common.cpu=true",) * arguments.cpu]
    check_settings(settings, arguments.objective or "")
    generators = [each if each in (NEW, SELF) else str(Path(each).absolute()) for each in arguments.generator]
    model = str(arguments.model.absolute())
    adaptation = Adaptation(
        model=model,
        texts=[str(text.absolute()) for text in arguments.text],
        objective=arguments.objective or "",
        generator=generators,
        tokenizer=str(arguments.tokenizer.absolute()) if arguments.tokenizer else "",
        settings=settings,
        model_sha256=weights_sha256([model]),
        generator_sha256=weights_sha256([each for each in generators if each not in (NEW, SELF)]),
        **{name: getattr(arguments, name) for name in AS_GIVEN},
    )
    out = arguments.out.absolute()
    # What OUT has already may be gone elsewhere.
    inputs = [] if has_begun(adaptation, out) else [arguments.model, *arguments.text, arguments.tokenizer]
    import_fairseq(inputs=inputs)
    from amos_fairseq.adaptation.adapt import adapt

    def prepare_text(out: Path, tokenizer: Path) -> None:
        words = ["text", *map(str, arguments.text), "--out", str(out), "--tokenizer", str(tokenizer)]
        words += ["--document", arguments.document, "--text-column", arguments.text_column, *HELD_OUT]
        prepare.run(arguments.prepare.parse_args(words, argparse.Namespace(for_adapt=True)))

    adapt(adaptation, out, prepare_text)
