"""``amos import``, ``amos export`` and ``amos adapt``: from models of Hugging Face to checkpoints, and back."""

import argparse
import dataclasses
import math
import re
import reprlib
from pathlib import Path
from typing import Any

from amos_fairseq.checkpoint_files import check_output_file
from amos_fairseq.cli import prepare
from amos_fairseq.cli.arguments import add_checkpoint, add_subcommand, import_fairseq, refuse_given
from amos_fairseq.errors import UserError
from amos_fairseq.files import check_new_folder

IMPORT_DESCRIPTION = """\
Convert SOURCE to OUT.pt, a checkpoint for fairseq-train (fine-tuning or further pretraining), `amos glue`, `amos squad`,
`amos export` and amos_fairseq.load, with its tokenizer in the directory `tokenizer` beside it. SOURCE is the folder of an
MPNet, ELECTRA (discriminator), BERT or RoBERTa model, whose MLM head is used by the mlm_* architectures; or, with --from
microsoft-amos, the checkpoint released by the AMOS authors, whose sp.model and dict.txt are in the --tokenizer directory.
No code of SOURCE is executed. Parameters that SOURCE lacks are initialized randomly, and parameters without a counterpart
are left out; the command prints both.
"""
HUGGING_FACE, MICROSOFT_AMOS = "hugging-face", "microsoft-amos"


def add_import(subparsers: Any) -> None:
    text = "convert a Hugging Face model or the released AMOS checkpoint"
    parser = add_subcommand(subparsers, "import", text, IMPORT_DESCRIPTION, run_import)
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help="folder of the model, or the released checkpoint")
    add("out", metavar="OUT.pt", type=Path, help="checkpoint to write")
    text = f"kind of SOURCE: {HUGGING_FACE} or {MICROSOFT_AMOS}"
    choices = (HUGGING_FACE, MICROSOFT_AMOS)
    add("--from", dest="origin", metavar="KIND", choices=choices, default=HUGGING_FACE, help=text)
    text = "folder of ELECTRA's generator (default: initialize the generator randomly)"
    add("--generator", metavar="DIR", type=Path, help=text)
    text = "architecture to continue with such as electra_small; SOURCE decides the sizes "
    text += "(default: electra for ELECTRA, mlm where SOURCE has an MLM head, else amos)"
    add("--arch", metavar="ARCH", help=text)
    text = "directory of the tokenizer (default: SOURCE; required with --from microsoft-amos)"
    add("--tokenizer", metavar="DIR", type=Path, help=text)
    text = "layers of the released generator with an MLM head (default: those that the file names, else 4,6,8)"
    add("--depths", metavar="LAYERS", help=text)
    add("--seed", type=int, default=1, help="seed for the parameters that SOURCE lacks")


def run_import(arguments: argparse.Namespace) -> None:
    out, depths = arguments.out, arguments.depths
    check_output_file(out)
    if not arguments.source.exists():
        raise UserError(
            f"{arguments.source}: no such file or folder: give a folder of a Hugging Face model, as hf download --local-dir "
            "writes it, or a checkpoint"
        )
    import_fairseq(inputs=[arguments.generator, arguments.tokenizer])
    from amos_fairseq.hugging_face.import_folder import import_folder
    from amos_fairseq.hugging_face.import_released import import_release
    from amos_fairseq.hugging_face.imported import report_lines, write

    if arguments.origin == HUGGING_FACE:
        if depths is not None:
            raise UserError("--depths belongs to --from microsoft-amos: a Hugging Face folder has no such heads")
        imported = import_folder(
            arguments.source, arguments.arch, arguments.generator, arguments.tokenizer, arguments.seed
        )
    elif arguments.tokenizer is None or arguments.generator is not None:
        raise UserError(
            "--from microsoft-amos needs --tokenizer DIR, with the sp.model and dict.txt of the release, and no --generator: "
            "the released file contains its generator"
        )
    else:
        imported = import_release(arguments.source, arguments.tokenizer, arguments.arch, depths, arguments.seed)
    write(imported, out)
    print("\n".join(report_lines(imported, out, arguments.seed)))


