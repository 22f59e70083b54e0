"""``amos inspect``: one text seen through a pretrained model, in the terminal and as one HTML page."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError

DESCRIPTION = """\
Mask a text as pretraining does and show, for each masked token, the original, what each depth of the generator proposes
with its probability, the mixture weights and the sampled token, and how the discriminator judged every token (compare
Table 9 of the AMOS paper). Shown is what the objective has: of an mlm the proposals alone, of TEAMS also the candidates of
multi-word selection, of Electric, which masks nothing, the probability of noise and log p (the negative energy) of each
token. Every masked token reads <mask>, whatever --mask-treatment the run had. Special symbols are never sampled and left
out of the proposals; probabilities are those of the whole softmax. The same goes into one HTML page without external parts.
"""
LARGEST_SEED = 2**63 - 1  # 63 bits, as seeds of noise in training


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="what a pretrained model makes of a text, token by token",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint, or the SAVE_DIR of a run (its last one)"
    )
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", default=argparse.SUPPRESS, help="the text itself")
    text.add_argument("--file", default=argparse.SUPPRESS, help="a UTF-8 file with the text")
    parser.add_argument(
        "--tokenizer", metavar="DIR", default=argparse.SUPPRESS,
        help="tokenizer of the run (default: the tokenizer directory beside the checkpoint)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="of masks and of the sampled tokens")
    parser.add_argument(
        "--mask-prob", type=float, metavar="P", default=argparse.SUPPRESS,
        help="share of tokens to mask (default: that of the run)",
    )  # fmt: skip
    parser.add_argument("--top", type=int, metavar="N", default=3, help="proposals shown per depth")
    parser.add_argument("--html", metavar="FILE", default="inspection.html", help="where the page goes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    text = read_text(arguments)
    mask_prob = getattr(arguments, "mask_prob", None)
    if mask_prob is not None and not 0 < mask_prob < 1:
        raise UserError(f"--mask-prob {mask_prob:g} is no share of tokens: give a number between 0 and 1, such as 0.15")
    if arguments.top < 1:
        raise UserError(f"--top {arguments.top} shows no proposals: give 1 or more")
    if not 0 <= arguments.seed <= LARGEST_SEED:
        raise UserError(f"--seed {arguments.seed} is out of range: give a number from 0 to {LARGEST_SEED}")
    # Imported here: the model and its libraries take seconds that `amos --help` need not wait.
    from amos_fairseq.checkpoints.read import load_pretrained
    from amos_fairseq.cli.inspect_page import render_page
    from amos_fairseq.cli.inspect_table import print_inspection
    from amos_fairseq.cli.inspection import inspect_text
    from amos_fairseq.files import whole_file

    pretrained = load_pretrained(arguments.checkpoint, getattr(arguments, "tokenizer", None))
    inspection = inspect_text(pretrained, text, arguments.seed, mask_prob, arguments.top)
    print_inspection(inspection)
    try:
        with whole_file(arguments.html) as unfinished:
            Path(unfinished).write_text(render_page(inspection), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{arguments.html}: the page cannot be written ({error.strerror}); choose another place with --html"
        ) from error
    print(f"page: {arguments.html}")


def read_text(arguments: argparse.Namespace) -> str:
    if hasattr(arguments, "text"):
        return arguments.text
    try:
        return Path(arguments.file).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{arguments.file}: the text cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{arguments.file}: not UTF-8 at byte {error.start}; convert it, for example with iconv"
        ) from error
