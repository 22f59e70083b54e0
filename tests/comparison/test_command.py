"""The command: what is wrong is one line before anything is written; two entries from nothing to the table and figures."""

import json

import compare
import pytest
from failures import error_line
from forked_command import run_main

RECIPE = """\
defaults: {batch_size: 32, warmup: 0.1, lr: 1e-3, epochs: 1, weight_decay: 0.01, checkpoint: last}
tasks: {MRPC: {}}
"""
MLM = ["--objectives", "mlm", "--set", "dataset.batch_size=6", "--tasks", "MRPC"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--budget-updates", "0"], "--budget 0 is out of range"),
        (["--budget-updates", "16", "--piece-minutes", "-1"], "--piece-minutes -1"),
        (["--budget-updates", "16", "--tasks", "RTE,WNLI"], "WNLI is not part of the average"),
        (["--budget-updates", "16", "--fine-tune-at", "0.3"], "--fine-tune-at 0.3"),
        (["--budget-updates", "16", "--objectives", "bert"], "--objectives bert: no such entry"),
        (["--budget-updates", "16", "--set", "model.no_such=1"], "no_such"),
        (["--budget-updates", "16", "--set", "dropout"], "--set"),
        (["--budget-updates", "17"], "--budget-updates 17 cannot be divided into sixteenths"),
        (["--budget-updates", "16", "--tasks", "RTE"], "RTE"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_trained(comparison_data, tmp_path, capsys, flags, words):
    data, glue = comparison_data
    assert words in error_line(capsys, compare.main, data, glue, tmp_path / "out", *MLM, "--cpu", *flags)
    assert not (tmp_path / "out").exists()


@pytest.mark.by_hand
def test_two_entries_in_pieces_to_the_end_and_nothing_twice(comparison_data, tmp_path, capsys):
    data, glue = comparison_data
    out, recipe = tmp_path / "an out", tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    command = [data, glue, out, "--budget-updates", 16, "--objectives", "mlm,amos_uniform", "--tasks", "MRPC"]
    command += ["--seeds", 1, "--fine-tune-at", "1", "--set", "dataset.batch_size=6", "--recipe", recipe, "--cpu"]

    # A piece of no length to speak of: it plans, trains nothing to its end, and asks to be started again.
    first = run_main(compare.main, *command, "--piece-minutes", 0.02)
    assert first.returncode == 75, first.stderr[-3000:]
    assert "the same command continues" in first.stderr
    done = run_main(compare.main, *command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    content = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    assert set(content["ordering"]) == {"mlm", "amos_uniform"}
    for name, entry in content["entries"].items():
        kept = {int(path.stem.rsplit("_", 1)[1]) for path in (out / name / "pretraining").glob("checkpoint_*_*.pt")}
        assert kept == {1, 2, 4, 8, 16}
        assert list(entry["points"]) == ["0.0625", "0.125", "0.25", "0.5", "1"]
        hours = [point["hours"] for point in entry["points"].values()]
        assert hours == sorted(hours)
        # The same score stands where amos glue wrote it.
        glue_json = json.loads((out / name / "fine_tuning" / "1" / "glue.json").read_text(encoding="utf-8"))
        assert entry["points"]["1"]["scores"]["tasks"]["MRPC"]["median"] == glue_json["runs"][0]["scores"]["accuracy"]
    # A generator beside the encoder costs more than an MLM head alone, and less than a second encoder with its own.
    costs = {name: entry["flops_per_update"] for name, entry in content["entries"].items()}
    assert costs["mlm"] < costs["amos_uniform"] < 4 * costs["mlm"]
    assert (out / "score_by_flops.png").stat().st_size > 0
    assert "AMOS without adversary" in (out / "comparison.md").read_text(encoding="utf-8")

    before = {path: path.stat().st_mtime_ns for path in out.glob("*/**/*") if path.is_file()}
    again = run_main(compare.main, *command)
    assert again.returncode == 0, again.stderr[-3000:]
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("*/**/*") if path.is_file()}
    # Another budget is no part of this comparison: of an entry that is there, and of one that is not.
    for objectives, words in (("mlm", "was trained with"), ("electra", "holds a comparison with other settings (")):
        changed = {16: 32, "mlm,amos_uniform": objectives}
        changed_command = [changed.get(part, part) for part in command]
        assert words in error_line(capsys, compare.main, *changed_command, reports_progress=True)
