"""The report of ``amos flops`` as tables in the terminal."""

from rich import box
from rich.console import Console
from rich.table import Table

from amos_fairseq.flops.operations import Operations
from amos_fairseq.flops.report import Report


def print_report(name: str, report: Report) -> None:
    """Print the training setup, the forward pass by module, training by both conventions, and inference."""
    console = Console(highlight=False)
    update = f"{report.batch_size} sequences x {report.batches_per_update} batches"
    console.print(
        f"{name} ({report.objective}): {report.today.max_update:,} updates of {update} of {report.tokens_per_sequence} "
        f"tokens; {report.vocabulary_rows:,} rows of token embeddings",
        soft_wrap=True,
    )
    console.print(_module_table(report))
    console.print(_training_table(report))
    console.print(_inference_line(report), soft_wrap=True)


def _inference_line(report: Report) -> str:
    if report.inference is None:
        return "No encoder is kept after training: the towers score text (amos score)."
    operations = report.inference
    return (
        f"Inference on one text of {report.inference_length} tokens: {operations.matmul:.3g} (today), "
        f"{operations.total:.3g} (thesis)"
    )


def _module_table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Forward pass per token of the training text", title_justify="left")
    table.add_column("module", no_wrap=True)
    for column in ("products", "look-ups", "element-wise", "share of products"):
        table.add_column(column, justify="right")
    for name, operations in report.modules.items():
        table.add_row(name, *_cells(operations, report.forward))
    table.add_section()
    table.add_row("together", *_cells(report.forward, report.forward))
    return table


def _cells(operations: Operations, whole: Operations) -> list[str]:
    numbers = [f"{number:.3g}" if number else "" for number in operations]
    return [*numbers, f"{operations.matmul / whole.matmul:.1%}" if operations.matmul else ""]


def _training_table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Training", title_justify="left")
    table.add_column("convention", no_wrap=True)
    for column in ("per token", "per update", "all updates"):
        table.add_column(column, justify="right")
    rows = {"today: products, forward and backward": report.today, "thesis 5.2.2: all, 2 x forward": report.thesis}
    for name, cost in rows.items():
        table.add_row(name, *(f"{number:.3g}" for number in (cost.per_token, cost.per_update, cost.total)))
    return table
