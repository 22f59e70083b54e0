"""What ``amos glue`` refuses in one line before any training."""

import shutil

from failures import error_line

from amos_fairseq.cli.main import main
from amos_fairseq.downstream.texts.glue.command import tasks_to_run


def test_mistakes_are_one_line_and_start_nothing(start, data, tmp_path, fake_training, capsys, glue):
    glue(tmp_path / "finished", "CoLA")
    foreign = tmp_path / "foreign"
    shutil.copytree(data, foreign)
    (foreign / "CoLA" / "tokenizer" / "dict.txt").write_text("other 1\n")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "squad.json").write_text("{}")
    command = ["glue", "--checkpoint", start, "--out", tmp_path / "out", "--cpu", "--data", data]
    before = len(fake_training.commands)
    for arguments, message in (
        (["--tasks", "QNLI"], "QNLI/task.json is missing: give a folder that amos prepare wrote"),
        (["--data", foreign, "--tasks", "CoLA"], "the data do not fit the checkpoint"),
        (["--tasks", "CoLA", "--recipe", "x" * 300], "File name too long"),
        (["--tasks", "CoLA", "--seeds", "0"], "argument --seeds: 0 must be at least 1 and at most 10,000"),
        (["--tasks", "CoLA", "--set", "weight_decay=[1"], "--set weight_decay=[1: give NAME=VALUE"),
        (["--tasks", "CoLA", "--set", "weigth_decay=1"], "Key 'weigth_decay' not in 'Hyperparameters'"),
        (["--tasks", "CoLA", "--lr", "-1"], "--lr -1.0 must be above 0"),
        (["--tasks", "CoLA", "--batch-size", "0"], "--batch-size 0 must be 1 or more"),
        (["--tasks", "CoLA", "--precision", "fp16"], "--precision fp16 needs a GPU"),
        (
            ["--tasks", "CoLA", "--out", tmp_path / "damaged"],
            "squad.json is not readable as a table of results: write it",
        ),
        (["--tasks", "RTE", "--write-test"], "there is no test set of RTE"),
        (["--tasks", "CoLA", "--teachers", tmp_path / "finished"], "with --write-train"),
        (["--tasks", "CoLA", "--multi-task"], "the recipe amos has no settings for multi"),
        (["--tasks", "CoLA,RTE", "--multi-task", "--recipe", "bam", "--intermediate"], "--intermediate has no effect"),
        (["--tasks", "CoLA", "--intermediate"], "--intermediate has no effect"),
        (["--tasks", "RTE", "--intermediate"], "holds no run of MNLI from these weights"),
        (["--tasks", "RTE", "--multi-task", "--recipe", "bam"], "has 16 rows, fewer than the 128 of one update"),
    ):
        assert message in error_line(capsys, main, *command, *arguments, reports_progress=True)
    (checkpoint,) = (tmp_path / "finished").rglob("checkpoint_best.pt")
    export = ["export", checkpoint, tmp_path / "hf", "--head", "RTE"]
    assert "--head RTE" in error_line(capsys, main, *export, reports_progress=True)
    assert len(fake_training.commands) == before
    assert not (tmp_path / "out").exists()


def test_all_means_the_tasks_that_are_prepared(tmp_path, capsys):
    for task in ("RTE", "CoLA", "WNLI"):
        (tmp_path / task).mkdir()
    assert tasks_to_run("all", tmp_path, is_raw=False) == ["CoLA", "RTE"]
    absent = "MNLI, QQP, QNLI, SST-2, MRPC, STS-B"
    assert capsys.readouterr().err == f"glue: not in {tmp_path}, so not fine-tuned: {absent}\n"
    assert tasks_to_run("RTE,MNLI", tmp_path, is_raw=False) == ["RTE", "MNLI"]  # named, so MNLI is missed later
    assert len(tasks_to_run("ALL", tmp_path / "absent", is_raw=False)) == 8
