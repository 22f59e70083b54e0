"""What the report reads of runs: their time, and models that are not shown."""

import json

import torch
from saved_models import CORPUS, add_settings, write_run

from amos_fairseq.flops import read_configuration, training_flops
from amos_fairseq.report.runs import hardware_of, read_runs


def test_time_of_a_run_in_parts(tmp_path):
    """Two processes of 100 and 50 seconds; a checkpoint knows more."""
    run = write_run(tmp_path / "run", "mlm")
    walls = [{"wall": 40.0}, {"wall": 100.0}, {}, {"wall": 20.0}, {"wall": 50.0}]
    records = [json.dumps({"split": "train", "update": n} | wall) + "\n" for n, wall in enumerate(walls)]
    (run / "metrics.jsonl").write_text("".join(records))
    assert read_runs([run], CORPUS[0], CORPUS[:1])[0].seconds == 150
    state = torch.load(run / "checkpoint_last.pt", weights_only=True)
    torch.save(state | {"extra_state": {"previous_training_time": 1250.0}}, run / "checkpoint_last.pt")
    assert read_runs([run], CORPUS[0], CORPUS[:1])[0].seconds == 1250


def test_flops_of_a_run_with_a_budget_of_time(tmp_path):
    """Its settings have no number of updates."""
    run = write_run(tmp_path / "run", "mlm")
    add_settings(run, "mlm_tiny")
    per_update = training_flops(*read_configuration(str(run))).per_update
    state = torch.load(run / "checkpoint_last.pt", weights_only=True)
    state["cfg"]["optimization"]["max_update"] = 0
    torch.save(state, run / "checkpoint_last.pt")
    assert read_runs([run], CORPUS[0], CORPUS[:1])[0].flops_per_update == per_update


def test_what_is_not_shown_is_said(tmp_path):
    """A model without a generator; a run whose corpus is not where it was."""
    fine_tuned = write_run(tmp_path / "fine_tuned", "electra", classes=2)
    moved = write_run(tmp_path / "moved", task={"data": str(tmp_path / "absent")})
    (first, second) = read_runs([fine_tuned, moved])
    assert first.notes == ["fine_tuned is fine-tuned: its curves are shown, and of its OUT the scores"]
    path = f"{tmp_path}/absent/valid"
    assert len(second.notes) == 2
    advices = ("give a text with --sentence", "give a held-out text with --text FILE")
    for note, advice in zip(second.notes, advices, strict=True):
        assert note.startswith(f"moved: {path}.bin or {path}.idx is missing")
        assert advice in note
    assert (first.inspections, second.inspections, second.losses) == ([], [], [])


def test_gpus_of_a_log(tmp_path):
    assert hardware_of(tmp_path) is None
    line = "[fairseq.utils][INFO] - rank   {}: capabilities =  9.0  ; total memory = 79.1 GB ; name = NVIDIA H100 \n"
    (tmp_path / "hydra_train.log").write_text("a line\n" + line.format(0) + line.format(1) + line.format(0))
    assert hardware_of(tmp_path) == "2 x NVIDIA H100"
