"""``amos report``: the figures and tables of the AMOS paper for runs of one's own, as one HTML page."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli.arguments import add_subcommand, import_fairseq
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.output.terminal import say
from amos_fairseq.strangers import read_text

DESCRIPTION = """\
Write one HTML page about pretraining runs, without external resources: their cost; the discriminator's loss on replaced tokens
by generator depth (AMOS Figure 1a), MLM loss by depth (1b), mixture weights (5a), accuracy on replaced tokens (5b); results of
fine-tuning (Table 1) and the scores of kept checkpoints (Figure 6; TEAMS Figure 3); replaced tokens in sentences (Table 9);
edge probing ("Figure 4", Table 8). Parts without input are left out, with a line that says what adds them. The figures are also
written as PNG and SVG, to the folder PAGE_figures beside the page. What is shown depends on the objective.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(
        subparsers, "report", "write one page with the figures and tables of runs", DESCRIPTION, run
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="SAVE_DIR of a run of pretraining; several runs are drawn together")
    several = {"nargs": "+", "action": "extend", "metavar": "DIR", "default": []}
    text = "outputs of amos glue, squad or classify, also of several checkpoints (default: none)"
    add("--glue", **several, help=text)
    add("--tag", **several, help="outputs of amos tag or amos parse (default: none)")
    add("--probe", **several, help="outputs of amos probe (default: none)")
    text = "draw the scores of kept checkpoints over this (default: flops for several runs, if known, else updates)"
    add("--over", choices=("updates", "hours", "flops"), help=text)
    add("--text", metavar="FILE", help="UTF-8 held-out text for Figure 1a (default: the run's validation split)")
    text = "text for Table 9; can be repeated (default: a paragraph of the run's validation split)"
    add("--sentence", action="append", metavar="TEXT", default=[], help=text)
    add("--device", default="cpu", help="device to compute on, such as cuda or cuda:1")
    add("--out", default="report.html", metavar="FILE", help="HTML page to write")


def run(arguments: argparse.Namespace) -> None:
    out = Path(arguments.out)
    check_arguments(arguments, out)
    text = None if arguments.text is None else read_text(arguments.text, "give a text in UTF-8", of_user=True)
    if text is not None and not text.strip():
        raise UserError(f"--text {arguments.text} is empty: give a file with text")
    say(f"reading {', '.join(arguments.runs)}", "report")  # the imports take seconds
    import_fairseq(inputs=[*arguments.runs, *arguments.glue, *arguments.tag, *arguments.probe])
    from amos_fairseq.checkpoints.encoder import check_device
    from amos_fairseq.report.results import read_benchmarks, read_probing
    from amos_fairseq.report.runs import read_runs
    from amos_fairseq.report.sections import write_report

    check_device(arguments.device)
    results = [read_benchmarks(arguments.glue, "--glue"), read_benchmarks(arguments.tag, "--tag")]
    results.append(read_probing(arguments.probe))
    runs = read_runs(arguments.runs, text, arguments.sentence, arguments.device)
    text_name = "the validation split" if text is None else Path(arguments.text).name
    say("drawing the figures", "report")
    with explain_os_errors(f"{out}: the page cannot be written", "; choose another place with --out"):
        write_report(out, runs, text_name, *results, over=arguments.over)


def check_arguments(arguments: argparse.Namespace, out: Path) -> None:
    """Refuse values out of range, before anything is computed."""
    for sentence in arguments.sentence:
        if not sentence.strip():
            raise UserError(f"--sentence {sentence!r} is empty: give at least one word")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder: give the name of the page, such as {out / 'report.html'}")
    if not (folder := out.absolute().parent).is_dir():
        raise UserError(f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}: give another --out")
