"""examples/comparison: equal budgets, entries that differ in the objective alone, scores by hand, and the command."""

import json
from pathlib import Path

import budgets
import compare
import entries
import pytest
import torch
from benchmark_summary import make_result
from budgets import Budget, schedule_settings
from comparison_results import compare_findings, scores_of
from entries import CONFIGS, read_yaml
from failures import error_line
from forked_command import run_main
from omegaconf import OmegaConf
from runs import Pretraining
from synthetic_glue import write_glue, write_pretraining_data

from amos_fairseq.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="session")
def comparison_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """DATA, 66 blocks of 128 tokens, and GLUE with MRPC and STS-B, of one tokenizer."""
    root = tmp_path_factory.mktemp("comparison data")
    data, glue = root / "text", root / "glue"
    write_pretraining_data(data)
    write_glue(glue, data, "MRPC", ["0", "1"], {"train": 32, "valid": 16}, pair=True)
    write_glue(glue, data, "STS-B", [], {"train": 32, "valid": 16}, pair=True)
    return data, glue


def test_updates_of_a_budget():
    """Only a budget of minutes calls a timing."""
    assert Budget("flops", 6e12).updates(2e9, None) == 3000
    assert Budget("updates", 3200).updates(2e9, None) == 3200
    assert Budget("minutes", 2).updates(2e9, lambda: 0.25) == 480


@pytest.mark.parametrize(
    ("wanted", "per_epoch", "expected"),
    [
        (1000, 5000, 992),  # 62 sixteenths are nearest
        (1010, 5000, 1008),
        (9, 5000, 16),
        (240, 60, 224),  # at 240, 25 % would be the end of the first epoch; 224 and 256 are as near
    ],
)
def test_nearest_number_of_updates_without_a_share_at_the_end_of_an_epoch(wanted, per_epoch, expected):
    assert budgets.divisible_updates(Budget("flops", 1.0), "mlm", wanted, per_epoch) == expected
    for share in (1 / 16, 1 / 8, 1 / 4, 1 / 2):
        assert (expected * share) % per_epoch != 0


def composed(size: str, name: str, updates: int = 2400, **settings):
    preset = entries.read_preset(size, settings)
    (entry,) = entries.read_entries(CONFIGS / "entries.yaml", size, [name])
    schedule = schedule_settings(updates, preset.warmup(updates))
    return entries.compose_entry(entry, {"task.data": "DATA", **preset.settings, **entry.settings, **schedule})


@pytest.mark.slow
def test_all_entries_share_everything_but_the_objective():
    size = "small"
    names = ["mlm", "electra", "electra_mlm", "teams", "electric", "amos", "amos_uniform", "amos_random_layer"]
    assert [entry.name for entry in entries.read_entries(CONFIGS / "entries.yaml", size, None)] == names
    configs = {name: composed(size, name) for name in names}
    shared = entries.check_shared(configs)
    assert {"model.embedding_dim", "model.relative_position_scheme", "optimizer.adam_betas"} < set(shared)
    assert "common.seed" in shared
    objectives = ["mlm", "electra", "electra", "teams", "electric", "amos", "amos", "amos"]
    assert [cfg.model._name for cfg in configs.values()] == objectives
    assert [configs[name].model.mixture for name in names[5:]] == ["learned", "uniform", "random_layer"]
    assert [configs[name].model.encoder_mlm_weight for name in names[1:3]] == [0.0, 1.0]
    assert len({cfg.optimization.max_update for cfg in configs.values()}) == 1


def test_different_setting_is_refused_by_name():
    configs = {"mlm": composed("tiny", "mlm"), "amos": composed("tiny", "amos", **{"model.dropout": 0.2})}
    with pytest.raises(UserError, match=r"model.dropout is 0.0 for mlm and 0.2 for amos: .*--set model.dropout=VALUE"):
        entries.check_shared(configs)


def test_average_of_medians_and_deviation_over_seeds():
    values = {"RTE": [50.0, 56.0, 53.0], "MRPC": [70.0, 60.0, 80.0]}
    results = []
    for task, own in values.items():
        for seed, value in enumerate(own, start=1):
            scores = {"accuracy": value, "f1": 0.0}
            results.append(make_result(task, seed, "accuracy", scores))
    scores = scores_of(results)
    assert {task: own["median"] for task, own in scores["tasks"].items()} == {"RTE": 53.0, "MRPC": 70.0}
    assert scores["tasks"]["RTE"]["deviation"] == pytest.approx(3.0)
    assert scores["average"]["value"] == pytest.approx(61.5)
    # Averages of the seeds: 60, 58, 66.5; their mean is 61.5, their squared deviations 2.25, 12.25, 25.
    assert scores["average"]["deviation"] == pytest.approx((39.5 / 2) ** 0.5)
    assert scores["average"]["count"] == 3


