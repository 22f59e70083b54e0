"""amos prepare glue-download from a local folder that is laid out as nyu-mll/glue on the hub."""

from pathlib import Path

import huggingface_hub
import pytest
from failures import error_line
from preparing import prepare
from synthetic_glue import CLASSES, EXPECTED, write_raw_glue

from amos_fairseq.downstream.texts.glue.prepare import read_split
from amos_fairseq.downstream.texts.glue.tasks import TASKS, find_files

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
main = prepare("glue-download")
# Columns of the hub, by hand.
COLUMNS = {"MNLI": ("premise", "hypothesis"), "AX": ("premise", "hypothesis"), "QQP": ("question1", "question2")}
COLUMNS |= {"CoLA": ("sentence",), "SST-2": ("sentence",), "QNLI": ("question", "sentence")}
SPLITS = {"valid": "validation", "test": "test"}
MNLI_SPLITS = {"valid": "validation_matched", "valid1": "validation_mismatched"}
MNLI_SPLITS |= {"test": "test_matched", "test1": "test_mismatched"}


def write_hub(directory: Path) -> dict[tuple[str, str], list[tuple]]:
    """Write all tasks as the hub has them; return the rows by task and split: texts, and a label or an index."""
    rows = {}
    for name, task in TASKS.items():
        folder, columns = directory / name.lower().replace("-", ""), COLUMNS.get(name, ("sentence1", "sentence2"))
        folder.mkdir()
        for split in task.files:
            width, is_test = len(task.texts), split.startswith("test")
            own = EXPECTED[name][split].rows if split in EXPECTED[name] else [("The last", "of all")[:width]]
            content = {column: [row[number] for row in own] for number, column in enumerate(columns)}
            as_label = float if name == "STS-B" else CLASSES[name].index
            labels = [-1 if is_test else as_label(row[-1]) for row in own]
            content["label"] = pa.array(labels, pa.float32() if name == "STS-B" else pa.int64())
            hub_split = (MNLI_SPLITS if name == "MNLI" else SPLITS).get(split, "train")
            table = pa.table(content | {"idx": range(len(own))})
            parquet.write_table(table, folder / f"{hub_split}-00000-of-00001.parquet")
            rows[name, split] = [(row[:width], str(n) if is_test else row[-1]) for n, row in enumerate(own)]
            task.official_rows[split] = len(own)
    return rows


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The folder and the rows in it; official numbers of rows are those of the folder."""
    for task in TASKS.values():
        for split, number in task.official_rows.items():
            monkeypatch.setitem(task.official_rows, split, number)  # restored at the end
    (tmp_path / "hub").mkdir()
    rows, asked = write_hub(tmp_path / "hub"), []

    def snapshot_download(repository: str, **options: object) -> str:
        asked.append((repository, options["repo_type"], len(options["revision"]), options["allow_patterns"]))
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return tmp_path / "hub", rows, asked


def test_all_tasks_are_written_as_the_official_tables(hub, tmp_path, capsys):
    """Rows, labels, scores and ids, read as amos prepare glue reads them; a second call repeats nothing."""
    _, rows, asked = hub
    main([tmp_path / "out"])
    assert asked[0] == ("nyu-mll/glue", "dataset", 40, ["cola/*.parquet"])
    for name, task in TASKS.items():
        files = find_files(tmp_path / "out", task)
        assert files.keys() == task.files.keys()
        for split, path in files.items():
            table = read_split(path, task, split)
            expected = rows[name, split]
            assert table.texts == [texts if any(map(str.strip, texts)) else ("",) for texts, _ in expected]
            found = table.ids if split.startswith("test") else table.labels
            assert found == [float(last) if name == "STS-B" and "test" not in split else last for _, last in expected]
    assert "\t5.0\n" in (tmp_path / "out" / "STS-B" / "train.tsv").read_text()
    capsys.readouterr()
    main([tmp_path / "out", "rte", "MNLI"])
    assert "RTE is already there: skipped" in capsys.readouterr().err
    assert len(asked) == len(TASKS)


def no_connection(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


REFUSED = {
    "no connection": (no_connection, "could not be downloaded (no route to host)"),
    "no file": (lambda hub, _: (hub / "rte" / "test-00000-of-00001.parquet").unlink(), "has no test-*.parquet"),
    "damaged": (lambda hub, _: (hub / "rte" / "train-00000-of-00001.parquet").write_bytes(b"PAR1"), "is damaged"),
    "fewer rows": (lambda hub, _: TASKS["RTE"].official_rows.update(test=2), "has 1 rows, the official file 2"),
    "other files": (lambda hub, _: write_raw_glue(hub.parent / "out", "RTE/dev"), "lacks official files of RTE"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(hub, tmp_path, monkeypatch, capsys, name):
    """One line, and nothing of the task is written."""
    harm, message = REFUSED[name]
    harm(hub[0], monkeypatch)
    assert message in error_line(capsys, main, tmp_path / "out", "RTE", reports_progress=True)
    there = sorted(path.name for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert there == (["dev.tsv"] if name == "other files" else [])
