"""Print what a run learned on held-out text: its first and last validation, and the unigram plateau."""

import argparse
import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.run.metrics_file import FILE_NAME, read_records


def validations(save_dir: Path) -> list[dict]:
    """Return the validation records of SAVE_DIR/metrics.jsonl in order.

    Raises:
        UserError: there are none.
    """
    found = [record for record in read_records(save_dir) if record["split"] == "valid"]
    if not found:
        raise UserError(f"{save_dir / FILE_NAME} contains no validation yet: train until the first one")
    return found


def depths_of(record: dict) -> list[str]:
    """Return the suffixes of the depths in a record, in the order of the log."""
    return [key.removeprefix("mlm_loss_") for key in record if key.startswith("mlm_loss_")]


def rows(shown: list[dict]) -> list[list[str]]:
    """Return the printed rows: name, the value of each of these validations, value of a model that learned nothing."""
    last = shown[-1]
    depths = depths_of(last)
    plain = [
        (f"mlm_loss_{depth}", f"MLM loss, depth {depth} (nats)", number(last.get("unigram_entropy")))
        for depth in depths
    ]
    plain += [(f"mlm_acc_{depth}", f"MLM accuracy, depth {depth}", "") for depth in depths]
    if len(depths) > 1:
        plain += [(f"mixture_{depth}", f"mixture weight, depth {depth}", f"{1 / len(depths):.3f}") for depth in depths]
        plain += [("mixture_entropy", "entropy of the mixture (nats)", f"{math.log(len(depths)):.3f}")]
    plain += [
        ("replaced", "masked tokens really replaced", ""),
        ("rtd_auc", "detection AUC", "0.500"),
        ("rtd_recall", "replaced tokens found", ""),
    ]
    return [[name, *(number(record.get(key)) for record in shown), nothing] for key, name, nothing in plain]


def number(value: float | None) -> str:
    """Format with three decimals; a dash for a value that was not logged."""
    return "-" if value is None else f"{value:.3f}"


@report_user_errors()
def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("save_dir", type=Path, help="SAVE_DIR of the run")
    arguments = parser.parse_args()
    records = validations(arguments.save_dir)
    shown = records[:1] + records[1:][-1:]  # the first and the last, which may be the same
    table = Table(title="On held-out text")
    table.add_column("")
    for title in (*(f"update {record['update']}" for record in shown), "without learning"):
        table.add_column(title, justify="right")
    for row in rows(shown):
        table.add_row(*row)
    Console(width=None if Console().is_terminal else 100).print(table)


if __name__ == "__main__":
    main()