EXPORT_DESCRIPTION = """\
Write CHECKPOINT as the folder OUT, which transformers, sentence-transformers and ONNX exporters load without this package:
model.safetensors, config.json, tokenizer.json with the same token ids, and a model card. A fine-tuned checkpoint becomes a
classification or question answering model, an mlm checkpoint a masked language model, any other pretraining checkpoint its
encoder without a head (MPNetModel with t5 positions; ElectraModel or BertModel without relative positions). Only the
positions of the released AMOS checkpoint need custom code, which is then part of the folder (trust_remote_code=True). The
command loads OUT and compares it with CHECKPOINT before it puts the folder in place, and writes nothing where they differ.
"""


def add_export(subparsers: Any) -> None:
    parser = add_subcommand(
        subparsers, "export", "write a checkpoint as a Hugging Face folder", EXPORT_DESCRIPTION, run_export
    )
    add_checkpoint(parser)
    add = parser.add_argument
    add("out", metavar="OUT", type=Path, help="folder to write")
    of_model = parser.add_mutually_exclusive_group()
    text = "part to export (default: the fine-tuned head or the MLM head with its encoder; otherwise the encoder alone)"
    of_model.add_argument("--part", choices=("encoder", "generator", "discriminator", "mlm"), help=text)
    text = "of a model of several tasks, the task or column whose head to export; ALL writes a folder in OUT for each "
    of_model.add_argument("--head", metavar="TASK", help=text + "(default: the encoder without a head)")
    add("--depth", metavar="D", help="depth of the generator (default: the deepest)")
    text = "model family, where several compute the same function (default: the closest)"
    add("--as", dest="family", choices=("mpnet", "electra", "bert", "roberta"), help=text)
    text = "class names of a fine-tuned head, in order (default: those of the task's data, else LABEL_0, ...)"
    add("--labels", metavar="A,B,...", type=lambda names: [name.strip() for name in names.split(",")], help=text)
    text = "license of the training data, for the model card"
    add("--data-license", metavar="ID", type=card_name, default="unknown", help=text)
    text = "language of the training data, such as en (default: not stated)"
    add("--language", metavar="CODE", type=card_name, help=text)
    text = "name on the Hub of the model that was imported and trained further (default: not stated)"
    add("--base-model", metavar="ID", type=card_name, help=text)
    text = "name on the Hub of a training data set; repeatable (default: not stated)"
    add("--dataset", dest="datasets", metavar="ID", type=card_name, action="append", default=[], help=text)
    text = "do not compare the folder with the checkpoint (default: compare)"
    add("--no-check", dest="check", action="store_false", help=text)
    add("--force", action="store_true", help="replace OUT if it is an exported folder (default: refuse)")


def card_name(value: str) -> str:
    """A value that neither breaks the header of the model card nor is HTML on a web page."""
    if not re.fullmatch(r"(?=.*\w)[\w ./,:+-]{1,200}", value):
        raise argparse.ArgumentTypeError(
            f"{reprlib.repr(value)} is not a name: give an identifier such as cc-by-4.0, en or google/bert, of at most 200 "
            "letters, digits, spaces and . , : / + - _"
        )
    return value


def run_export(arguments: argparse.Namespace) -> None:
    if arguments.head == "ALL":
        refuse_given(arguments, ("depth", "labels"), "has no effect with --head ALL")
    check_new_folder(arguments.out, arguments.force)
    import_fairseq(arguments.checkpoint, arguments.subcommand, [arguments.tokenizer])
    from amos_fairseq.hugging_face import custom_code
    from amos_fairseq.hugging_face.export import export
    from amos_fairseq.hugging_face.model_card import CardSettings
    from amos_fairseq.hugging_face.parts import Choice
    from amos_fairseq.hugging_face.weights import Head

    choice = Choice(*(getattr(arguments, option.name) for option in dataclasses.fields(Choice)))
    card = CardSettings(arguments.data_license, arguments.language, arguments.base_model, tuple(arguments.datasets))
    exported = export(
        arguments.checkpoint, arguments.out, arguments.tokenizer, arguments.force, choice, card, arguments.check
    )
    for folder, (part, agreement) in exported.items():
        code = "; it contains custom code: trust_remote_code=True" if custom_code.is_in(folder) else ""
        print(f"{folder}: {part.class_name}, {part.description}{code}")
        if part.head == Head.POOLED_CLASSIFICATION:
            print("SentenceTransformer(OUT).encode returns the logits; transformers has no class with such a head")
        if part.labels:
            print(f"labels: {', '.join(part.labels)}")
        print(f"compared with the checkpoint: {agreement or 'not (--no-check)'}")


