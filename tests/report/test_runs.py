"""What the report reads of runs: their cost, and models that are not shown."""

import torch
from saved_models import CORPUS, add_settings, change_checkpoint, write_run

from amos_fairseq.flops import read_configuration, training_flops
from amos_fairseq.report.runs import read_runs


def test_flops_of_a_run_with_a_budget_of_time(tmp_path):
    """Its settings have no number of updates; the time is that of the checkpoint."""
    run = write_run(tmp_path / "run", "mlm")
    add_settings(run, "mlm_tiny")
    per_update = training_flops(*read_configuration(str(run))).per_update
    state = torch.load(run / "checkpoint_last.pt", weights_only=True)
    state["cfg"]["optimization"]["max_update"] = 0
    change_checkpoint(run, cfg=state["cfg"], extra_state={"previous_training_time": 1250.0})
    (found,) = read_runs([run], CORPUS[0], CORPUS[:1])
    assert (found.flops_per_update, found.seconds) == (per_update, 1250)


def test_what_is_not_shown_is_said(tmp_path):
    """A model without a generator; a run whose corpus is not where it was."""
    fine_tuned = write_run(tmp_path / "fine_tuned", "electra", classes=2)
    moved = write_run(tmp_path / "moved", task={"data": str(tmp_path / "absent")})
    (first, second) = read_runs([fine_tuned, moved])
    assert first.notes == ["fine_tuned is fine-tuned: its curves are shown; give its OUT to see the scores"]
    path = f"{tmp_path}/absent/valid"
    assert len(second.notes) == 2
    advices = ("give a text with --sentence", "give a held-out text with --text FILE")
    for note, advice in zip(second.notes, advices, strict=True):
        assert note.startswith(f"moved: {path}.bin or {path}.idx is missing")
        assert advice in note
    assert (first.inspections, second.inspections, second.losses) == ([], [], [])
