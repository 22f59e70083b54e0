"""``amos import``: convert a Hugging Face model, or the released AMOS checkpoint, to a fairseq checkpoint."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.checkpoint_files import check_output_file
from amos_fairseq.cli.arguments import add_subcommand, import_fairseq, refuse_given
from amos_fairseq.errors import UserError

DESCRIPTION = """\
Convert SOURCE to OUT.pt, a checkpoint for fairseq-train (fine-tuning or further pretraining), `amos glue`, `amos squad`,
`amos export` and amos_fairseq.load, with its tokenizer in the directory `tokenizer` beside it. SOURCE is the folder of an
MPNet, ELECTRA (discriminator), DeBERTaV3, BERT or RoBERTa model, whose MLM head is used by the mlm_* architectures; or, with
--from microsoft-amos, the checkpoint released by the AMOS authors, with sp.model and dict.txt in the --tokenizer directory.
No code of SOURCE is executed. Parameters that SOURCE lacks are initialized randomly, and parameters without a counterpart
are left out; the command prints both.
"""
HUGGING_FACE, MICROSOFT_AMOS = "hugging-face", "microsoft-amos"


def add_parser(subparsers: Any) -> None:
    text = "convert a Hugging Face model or the released AMOS checkpoint"
    add = add_subcommand(subparsers, "import", text, DESCRIPTION, run).add_argument
    add("source", metavar="SOURCE", type=Path, help="folder of the model, or the released checkpoint")
    add("out", metavar="OUT.pt", type=Path, help="checkpoint to write")
    text = f"kind of SOURCE: {HUGGING_FACE} or {MICROSOFT_AMOS}"
    choices = (HUGGING_FACE, MICROSOFT_AMOS)
    add("--from", dest="origin", metavar="KIND", choices=choices, default=HUGGING_FACE, help=text)
    text = (
        "folder of ELECTRA's or DeBERTaV3's generator (default: the file beside DeBERTaV3's discriminator, else random)"
    )
    add("--generator", metavar="DIR", type=Path, help=text)
    text = "architecture to continue with such as electra_small; SOURCE decides the sizes "
    text += "(default: electra for ELECTRA, mlm where SOURCE has an MLM head, else amos)"
    add("--arch", metavar="ARCH", help=text)
    text = "directory of the tokenizer (default: SOURCE; required with --from microsoft-amos)"
    add("--tokenizer", metavar="DIR", type=Path, help=text)
    text = "layers of the released generator with an MLM head (default: 4,6,8)"
    add("--depths", metavar="LAYERS", help=text)


def run(arguments: argparse.Namespace) -> None:
    out = arguments.out
    check_output_file(out)
    if arguments.origin == HUGGING_FACE:
        refuse_given(arguments, ["depths"], f"has no effect without --from {MICROSOFT_AMOS}")
    else:
        refuse_given(
            arguments, ["generator"], f"has no effect with --from {MICROSOFT_AMOS}, whose file has its generator"
        )
    if not arguments.source.exists():
        raise UserError(
            f"{arguments.source}: no such file or folder: give a folder of a Hugging Face model, as hf download --local-dir "
            "writes it, or a checkpoint"
        )
    import_fairseq(inputs=[arguments.generator, arguments.tokenizer])
    from amos_fairseq.hugging_face.import_folder import import_folder, report_lines, write
    from amos_fairseq.hugging_face.import_released import import_release

    if arguments.origin == HUGGING_FACE:
        imported = import_folder(arguments.source, arguments.arch, arguments.generator, arguments.tokenizer)
    elif arguments.tokenizer is None:
        raise UserError(f"--from {MICROSOFT_AMOS} needs --tokenizer DIR, with the sp.model and dict.txt of the release")
    else:
        imported = import_release(arguments.source, arguments.tokenizer, arguments.arch, arguments.depths)
    write(imported, out)
    print("\n".join(report_lines(imported, out)))
