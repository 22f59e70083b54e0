"""``bash examples/comparison/run.sh``: the flags, the piece of work of one call, its end."""

import argparse
import logging
import sys
from pathlib import Path

from budgets import PARTS, Budget, parse_shares
from entries import CONFIGS, parse_setting
from pieces import piece_of

from amos_fairseq.errors import UserError, report_user_errors

DESCRIPTION = """\
Pretrain a list of objectives with an equal budget, fine-tune each on GLUE tasks, and put scores, FLOPs and hours beside
what the papers found: OUT/comparison.json, OUT/comparison.md, OUT/score_by_flops.png, OUT/score_by_hours.png. Stopped, or
ended by --piece-minutes (exit status 75), the same command continues; 0 means that all is done.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="examples/comparison/run.sh",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    absent = {"default": argparse.SUPPRESS}
    add = parser.add_argument
    add("data", metavar="DATA", help="what preprocess/pretraining/prepare.sh wrote; shards with colons between")
    add("glue", metavar="GLUE", type=Path, help="what preprocess/glue/prepare.sh wrote with DATA/tokenizer")
    add("out", metavar="OUT", type=Path, help="where everything goes; the same command continues")
    add("--size", choices=sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem not in ("entries", "paper")),
        default="tiny", help="of the models, with the settings of configs/SIZE.yaml")  # fmt: skip
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument(
        "--budget-updates", type=float, metavar="N", **absent, help=f"for each entry, a multiple of {PARTS}"
    )
    budget.add_argument(
        "--budget-flops", type=float, metavar="F", **absent, help="of pretraining, as thesis 5.2.2 counts"
    )
    budget.add_argument("--budget-minutes", type=float, metavar="M", **absent,
        help="of pretraining on this machine: the number of updates follows from some that are timed")  # fmt: skip
    add("--objectives", metavar="LIST", **absent, help="entries, with commas between (default: all)")
    add("--entries", metavar="FILE", type=Path, default=CONFIGS / "entries.yaml", help="what can be compared")
    add(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting for every entry, such as common.seed=2",
    )
    add("--tasks", metavar="LIST", default="STS-B,MRPC,QNLI", help="GLUE tasks, with commas between, or ALL")
    add("--seeds", metavar="N", type=int, default=3, help="of fine-tuning, 1 to N")
    add("--fine-tune-at", metavar="LIST", default="0.0625,0.125,0.25,0.5,1", help="shares of the budget")
    add("--recipe", metavar="NAME", **absent, help="of amos glue (default: fine_tuning in configs/SIZE.yaml)")
    add("--lr", type=float, **absent, help="of amos glue for every task (default: fine_tuning in configs/SIZE.yaml)")
    add("--parallel", metavar="N", type=int, default=1, help="fine-tunings at a time on the CPU")
    add("--cpu", action="store_true", help="leave GPUs alone")
    add(
        "--piece-minutes",
        metavar="M",
        type=float,
        default=0.0,
        help="end after M minutes, with status 75; 0: at the end",
    )
    return parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options with checked values; raises :class:`UserError`, or exits with 2 for flags that do not exist."""
    options = build_parser().parse_args(arguments)
    options.data = ":".join(str(Path(shard).resolve()) for shard in options.data.split(":"))
    for name in ("glue", "out", "entries"):
        setattr(options, name, getattr(options, name).resolve())
    given = {kind: getattr(options, f"budget_{kind}", None) for kind in ("updates", "flops", "minutes")}
    options.budget = next(Budget(kind, amount) for kind, amount in given.items() if amount is not None)
    positive = {"--budget": options.budget.amount, "--seeds": options.seeds, "--parallel": options.parallel}
    for flag, value in positive.items():
        if not 0 < value < float("inf"):
            raise UserError(f"{flag} {value:g} makes no run: give a number above 0")
    if not 0 <= options.piece_minutes < float("inf"):
        raise UserError(f"--piece-minutes {options.piece_minutes:g}: give minutes, or 0 for no end")
    options.settings = dict(map(parse_setting, options.set))
    options.fine_tune_at = parse_shares(options.fine_tune_at)
    options.objectives = options.objectives.split(",") if hasattr(options, "objectives") else None
    options.recipe, options.lr = getattr(options, "recipe", None), getattr(options, "lr", None)
    return options


def parse_glue_tasks(text: str) -> tuple[str, ...]:
    """In the order of AMOS Table 1; raises :class:`UserError`."""
    from amos_fairseq.finetuning.glue.tasks import AVERAGED, parse_tasks

    chosen = parse_tasks(text)
    if not set(chosen) <= set(AVERAGED):
        raise UserError(f"--tasks {text}: WNLI counts in no average: leave it out")
    return tuple(task for task in AVERAGED if task in chosen)


@report_user_errors()
def main(arguments: list[str] | None = None) -> int:
    """0 when all is finished, 75 when a piece has ended, 130 after Ctrl-C, 1 for a mistake or a run that failed."""
    # Importing fairseq sets the root logger to DEBUG; it tells of every dictionary that it opens, matplotlib of its fonts.
    logging.getLogger().setLevel(logging.WARNING)
    options = parse(arguments)
    options.tasks = parse_glue_tasks(options.tasks)
    # Imported here: fairseq takes seconds that a mistyped flag need not wait.
    from comparison import Comparison
    from comparison_report import write_report

    from amos_fairseq.finetuning.benchmark import Stopped

    with piece_of(options.piece_minutes) as piece:
        comparison = Comparison(options)
        stopped = False
        try:
            comparison.plan(piece)
            comparison.claim()
            comparison.pretrain(piece)
            comparison.fine_tune(piece)
        except Stopped:
            stopped = True
    if comparison.pretrainings:
        for file in write_report(comparison):
            print(file)
    for failure in comparison.failures:
        print(failure, file=sys.stderr)
    if comparison.failures:
        raise UserError(f"runs that failed: {len(comparison.failures)}; the same command goes on with them")
    if stopped:
        print(f"stopped; what is finished stays in {options.out}, and the same command continues", file=sys.stderr)
    return piece.exit_code if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
