"""Labels and the head that was trained with them: the fingerprint in a checkpoint, and what a checkpoint without one shows."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from failures import error_line
from fine_tuning_tasks import build_amos, set_up
from saved_models import write_run
from synthetic_tagging import prepare_tagging

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.downstream.labeled_task import check_labels
from amos_fairseq.errors import UserError

TEXT_HEAD = "sentence_classification_head"


def fingerprint(kind: str, labels: list[str]) -> str:
    return hashlib.sha256(json.dumps([kind, labels]).encode()).hexdigest()


def with_fingerprints(run: Path, **labels: list[str]) -> Path:
    """Give a checkpoint those of its heads, as its task would have."""
    state = torch.load(run / "checkpoint_last.pt", weights_only=True)
    kind = "classes" if TEXT_HEAD in labels else "words"
    state["task_state"] |= {f"labels of {head}": fingerprint(kind, names) for head, names in labels.items()}
    torch.save(state, run / "checkpoint_last.pt")
    return run


def test_checkpoints_get_a_fingerprint_of_the_labels_of_each_head(data, tmp_path):
    """Plain strings in the state of the task, which fairseq saves."""
    words = prepare_tagging(tmp_path)
    names = json.loads((words / "tagging.json").read_text())["labels"]
    rte, numbers = fingerprint("classes", ["entailment", "not_entailment"]), fingerprint("number", [])
    for name, directories, expected in (
        ("text_classification", data / "RTE", {TEXT_HEAD: rte}),
        ("multi_task", f"{data / 'RTE'}:{data / 'STS-B'}", {"RTE": rte, "STS-B": numbers}),
        ("sequence_tagging", words, {"ner_labels": fingerprint("words", names)}),
    ):
        task = set_up(name, directories, max_update=0)
        build_amos(task)
        found = {key: value for key, value in task.state_dict().items() if key.startswith("labels of")}
        assert found == {f"labels of {head}": value for head, value in expected.items()}


@pytest.mark.parametrize("has_fingerprint", [True, False])
def test_labels_are_compared_with_the_head(tmp_path, has_fingerprint):
    run = write_run(tmp_path / "run", classes=2)
    loaded = load_checkpoint(with_fingerprints(run, **{TEXT_HEAD: ["no", "yes"]}) if has_fingerprint else run)

    def check(kind: str, *labels: str) -> None:
        check_labels(loaded, "RTE", kind, labels, tmp_path / "task.json")

    check("classes", "no", "yes")
    for kind, *labels in (("classes", "no", "yes", "maybe"), ("classes", "no"), ("number",), ("labels", "no")):
        with pytest.raises(UserError, match=r"task\.json does not have the labels that .*last\.pt was trained with"):
            check(kind, *labels)
    for kind, *labels in (("classes", "yes", "no"), ("labels", "no", "yes"), ("classes", "No", "yes")):
        if has_fingerprint:
            with pytest.raises(UserError, match="in their order: restore it, or train again"):
                check(kind, *labels)
        else:
            check(kind, *labels)
    with pytest.raises(UserError, match=r"has no head upos_labels \(it has none\)"):
        check_labels(load_checkpoint(write_run(tmp_path / "s", span_head="joint")), "upos_labels", "words", ["X"], run)


def test_export_refuses_labels_of_another_training(tmp_path, capsys):
    words = with_fingerprints(write_run(tmp_path / "words", labels=2), upos_labels=["DET", "NOUN"])
    texts = with_fingerprints(write_run(tmp_path / "texts", classes=2), **{TEXT_HEAD: ["no", "yes"]})
    record = {"task": "mine", "kind": "classes", "labels": ["no", "yes"]}
    for run, name, content, message in (
        (words, "labels.txt", "NOUN\nDET\n", "labels.txt does not have the labels that"),
        (words, "labels.txt", "DET\nDET\n", "does not have one label a line"),
        (texts, "task.json", json.dumps(record | {"labels": ["yes", "no"]}), "task.json does not have the labels that"),
        (texts, "task.json", json.dumps(record | {"kind": ["a"]}), "task.json does not have the labels that"),
        (texts, "result.json", "{}", "result.json was changed"),
    ):
        (run / name).write_text(content)
        assert message in error_line(capsys, main, "export", run, tmp_path / "out", reports_progress=True)
        assert not (tmp_path / "out").exists()
        (run / name).unlink()
    # What the message advises: without the file, the names of the command; beside it, not in another order.
    assert main(["export", str(words), str(tmp_path / "out"), "--labels", "DET,NOUN", "--no-check"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["id2label"] == {"0": "DET", "1": "NOUN"}
    (words / "labels.txt").write_text("DET\nNOUN\n")
    error = error_line(capsys, main, "export", words, tmp_path / "other", "--labels", "NOUN,DET", reports_progress=True)
    assert "--labels has the names of the training in another order than the head: DET, NOUN: leave it out" in error
