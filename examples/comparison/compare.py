"""``bash examples/comparison/run.sh``: flags and main program of a comparison."""

import argparse
import sys
from pathlib import Path

from budgets import PARTS, Budget, parse_shares
from entries import CONFIGS, parse_setting

from amos_fairseq.errors import UserError, report_user_errors

DESCRIPTION = """\
Pretrain several objectives with an equal budget, fine-tune each on GLUE tasks, and report scores, FLOPs and hours beside the
papers' findings: OUT/comparison.json, OUT/comparison.md, OUT/score_by_flops.png, OUT/score_by_hours.png. After a stop, or
the end of --piece-minutes (exit status 75), the same command continues; 0 means that everything is finished.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="examples/comparison/run.sh",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    absent = {"default": argparse.SUPPRESS}
    sizes = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem not in ("entries", "paper"))
    add = parser.add_argument
    add("data", metavar="DATA", help="output of preprocess/pretraining/prepare.sh; shards separated by colons")
    add("glue", metavar="GLUE", type=Path, help="output of preprocess/glue/prepare.sh with DATA/tokenizer")
    add("out", metavar="OUT", type=Path, help="output folder; the same command continues")
    add("--size", choices=sizes, default="tiny", help="model size, with the settings of configs/SIZE.yaml")
    budget = parser.add_mutually_exclusive_group(required=True)
    add_budget = budget.add_argument
    add_budget("--budget-updates", type=float, metavar="N", **absent, help=f"for each entry, a multiple of {PARTS}")
    add_budget("--budget-flops", type=float, metavar="F", **absent, help="of pretraining (amos flops --reference)")
    add_budget(
        "--budget-minutes",
        type=float,
        metavar="M",
        **absent,
        help="of pretraining on this machine; some updates are timed to compute the number of updates",
    )
    add("--objectives", metavar="LIST", **absent, help="entries, separated by commas (default: all)")
    add("--entries", metavar="FILE", type=Path, default=CONFIGS / "entries.yaml", help="available entries")
    add(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting for every entry, such as common.seed=2",
    )
    add("--tasks", metavar="LIST", default="STS-B,MRPC,QNLI", help="GLUE tasks, separated by commas, or ALL")
    add("--seeds", metavar="N", type=int, default=3, help="seeds of fine-tuning, 1 to N")
    add("--fine-tune-at", metavar="LIST", default="0.0625,0.125,0.25,0.5,1", help="shares of the budget")
    add("--recipe", metavar="NAME", **absent, help="recipe of amos glue (default: fine_tuning in configs/SIZE.yaml)")
    add(
        "--lr",
        type=float,
        **absent,
        help="learning rate of amos glue for every task (default: fine_tuning in configs/SIZE.yaml)",
    )
    add("--parallel", metavar="N", type=int, default=1, help="simultaneous fine-tuning runs on the CPU")
    add("--cpu", action="store_true", help="do not use GPUs")
    add(
        "--piece-minutes", metavar="M", type=float, default=0.0, help="stop after M minutes with status 75; 0: no limit"
    )
    return parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse options and check their values; raise :class:`UserError`, or exit with 2 for unknown flags."""
    options = build_parser().parse_args(arguments)
    options.data = ":".join(str(Path(shard).resolve()) for shard in options.data.split(":"))
    for name in ("glue", "out", "entries"):
        setattr(options, name, getattr(options, name).resolve())
    given = {kind: getattr(options, f"budget_{kind}", None) for kind in ("updates", "flops", "minutes")}
    options.budget = next(Budget(kind, amount) for kind, amount in given.items() if amount is not None)
    positive = {"--budget": options.budget.amount, "--seeds": options.seeds, "--parallel": options.parallel}
    for flag, value in positive.items():
        if not 0 < value < float("inf"):
            raise UserError(f"{flag} {value:g} is out of range: give a number above 0")
    if not 0 <= options.piece_minutes < float("inf"):
        raise UserError(f"--piece-minutes {options.piece_minutes:g}: give minutes, or 0 for no limit")
    options.settings = dict(map(parse_setting, options.set))
    options.fine_tune_at = parse_shares(options.fine_tune_at)
    options.objectives = options.objectives.split(",") if hasattr(options, "objectives") else None
    options.recipe, options.lr = getattr(options, "recipe", None), getattr(options, "lr", None)
    return options


def parse_glue_tasks(text: str) -> tuple[str, ...]:
    """Return the tasks in the order of AMOS Table 1; raise :class:`UserError`."""
    from amos_fairseq.downstream.texts.glue.tasks import AVERAGED, parse_tasks

    chosen = parse_tasks(text)
    if not set(chosen) <= set(AVERAGED):
        raise UserError(f"--tasks {text}: WNLI is not part of the average: remove it")
    return tuple(task for task in AVERAGED if task in chosen)


@report_user_errors()
def main(arguments: list[str] | None = None) -> int:
    """Return 0 if all is finished, 75 at the time limit, 130 after Ctrl-C; exit with 1 after an error or a failed run."""
    options = parse(arguments)
    options.tasks = parse_glue_tasks(options.tasks)
    # Imported here: fairseq takes seconds to import, and a wrong flag should be reported before.
    from comparison import Comparison
    from comparison_report import write_report
    from runs import limited_runner

    from amos_fairseq.experiments.benchmark import Stopped

    with limited_runner(options.piece_minutes) as runner:
        comparison = Comparison(options)
        stopped = False
        try:
            comparison.plan(runner)
            comparison.claim()
            comparison.pretrain(runner)
            comparison.fine_tune(runner)
        except Stopped:
            stopped = True
    if comparison.pretrainings:
        for file in write_report(comparison):
            print(file)
    for failure in comparison.failures:
        print(failure, file=sys.stderr)
    if comparison.failures:
        raise UserError(f"failed runs: {len(comparison.failures)}; the same command tries them again")
    if stopped:
        print(f"stopped; finished runs stay in {options.out}, and the same command continues", file=sys.stderr)
    return runner.exit_code if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
