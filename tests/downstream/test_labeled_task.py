"""What the outputs of a head mean: tasks put it into their state, checkpoints have it, export and predictions read it there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from failures import error_line
from saved_models import write_run

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.errors import UserError

TEXT_HEAD = "sentence_classification_head"
HEAD = {"kind": "classes", "labels": ["no", "yes"], "name": "mine", "text_columns": ["a", "b"]}
HEAD |= {"header": False, "raw_text": False, "signs": "", "whole": []}


def with_heads(run: Path, heads: Any) -> Path:
    """Give a checkpoint those of its task."""
    state = torch.load(run / "checkpoint_last.pt", weights_only=True)
    state["task_state"]["heads"] = heads
    torch.save(state, run / "checkpoint_last.pt")
    return run


def test_a_checkpoint_says_what_its_heads_predict(tmp_path):
    run = write_run(tmp_path / "run", classes=2)
    unnamed = HEAD | {"name": "", "labels": [], "text_columns": [], "header": True}
    assert vars(load_checkpoint(run).heads[TEXT_HEAD]) == unnamed
    assert vars(load_checkpoint(with_heads(run, {TEXT_HEAD: HEAD})).heads[TEXT_HEAD]) == HEAD | {"whole": frozenset()}
    with pytest.raises(UserError, match=r"has no head upos_labels \(it has sentence_classification_head\)"):
        load_checkpoint(run).head("upos_labels")


# Of a stranger's checkpoint: what its task_state has as heads.
DAMAGED = {
    "no object": [HEAD],
    "missing": {TEXT_HEAD: {"kind": "classes", "labels": ["no", "yes"]}},
    "kind": {TEXT_HEAD: HEAD | {"kind": "words of code"}},
    "number with labels": {TEXT_HEAD: HEAD | {"kind": "number"}},
    "equal labels": {TEXT_HEAD: HEAD | {"labels": ["no", "no"]}},
    "half of a pair": {TEXT_HEAD: HEAD | {"labels": ["no", "\ud800"]}},
    "columns": {TEXT_HEAD: HEAD | {"text_columns": [1]}},
    "header": {TEXT_HEAD: HEAD | {"header": "yes"}},
    "too many labels": {TEXT_HEAD: HEAD | {"labels": ["no", "maybe", "yes"]}},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_heads_that_no_task_writes_are_refused(name, tmp_path, capsys):
    run = with_heads(write_run(tmp_path / "run", classes=2), DAMAGED[name])
    line = error_line(capsys, main, "export", run, tmp_path / "out", reports_progress=True)
    expected = "names 3 labels of sentence_classification_head, which has 2" if "many" in name else "damaged task_state"
    assert expected in line
    assert not (tmp_path / "out").exists()
