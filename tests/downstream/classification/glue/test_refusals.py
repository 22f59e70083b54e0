"""What ``amos glue`` refuses in one line before any training."""

import json
import shutil

import pytest
from benchmark_summary import write_summary
from failures import error_line
from synthetic_glue import change_task

from amos_fairseq.cli.glue import tasks_to_run
from amos_fairseq.cli.main import main
from amos_fairseq.downstream.classification.glue.data import read_glue_data
from amos_fairseq.downstream.session import read_pretrained_checkpoint
from amos_fairseq.errors import UserError


def test_mistakes_are_one_line_and_start_nothing(start, data, tmp_path, fake_training, capsys):
    foreign = tmp_path / "foreign"
    shutil.copytree(data, foreign)
    (foreign / "tokenizer" / "dict.txt").write_text("other 1\n")
    write_summary(tmp_path / "squad", 1, start)
    content = json.loads((tmp_path / "squad" / "glue.json").read_text())
    content["setup"] = {"checkpoint_sha256": read_pretrained_checkpoint(start).sha256, "from_scratch": True}
    (tmp_path / "squad" / "squad.json").write_text(json.dumps(content | {"benchmark": "squad"}))
    command = ["glue", "--checkpoint", str(start), "--out", str(tmp_path / "out"), "--cpu", "--data"]
    for arguments, message in (
        ([str(data), "--tasks", "CoLA,XNLI"], "unknown task 'XNLI': choose ALL or, separated by commas, MNLI, QQP"),
        ([str(data), "--tasks", "QNLI"], "QNLI holds no prepared data"),
        ([str(tmp_path / "absent")], "absent is not a directory"),
        ([str(foreign), "--tasks", "CoLA"], "the data do not fit the checkpoint"),
        ([str(data), "--tasks", "CoLA", "--recipe", "bert"], "there is no recipe bert"),
        ([str(data), "--tasks", "CoLA", "--seeds", "0"], "--seeds 0 asks for no run"),
        ([str(data), "--tasks", "CoLA", "--parallel", "0"], "--parallel 0 starts no run"),
        ([str(data), "--tasks", "CoLA", "--parallel", str(2**62)], "too many runs at a time: give at most 1,024"),
        ([str(data), "--tasks", "CoLA", "--lr", "-1"], "--lr -1.0 must be above 0"),
        ([str(data), "--tasks", "CoLA", "--lr", "nan"], "--lr nan must be above 0"),
        ([str(data), "--tasks", "CoLA", "--lr", "1e300"], "lr 1e+300 must be above 0 and at most 1,000"),
        ([str(data), "--tasks", "CoLA", "--epochs", "1" + "0" * 21], "must be above 0 and at most 1,000,000"),
        ([str(data), "--tasks", "CoLA", "--seeds", "1" + "0" * 21], "asks for too many runs: give at most 10,000"),
        ([str(data), "--tasks", "CoLA", "--batch-size", "0"], "--batch-size 0 must be above 0"),
        ([str(data), "--tasks", "CoLA", "--precision", "fp16"], "--precision fp16 needs a GPU"),
        ([str(data), "--tasks", "CoLA", "--squad", str(tmp_path)], "holds no results of amos squad"),
        ([str(data), "--tasks", "CoLA", "--squad", str(tmp_path / "squad")], "from_scratch True, not False"),
        ([str(data), "--tasks", "RTE", "--write-test"], "holds no test set of RTE"),
    ):
        assert message in error_line(capsys, main, *command, *arguments, reports_progress=True)
    assert fake_training.commands == []
    assert not (tmp_path / "out").exists()


def test_all_means_the_tasks_that_are_prepared(tmp_path, capsys):
    for task in ("RTE", "CoLA", "WNLI"):
        (tmp_path / task).mkdir()
    assert tasks_to_run("all", tmp_path, is_raw=False) == ["CoLA", "RTE"]
    assert capsys.readouterr().err == f"not in {tmp_path}, so not fine-tuned: MNLI, QQP, QNLI, SST-2, MRPC, STS-B\n"
    assert tasks_to_run("RTE,MNLI", tmp_path, is_raw=False) == ["RTE", "MNLI"]  # named, so MNLI is missed later
    assert len(tasks_to_run("ALL", tmp_path / "absent", is_raw=False)) == 8


@pytest.mark.parametrize("content", ["[]", "{}", '{"setup": [], "tasks": {}, "notes": []}', "{"])
def test_a_damaged_summary_of_squad_is_refused(start, data, tmp_path, capsys, content):
    (tmp_path / "squad.json").write_text(content)
    command = ["glue", "--checkpoint", start, "--data", data, "--tasks", "CoLA", "--out", tmp_path / "out", "--cpu"]
    line = error_line(capsys, main, *command, "--squad", tmp_path, reports_progress=True)
    assert f"{tmp_path / 'squad.json'} " in line


def test_a_damaged_task_file_is_refused(data, tmp_path):
    shutil.copytree(data / "RTE", tmp_path / "RTE")
    change_task(tmp_path, "RTE", task="WNLI")
    with pytest.raises(UserError, match="holds WNLI, not RTE"):
        read_glue_data(tmp_path, "RTE")
    for content in ("{}", '{"task": "RTE"}', '{"task": "RTE", "kind": "k", "labels": [], "splits": 3}'):
        (tmp_path / "RTE" / "task.json").write_text(content)
        with pytest.raises(UserError, match=r"task\.json was not written by amos prepare"):
            read_glue_data(tmp_path, "RTE")
