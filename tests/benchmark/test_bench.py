"""examples/benchmark/bench.py: turns and ratios by hand, what is compared, one small run of each kind, and refusals."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from benchmark import bench
from failures import error_line
from hugging_face_peers import comparable_setup
from tiny_runs import ROOT, environment, run_process
from training_step import Setup, loaded_tokens_per_second, random_batches, random_blocks, set_up

from amos_fairseq.flops import training_flops
from amos_fairseq.recipes.composition import compose_recipe

VOCABULARY = 600
SHORT = ["--steps", "2", "--warmup", "1", "--vocabulary-size", str(VOCABULARY), "--device", "cpu"]


def setup_of(recipe: str, *overrides: str, precision: str | None = "float32") -> Setup:
    return set_up(recipe, ["dataset.batch_size=2", *overrides], precision, "cpu", VOCABULARY)


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that becomes 10 times slower for one round changes no ratio: 3/1, 20/10, 1/1."""
    assert bench.ratios([1.0, 10.0, 1.0], [3.0, 20.0, 1.0]) == [1.0, 2.0, 3.0]


@pytest.fixture(autouse=True)
def small_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MATMUL_EDGES", {"cpu": (64,)})
    monkeypatch.setattr(bench, "PEAK_SECONDS", {"cpu": 0.01})


@pytest.mark.slow
def test_pretraining_is_measured_beside_all_peers(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The page has the values of the JSON file; model FLOPs are those of the recipe for all rows."""
    file = tmp_path / "bench.json"
    peers = ["--peer", "reference", "hf", "model.activation_checkpointing=true", "--set", "dataset.batch_size=2"]
    assert bench.main(["electra_tiny", *peers, *SHORT, "--precision", "float32", "--json", str(file)]) == 0
    page, report = capsys.readouterr().out, json.loads(file.read_text())
    ours, reference, hf, recomputed = report["rows"]
    flops = training_flops(setup_of("electra_tiny").cfg, VOCABULARY, reference=True).per_token
    for row in report["rows"]:
        assert f"| {row['name']} | {row['tokens_per_second'][1]:,.0f} |" in page
        assert len(row["seconds"]) == 2
        assert row["tokens_per_second"][1] == pytest.approx(sum(128 / second for second in row["seconds"]) / 2)
        rate = flops * row["tokens_per_second"][1]
        assert row["fraction_of_peak"] == pytest.approx(rate / report["matmul_peak"])
        # Weight, gradient and two moments of each parameter in float32.
        assert row["held_bytes"] >= 16 * row["parameters"]
        assert row["peak_bytes"] > row["held_bytes"]
    assert ours["times_as_fast"] is None
    turns = zip(ours["seconds"], hf["seconds"], strict=True)
    assert hf["times_as_fast"][1] == pytest.approx(sum(their / our for our, their in turns) / 2)
    assert ours["parameters"] == reference["parameters"]
    assert recomputed["peak_bytes"] < ours["peak_bytes"]
    assert report["loaded_tokens_per_second"] > 0


@pytest.mark.slow
def test_fine_tuning_is_measured_with_both_kinds_of_batches(capsys: pytest.CaptureFixture) -> None:
    report = bench.run(["mlm_tiny", "--fine-tuning", *SHORT])
    random, similar = report["rows"]
    assert random["padding"] > 0.3 > similar["padding"]
    assert min(row[key] for row in report["rows"] for key in ("ours_rows_per_second", "hf_rows_per_second")) > 0
    assert capsys.readouterr().out.count("| random |") == 1


@pytest.mark.slow
def test_a_graph_leaves_little_to_the_host() -> None:
    script = ROOT / "examples" / "benchmark" / "gpu" / "correct.py"
    paths = os.pathsep.join(map(str, (ROOT, script.parents[1], script.parent)))
    command = [sys.executable, str(script), "host", "--recipe", "electra_tiny"]
    result = run_process(command, env=environment({"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}))
    whole, around = map(float, re.findall(r": ([\d.]+) ms of a core", result.stdout))
    assert 0 < around < whole / 2


def test_batches_are_full_blocks_masked_by_the_task() -> None:
    setup = setup_of("mlm_tiny", "task.tokens_per_sample=40", "task.mask_prob=0.2")
    batches, again = random_batches(setup), random_batches(setup)
    for batch, same in zip(batches, again, strict=True):
        inputs = batch["net_input"]
        assert (batch["ntokens"], batch["num_masked"]) == (2 * 40, 2 * 8)
        assert inputs["masked_weights"].eq(1).all()
        assert not set(inputs["tokens"][:, 1:].flatten().tolist()) & set(setup.task.special_ids)
        assert all(inputs[name].equal(same["net_input"][name]) for name in inputs)
    assert len({batch["first_id"] for batch in batches}) == len(batches)
    pieces = {piece for block in range(200) for piece in random_blocks(setup.task, 200)[block]["tokens"][1:].tolist()}
    assert len(pieces) == VOCABULARY - len(setup.task.special_ids)  # 7,800 samples miss one with probability 1e-3
    assert loaded_tokens_per_second(setup) > 0


def test_peers_start_from_the_same_weights() -> None:
    ours, reference = bench.build_contestants(setup_of("amos_tiny"), ["reference", "reference"])
    assert reference.step.module.cfg.kernels == "reference"
    for mine, other in zip(ours.step.module.parameters(), reference.step.module.parameters(), strict=True):
        assert mine.equal(other)


def test_amos_is_compared_with_the_electra_of_its_encoder() -> None:
    """The peer's FLOPs are those of ELECTRA's recipe with AMOS' embedding width, dropout, length and batch."""
    overrides = ["task.tokens_per_sample=32", "model.embedding_dim=48", "model.dropout=0.2"]
    setup, difference = comparable_setup(setup_of("amos_tiny", *overrides))
    assert "ELECTRA instead of amos" in difference
    plain = ["distributed_training.distributed_world_size=1", "dataset.batch_size=2"]
    expected = training_flops(compose_recipe("electra_tiny", [*plain, *overrides]), VOCABULARY)
    assert training_flops(setup.cfg, VOCABULARY).per_update == expected.per_update
    assert (setup.cfg.model.dropout, setup.cfg.model.embedding_dim) == (0.2, 48)
    modern, _ = comparable_setup(setup_of("amos_modern_mini"))
    assert (modern.cfg.model._name, modern.cfg.model.encoder) == ("electra", "modernbert")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["amos_nope"], "there is no recipe amos_nope"),
        (["mlm_tiny", "--peer", "model.nothing=1"], "--peer model.nothing=1"),
        (["mlm_tiny", "--steps", "0"], "--steps 0"),
        (["mlm_tiny", "--set", "optimization.update_freq=[2]"], "has no effect"),
        (["mlm_tiny", "--fine-tuning", "--peer", "hf"], "--peer"),
        (["electra_tiny", "--peer", "hf", "--set", "model.generator_temperature=2"], "generator_temperature=2.0"),
        (["mlm_modern_mini", "--peer", "hf", "--set", "model.dropout=0.1"], "model.dropout=0.1"),
        (["amos_tiny", "--peer", "hf", "--set", "model.encoder_layers=3"], "no ELECTRA recipe"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], named: str, capsys: pytest.CaptureFixture) -> None:
    assert named in error_line(capsys, bench.main, *words, "--vocabulary-size", str(VOCABULARY))
