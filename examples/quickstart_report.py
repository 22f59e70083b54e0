"""Print what a run learned on held-out text: its first and last validation, and the unigram plateau."""

import argparse
import logging
import math
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.metrics_file import FILE_NAME, read_records
from amos_fairseq.special_tokens import MASK_SYMBOL, special_ids


def unigram_entropy(data: Path, split: str = "valid") -> float:
    """Compute the unigram entropy, in nats, of the non-special tokens of a binarized text.

    A model without context cannot reach a lower loss.

    Raises:
        UserError: the split is missing or contains no such token.
    """
    # Imported here, after amos_fairseq, which silences what fairseq logs while it is imported.
    from fairseq.data import Dictionary, data_utils

    dictionary = Dictionary.load(str(data / "dict.txt"))
    dictionary.add_symbol(MASK_SYMBOL)
    dataset = data_utils.load_indexed_dataset(str(data / split), dictionary)
    if dataset is None:
        raise UserError(f"{data} has no {split}.bin: create it with preprocess/pretraining/prepare.sh")
    counts = torch.zeros(len(dictionary), dtype=torch.float64)
    for line in range(len(dataset)):
        counts += torch.bincount(dataset[line].long(), minlength=len(dictionary))
    counts[special_ids(dictionary)] = 0
    if counts.sum() == 0:
        raise UserError(f"{data}/{split}.bin contains no tokens: the text is too small, give more text")
    shares = counts[counts > 0] / counts.sum()
    return -(shares * shares.log()).sum().item()


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


def rows(first: dict, last: dict, entropy: float) -> list[tuple[str, str, str, str]]:
    """Return the printed rows: name, first validation, last validation, value of a model that learned nothing."""
    depths = depths_of(last)
    plain = [(f"mlm_loss_{depth}", f"MLM loss, depth {depth} (nats)", f"{entropy:.3f}") for depth in depths]
    plain += [(f"mlm_acc_{depth}", f"MLM accuracy, depth {depth}", "") for depth in depths]
    if len(depths) > 1:
        plain += [(f"mixture_{depth}", f"mixture weight, depth {depth}", f"{1 / len(depths):.3f}") for depth in depths]
        plain += [("mixture_entropy", "entropy of the mixture (nats)", f"{math.log(len(depths)):.3f}")]
    plain += [
        ("replaced", "masked tokens really replaced", ""),
        ("rtd_auc", "detection AUC", "0.500"),
        ("rtd_recall", "replaced tokens found", ""),
    ]
    return [(name, number(first.get(key)), number(last.get(key)), nothing) for key, name, nothing in plain]


def number(value: float | None) -> str:
    """Format with three decimals; a dash for a value that was not logged."""
    return "-" if value is None else f"{value:.3f}"


@report_user_errors()
def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="directory that prepare.sh wrote")
    parser.add_argument("save_dir", type=Path, help="SAVE_DIR of the run")
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)  # fairseq logs every file that it opens
    records = validations(arguments.save_dir)
    first, last = records[0], records[-1]
    table = Table(title="On held-out text")
    table.add_column("")
    for title in (f"update {first['update']}", f"update {last['update']}", "without learning"):
        table.add_column(title, justify="right")
    for row in rows(first, last, unigram_entropy(arguments.data)):
        table.add_row(*row)
    Console(width=None if Console().is_terminal else 100).print(table)


if __name__ == "__main__":
    main()
