"""``amos report``: the figures and tables of the AMOS paper for runs of one's own, as one HTML page."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli.arguments import add_subcommand, import_fairseq
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.output.terminal import say
from amos_fairseq.untrusted import read_text

DESCRIPTION = """\
Write one HTML page about runs, without scripts and external resources. Of a SAVE_DIR of pretraining: its cost; the training
curves, such as MLM loss by depth (AMOS Figure 1b), mixture weights (5a) and recall of replaced tokens (5b); the discriminator's
loss on replaced tokens by generator depth (1a); the tokens of a text, masked as in training: what each depth predicts, what is
sampled, what the discriminator detects (Table 9). Of a run of fine-tuning: its curves. Of an OUT: the scores of fine-tuning
(Table 1) or of edge probing ("Figure 4", Table 8). What is shown depends on the objective.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "report", "write a page with the figures and tables of runs", DESCRIPTION, run)
    add = parser.add_argument
    text = "SAVE_DIR of a run, or OUT of amos glue, squad, classify, tag, parse or probe; several are shown together"
    add("folders", nargs="+", metavar="RUN", help=text)
    add("--text", metavar="FILE", help="UTF-8 held-out text for Figure 1a (default: the run's validation split)")
    text = "text whose tokens are shown; can be repeated (default: a paragraph of the run's validation split)"
    add("--sentence", action="append", metavar="TEXT", default=[], help=text)
    add("--device", default="cpu", help="device to compute on, such as cuda or cuda:1")
    text = "also write the figures, and each panel of the curves, as PNG and SVG to this folder (default: page alone)"
    add("--figures", metavar="DIR", help=text)
    add("--out", default="report.html", metavar="FILE", help="HTML page to write")


def run(args: argparse.Namespace) -> None:
    out, figures = Path(args.out), None if args.figures is None else Path(args.figures)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: give the name of a page in a folder that exists, such as report.html")
    text = None if args.text is None else read_text(args.text, "give a text in UTF-8")
    say(f"reading {', '.join(args.folders)}", "report")  # the imports take seconds
    import_fairseq(inputs=args.folders)
    from amos_fairseq.checkpoints.encoder import check_device
    from amos_fairseq.report.page import sort_folders, write_report
    from amos_fairseq.report.runs import read_runs

    check_device(args.device)
    folders = sort_folders(args.folders)
    runs = read_runs(folders.runs, text, args.sentence, args.device)
    say("drawing the figures", "report")
    with explain_os_errors(f"{out}: the page or its figures cannot be written", "; choose another place"):
        text_name = "the validation split" if text is None else Path(args.text).name
        write_report(out, figures, runs, folders, text_name)
