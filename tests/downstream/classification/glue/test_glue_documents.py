"""The loop of docs/glue_data.md, run as printed, and the values of its tables."""

import lzma
import os
import re
import subprocess
from pathlib import Path

from synthetic_glue import CLASSES, FILES

from amos_fairseq.downstream.classification.glue.tables import find_files
from amos_fairseq.downstream.classification.glue.tasks import TASKS

ROOT = Path(__file__).resolve().parents[4]
FILES_PAGE, DATA_PAGE = (ROOT / "docs" / "glue_data.md").read_text(encoding="utf-8").split("## Tasks and licences\n")


def table_row(page: str, task: str) -> list:
    """Cells behind the name of a task, in the first table that has it."""
    line = next(line for line in page.split("\n") if line.startswith(f"| {task} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_loop_copies_files_to_official_names(tmp_path):
    (loop,) = (block for block in re.findall(r"```bash\n(.*?)```", DATA_PAGE, re.DOTALL) if "for copy in" in block)
    copies = {"RTE/train.tsv.xz": "RTE/train.tsv", "RTE/dev.tsv.xz": "RTE/dev.tsv"}
    copies |= {"QNLI/train-rebuilt.tsv.xz": "QNLI/train.tsv", "QNLI/dev.tsv.xz": "QNLI/dev.tsv"}
    copies |= {"MNLI/dev_matched-slice.tsv.xz": "MNLI/dev_matched.tsv"}
    for copy, source in copies.items():
        (tmp_path / "my copies" / copy).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "my copies" / copy).write_bytes(lzma.compress(FILES[source].encode("utf-8")))
    environment = {**os.environ, "COPIES": str(tmp_path / "my copies"), "GLUE_DIR": str(tmp_path / "laid out")}
    subprocess.run(["bash", "-euc", loop], check=True, env=environment, cwd=tmp_path)
    found = {str(path.relative_to(tmp_path / "laid out")): path for path in (tmp_path / "laid out").rglob("*.xz")}
    assert {name: lzma.decompress(path.read_bytes()).decode("utf-8") for name, path in found.items()} == {
        f"{source}.xz": FILES[source] for source in copies.values()
    }
    assert set(find_files(tmp_path / "laid out", TASKS["QNLI"])) == {"train", "valid"}


def test_tables_of_rows_columns_and_classes():
    for name, task in TASKS.items():
        rows = [f"{count:,}" for count in task.official_rows.values()]
        assert re.findall(r"[\d,]*\d", table_row(DATA_PAGE, name)[1]) == rows
        _, columns, classes = table_row(FILES_PAGE, name)
        if name not in ("CoLA", "AX"):
            assert columns.split(", ") == [*task.texts, task.label]
        if name == "STS-B":
            assert classes == "a number from 0 to 5"
        elif name != "AX":
            assert classes.split(", ") == CLASSES[name]
