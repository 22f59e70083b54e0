"""amos prepare glue: killed, on a full disk, and with wrong arguments."""

import shutil
from pathlib import Path

import pytest
from failures import error_line, full_disk
from preparing import prepare
from synthetic_glue import write_glue_tokenizer, write_raw_glue

from amos_fairseq.downstream.classification.glue import prepare as glue_module
from amos_fairseq.fingerprint import directory_sha256

main = prepare("glue")


def test_killed_run_leaves_complete_tasks(raw_glue, glue_tokenizer, prepared_glue, tmp_path, monkeypatch):
    out = tmp_path / "out"
    command = [raw_glue, "CoLA,SST-2,RTE", glue_tokenizer, out, "--workers", "1"]

    def kill(*arguments):
        # No clean-up runs after kill -9: so copy the files and put them back.
        shutil.copytree(out, tmp_path / "killed")
        raise SystemError("killed here")

    with monkeypatch.context() as patch:
        write = glue_module.write_glue_labels
        patch.setattr(glue_module, "write_glue_labels", lambda d, *a: kill() if d.stem == "SST-2" else write(d, *a))
        with pytest.raises(SystemError, match="killed here"):
            main(command)
    assert {path.name for path in out.iterdir()} == {"CoLA", "tokenizer"}
    shutil.rmtree(out)
    (tmp_path / "killed").rename(out)
    assert (out / ".prepare" / "SST-2.unfinished" / "input0" / "train.bin").exists()
    main(command)
    assert {path.name for path in out.iterdir()} == {"CoLA", "SST-2", "RTE", "tokenizer"}
    for path in (out / "SST-2").rglob("*.*"):
        assert path.read_bytes() == (prepared_glue / path.relative_to(out)).read_bytes()


def refused(capsys, *arguments: object) -> str:
    return error_line(capsys, main, *arguments, reports_progress=True)


@pytest.mark.parametrize("stage", ["tokenizer", "texts"])
def test_full_disk(glue_tokenizer, tmp_path, capsys, stage):
    rows = "".join(f"The sailor {number} rode here\t1\n" for number in range(20000))
    files = write_raw_glue(tmp_path / "glue", "SST-2")
    (files / "SST-2" / "train.tsv").write_text("sentence\tlabel\n" + rows)
    limit = 100 if stage == "tokenizer" else max(path.stat().st_size for path in glue_tokenizer.iterdir())
    with full_disk(limit):
        line = refused(capsys, files, "SST-2", glue_tokenizer, tmp_path / "out", "--workers", 1)
    assert "no space left (File too large" in line
    assert not (tmp_path / "out").exists()


def foreign(directory: Path) -> Path:
    (directory / "foreign").mkdir()
    (directory / "foreign" / "letter.txt").write_text("dear")
    return directory / "foreign"


BAD = {
    "unknown task": (lambda g, t, d: [g, "CoLA,SST2", t, d / "out"], "unknown task 'SST2': choose ALL or"),
    "no directory": (lambda g, t, d: [d / "absent", "ALL", t, d / "out"], "is not a directory"),
    "no task there": (lambda g, t, d: [foreign(d), "ALL", t, d / "out"], "contains no task"),
    "absent": (lambda g, t, d: [foreign(d), "CoLA", t, d / "out"], "CoLA/train.tsv: no such file"),
    "no tokenizer": (lambda g, t, d: [g, "CoLA", foreign(d), d / "out"], "holds no tokenizer"),
    "file for OUT": (lambda g, t, d: [g, "CoLA", t, foreign(d) / "letter.txt"], "is not a directory"),
    "foreign OUT": (lambda g, t, d: [g, "CoLA", t, foreign(d)], "is not empty and contains no GLUE data"),
    "comma": (lambda g, t, d: [g, "CoLA", t, d / "a,b"], "fairseq separates files by commas"),
    "no rows": (lambda g, t, d: [g, "CoLA", t, d / "out", "--max-train-rows", 0], "must be at least 1"),
    "workers": (lambda g, t, d: [g, "CoLA", t, d / "out", "--workers", 0], "must be at least 1"),
    "label": (lambda g, t, d: [broken(d / "glue"), "CoLA,RTE", t, d / "out"], "dev.tsv, line 2: label 'maybe' is not"),
}


def broken(directory: Path) -> Path:
    write_raw_glue(directory, "RTE", "CoLA")
    path = directory / "RTE" / "dev.tsv"
    path.write_text(path.read_text().replace("\tentailment", "\tmaybe"))
    return directory


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(raw_glue, glue_tokenizer, tmp_path, capsys, name):
    make, message = BAD[name]
    assert message in refused(capsys, *make(raw_glue, glue_tokenizer, tmp_path))
    if name == "label":  # the task before it is finished and remains
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"CoLA", "tokenizer"}
    else:
        assert not (tmp_path / "out").exists()
    if (tmp_path / "foreign").exists():
        assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["letter.txt"]


def test_output_of_another_tokenizer_or_program_is_unchanged(raw_glue, glue_tokenizer, prepared_glue, tmp_path, capsys):
    other = write_glue_tokenizer(tmp_path / "other", "zebra " * 50)
    before = directory_sha256(prepared_glue / "RTE" / "input0")
    (tmp_path / "out" / "RTE").mkdir(parents=True)
    shutil.copytree(glue_tokenizer, tmp_path / "out" / "tokenizer")
    assert "was made with another tokenizer" in refused(capsys, raw_glue, "RTE", other, prepared_glue)
    assert "RTE was not written by amos prepare" in refused(capsys, raw_glue, "RTE", glue_tokenizer, tmp_path / "out")
    assert directory_sha256(prepared_glue / "RTE" / "input0") == before
    assert (tmp_path / "out" / "RTE").is_dir()
