"""``amos inspect``: show what a pretrained model does with one text, in the terminal and as an HTML page."""

import argparse
from typing import Any

from amos_fairseq.cli.arguments import add_checkpoint, add_subcommand, import_fairseq
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.files import write_text
from amos_fairseq.strangers import read_text

DESCRIPTION = """\
Mask a text as pretraining does, and show for each masked token the original, the predictions of each generator depth with
their probabilities, the mixture weights and the sampled token, and for every token the discriminator's probability that it was
replaced (compare Table 9 of the AMOS paper). What is shown depends on the objective: for mlm only the predictions; for TEAMS
also the candidates of multi-word selection; for Electric, which masks nothing, the probability of noise and log p (the
negative energy) of each token. Every masked token is replaced by <mask>, whatever mask treatment the run used. Special tokens
are never sampled and are not among the predictions; probabilities are those of the softmax over the whole vocabulary.
With --html a page shows the same in a single file without external resources.
"""
LARGEST_SEED = 2**63 - 1  # 63 bits, like the noise seeds in training


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "inspect", "show what a pretrained model predicts for a text", DESCRIPTION, run)
    add_checkpoint(parser)
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", help="the text itself (default: a paragraph of the run's validation text)")
    text.add_argument("--file", help="UTF-8 file with the text, or a pipe, such as /dev/stdin")
    add = parser.add_argument
    add("--seed", type=int, default=1, help="seed of the masked positions and the sampled tokens")
    add("--mask-prob", type=float, metavar="P", help="share of tokens to mask (default: that of the run)")
    add("--top", type=int, metavar="N", default=3, help="number of predictions to show per depth")
    add("--html", metavar="FILE", help="also write an HTML page (default: the terminal alone)")


def run(arguments: argparse.Namespace) -> None:
    mask_prob = arguments.mask_prob
    if mask_prob is not None and not 0 < mask_prob < 1:
        raise UserError(f"--mask-prob {mask_prob:g} is out of range: give a number between 0 and 1, such as 0.15")
    if arguments.top < 1:
        raise UserError(f"--top {arguments.top} shows no predictions: give 1 or more")
    check_seed(arguments.seed)
    text = arguments.text if arguments.file is None else read_text(arguments.file, "give a text in UTF-8", of_user=True)
    import_fairseq(arguments.checkpoint, inputs=[arguments.tokenizer])
    from amos_fairseq.checkpoints.read import load_checkpoint
    from amos_fairseq.report.inspection import inspect_text, text_of_corpus
    from amos_fairseq.report.pages import print_inspection, render_inspection

    loaded = load_checkpoint(arguments.checkpoint, arguments.tokenizer)
    if text is None:
        text = text_of_corpus(loaded)
    inspection = inspect_text(loaded, text, arguments.seed, mask_prob, arguments.top)
    print_inspection(inspection)
    if arguments.html is not None:
        with explain_os_errors(f"{arguments.html}: the page cannot be written", "; choose another place with --html"):
            write_text(arguments.html, render_inspection(inspection))
        print(f"page: {arguments.html}")


def check_seed(seed: int) -> None:
    if not 0 <= seed <= LARGEST_SEED:
        raise UserError(f"--seed {seed} is out of range: give a number from 0 to {LARGEST_SEED}")