def entry(*averages: tuple[float, float]) -> dict:
    """An entry with these averages and deviations at a half of the budget and at its end."""
    points = {}
    for share, (value, deviation) in zip(("0.5", "1"), averages, strict=False):
        scores = {"tasks": {}, "average": {"value": value, "deviation": deviation, "count": 3}}
        points[share] = {"scores": scores, "complete": True}
    return {"points": points}


def test_findings_of_compared_pairs():
    entries = {"mlm": entry((50.0, 1.0), (60.0, 1.5)), "electra": entry((49.0, 1.0), (63.0, 2.0))}
    entries |= {"amos": entry((52.0, 1.0), (58.0, 1.0)), "teams": entry()}
    findings = compare_findings(read_yaml(CONFIGS / "paper.yaml")["findings"], entries)
    pairs = {(finding["better"], finding["worse"]): finding for finding in findings}
    assert set(pairs) == {("electra", "mlm"), ("amos", "electra"), ("amos", "mlm")}
    # 3.0 points, spread sqrt(1.5^2 + 2^2) = 2.5; -5.0 and sqrt(1 + 4); -2.0 and sqrt(1 + 2.25) = 1.8.
    assert pairs["electra", "mlm"]["our_points"] == pytest.approx(3.0)
    assert pairs["electra", "mlm"]["our_spread"] == pytest.approx(2.5)
    verdicts = [pairs[pair]["ours"] for pair in (("electra", "mlm"), ("amos", "electra"), ("amos", "mlm"))]
    assert verdicts == ["agrees", "disagrees", "disagrees"]


@pytest.fixture
def pretraining(tmp_path) -> Pretraining:
    """AMOS for 32 updates, nothing trained yet."""
    (entry,) = entries.read_entries(entries.CONFIGS / "entries.yaml", "tiny", ["amos_uniform"])
    settings = {"task.data": "a, DATA", **entry.settings, **schedule_settings(32, 3)}
    return Pretraining(entry, entries.compose_entry(entry, settings), settings, tmp_path / "run", "cpu")


def save(run: Pretraining, name: str, updates: int, seconds: float = 0.0) -> None:
    """A checkpoint as far as its header is read."""
    run.save_dir.mkdir(exist_ok=True)
    cfg = OmegaConf.to_container(run.cfg)
    state = {"optimizer_history": [{"num_updates": updates}], "extra_state": {"previous_training_time": seconds}}
    torch.save(state | {"cfg": cfg}, run.save_dir / name)


def test_checkpoints_of_other_updates_than_the_shares_are_removed(pretraining):
    assert (pretraining.num_updates, pretraining.finished, pretraining.checkpoint(1.0)) == (0, False, None)
    for updates in range(2, 17, 2):
        save(pretraining, f"checkpoint_{1 if updates < 10 else 2}_{updates}.pt", updates, seconds=updates * 180.0)
    save(pretraining, "checkpoint_last.pt", 16)
    save(pretraining, "checkpoint_best.pt", 16)
    pretraining.prune()
    names = {"checkpoint_1_2.pt", "checkpoint_1_4.pt", "checkpoint_1_8.pt", "checkpoint_2_16.pt"}
    names |= {"checkpoint_last.pt", "checkpoint_best.pt"}
    assert {path.name for path in pretraining.save_dir.iterdir()} == names
    names_of_shares = [pretraining.checkpoint(share).name for share in (0.0625, 0.5)]
    assert names_of_shares == ["checkpoint_1_2.pt", "checkpoint_2_16.pt"]
    assert pretraining.hours(0.5) == pytest.approx(0.8)
    assert not pretraining.finished
    assert pretraining.checkpoint(1.0) is None
    save(pretraining, "checkpoint_last.pt", 32)
    assert pretraining.finished
    assert pretraining.checkpoint(1.0).name == "checkpoint_last.pt"


RECIPE = """\
defaults: {batch_size: 32, warmup: 0.1, lr: 1e-3, epochs: 1, weight_decay: 0.01, checkpoint: last}
tasks: {MRPC: {}}
"""
MLM = ["--objectives", "mlm", "--set", "dataset.batch_size=6", "--tasks", "MRPC"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--budget-updates", "0"], "--budget 0 is out of range"),
        (["--budget-updates", "16", "--tasks", "RTE,WNLI"], "WNLI is not part of the average"),
        (["--budget-updates", "16", "--fine-tune-at", "0.3"], "--fine-tune-at 0.3"),
        (["--budget-updates", "16", "--objectives", "bert"], "--objectives bert: no such entry"),
        (["--budget-updates", "16", "--set", "model.no_such=1"], "no_such"),
        (["--budget-updates", "17"], "--budget-updates 17 cannot be divided into sixteenths"),
        (["--budget-flops", "1e3"], "1,000 FLOPs are 0.0 updates"),
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