ADAPT_DESCRIPTION = """\
Train MODEL further on TEXT: MODEL is imported, the text is encoded with its tokenizer, and the training begins with a new
schedule. The same command continues after an interruption. OUT/run is then a run like any other: amos export, classify, tag ...
take it. OUT/adapt.yaml is a recipe for amos train, for example to go on with several GPUs.
"""


def add_adapt(subparsers: Any) -> None:
    parser = add_subcommand(
        subparsers, "adapt", "train a released encoder further on a text", ADAPT_DESCRIPTION, run_adapt
    )
    add = parser.add_argument
    text = "folder of Hugging Face (BERT, RoBERTa, MPNet, DistilBERT, ModernBERT, ELECTRA), SAVE_DIR of a run, or checkpoint"
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
    add("--objective", choices=("mlm", "electra", "amos"), help=text)
    text = "for detection: new (an MLM trained on TEXT first), self (MODEL), or a folder or checkpoint with an MLM head and "
    text += "same tokens; it is not trained with MODEL; may be given several times with --objective amos (default: new; where "
    text += "MODEL was trained with this objective, its own)"
    add("--generator", metavar="new|self|PATH", action="append", default=[], help=text)
    add("--tokenizer", metavar="DIR", type=Path, help="folder of the tokenizer of MODEL (default: MODEL)")
    add("--updates", type=int, default=2000, metavar="N", help="updates of the training, and of a new generator")
    text = "train for this time instead of --updates, which remain those of a new generator (as for amos train)"
    add("--minutes", type=float, default=0.0, metavar="N", help=text)
    add("--length", type=int, default=128, metavar="TOKENS", help="tokens of a block of text")
    add("--batch-size", type=int, default=32, metavar="N", help="blocks of an update")
    text = "what ends a document, as for amos prepare text"
    add("--document", metavar="blank|line|N", help=text)
    text = "pairs of texts with a number, such as STS-B's dev.tsv: print before and after training how well the cosines of "
    text += "sentence vectors rank them"
    add("--check-similarity", metavar="FILE", type=Path, help=text)
    several = {"nargs": "+", "action": "extend", "metavar": "KEY=VALUE", "default": []}
    add(
        "--set",
        dest="settings",
        **several,
        help="settings of the training, such as optimization.lr=[1e-4] (default: none)",
    )
    parser.set_defaults(prepare=subparsers.choices["prepare"])


def run_adapt(arguments: argparse.Namespace) -> None:
    for name in ("updates", "length", "batch_size"):
        if getattr(arguments, name) < 1 + (name == "length"):
            raise UserError(f"--{name.replace('_', '-')} {getattr(arguments, name)} is too small")
    if not 0 <= arguments.minutes < math.inf:
        raise UserError(f"--minutes {arguments.minutes:g} must be 0, for --updates, or more")
    has_begun = (arguments.out / "settings.json").is_file()  # what is in OUT already may be gone
    inputs = [] if has_begun else [arguments.model, *arguments.text, arguments.tokenizer]
    import_fairseq(inputs=[*inputs, arguments.check_similarity])
    from amos_fairseq.adaptation.adapt import NEW, SELF, Adaptation, adapt

    def prepare_text(out: Path, tokenizer: Path) -> None:
        words = ["text", *map(str, arguments.text), "--out", str(out), "--tokenizer", str(tokenizer)]
        words += ["--document", arguments.document] if arguments.document else []
        prepare.run(arguments.prepare.parse_args(words))

    generators = [each if each in (NEW, SELF) else str(Path(each).absolute()) for each in arguments.generator]
    given = Adaptation(
        model=str(arguments.model.absolute()),
        texts=[str(text.absolute()) for text in arguments.text],
        document=arguments.document or "",
        objective=arguments.objective or "",
        generator=generators,
        tokenizer=str(arguments.tokenizer.absolute()) if arguments.tokenizer else "",
        updates=arguments.updates,
        minutes=arguments.minutes,
        length=arguments.length,
        batch_size=arguments.batch_size,
        settings=arguments.settings,
    )
    adapt(given, arguments.out.absolute(), prepare_text, arguments.check_similarity)
