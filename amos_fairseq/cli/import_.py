"""``amos import``: weights of Hugging Face, or of the AMOS authors' release, as a checkpoint of ours."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amos_fairseq.errors import UserError

if TYPE_CHECKING:
    from amos_fairseq.checkpoints.write import Imported

DESCRIPTION = """\
SOURCE becomes OUT.pt, a checkpoint for fairseq-train (to fine-tune, or to continue pretraining), `amos glue`, `amos squad`,
`amos export` and amos_fairseq.load, with its tokenizer in the directory `tokenizer` beside it. SOURCE is a folder of an
MPNet, ELECTRA (discriminator), BERT or RoBERTa model, whose MLM head continues in an mlm_* architecture; or, with --from
microsoft-amos, the checkpoint that the AMOS authors released, whose sp.model and dict.txt lie in the --tokenizer directory.
No code of SOURCE is run. What SOURCE lacks starts from random values, what has no place here is left out; both are printed.
"""
HUGGING_FACE, MICROSOFT_AMOS = "hugging-face", "microsoft-amos"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "import",
        help="from Hugging Face, or the released AMOS checkpoint",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, help="folder of a model, or the released checkpoint")
    parser.add_argument("out", metavar="OUT.pt", type=Path, help="the checkpoint to write")
    parser.add_argument(
        "--from", dest="origin", metavar="KIND", choices=(HUGGING_FACE, MICROSOFT_AMOS), default=HUGGING_FACE,
        help=f"what SOURCE is: {HUGGING_FACE} or {MICROSOFT_AMOS}",
    )  # fmt: skip
    parser.add_argument(
        "--generator", metavar="DIR", type=Path, default=argparse.SUPPRESS,
        help="folder of ELECTRA's generator (default: the generator starts from random values)",
    )  # fmt: skip
    parser.add_argument(
        "--arch", metavar="ARCH", default=argparse.SUPPRESS,
        help="objective to continue with, such as electra_small; SOURCE decides the sizes (default: electra for ELECTRA, mlm "
        "where SOURCE has an MLM head, else amos)",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer", metavar="DIR", type=Path, default=argparse.SUPPRESS,
        help="directory of the tokenizer (default: SOURCE; needed with --from microsoft-amos)",
    )  # fmt: skip
    parser.add_argument(
        "--depths", metavar="LAYERS", default=argparse.SUPPRESS,
        help="layers of the released generator that carry an MLM head (default: those that the file names, else 4,6,8)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="of the values that SOURCE lacks")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    # Imported here: the model and its libraries take seconds that `amos --help` need not wait.
    from amos_fairseq.checkpoints.write import check_output_file, write

    check_output_file(arguments.out)
    imported = read(arguments)
    write(imported, arguments.out)
    print("\n".join(report(imported, arguments)))


def read(arguments: argparse.Namespace) -> "Imported":
    names = ("arch", "generator", "tokenizer", "depths")
    arch, generator, tokenizer, depths = (getattr(arguments, name, None) for name in names)
    if arguments.origin == HUGGING_FACE:
        if depths is not None:
            raise UserError("--depths belongs to --from microsoft-amos: a Hugging Face folder has no such heads")
        from amos_fairseq.hugging_face.import_model import import_folder

        return import_folder(arguments.source, arch, generator, tokenizer, arguments.seed)
    if tokenizer is None:
        raise UserError(
            "--from microsoft-amos needs --tokenizer DIR, the directory with the release's sp.model and dict.txt"
        )
    if generator is not None:
        raise UserError("--generator has no place with --from microsoft-amos: the released file holds its generator")
    from amos_fairseq.checkpoints.microsoft_amos import import_release

    return import_release(arguments.source, tokenizer, arch, depths, arguments.seed)


def report(imported: "Imported", arguments: argparse.Namespace) -> list[str]:
    """What was held, what starts afresh, what was left out, and the flags with which fairseq-train builds the same."""
    from amos_fairseq.checkpoints.write import changed_flags

    model, config = imported.model, imported.config
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    new = [name for name in imported.newly_initialized if name in sizes]
    num_imported = sum(sizes.values()) - sum(sizes[name] for name in new)
    parts = sorted({name.split(".")[0] for name in new})
    lines = [
        f"{imported.source}: {num_imported:,} of {sum(sizes.values()):,} parameters of {config.model._name} are imported"
    ]
    if new:
        lines.append(f"from random values (--seed {arguments.seed}): {', '.join(parts)} ({len(new)} weights)")
    lines += imported.remarks
    if imported.unexpected_keys:
        lines.append(f"without a place here, left out: {', '.join(imported.unexpected_keys)}")
    lines.append(f"wrote {arguments.out} and {arguments.out.parent / 'tokenizer'}")
    flags = ["--arch", config.model._name, *changed_flags(config)]
    lines.append(f"flags of fairseq-train that build this model: {' '.join(flags)}")
    return lines
