"""examples/collapse: short runs that differ in one setting, and the same run with Hugging Face's networks, at small size."""

import importlib.util
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from forked_command import run_module
from tiny_runs import ROOT

from amos_fairseq.recipes.composition import compose_recipe
from amos_fairseq.run.metrics_file import read_records

FOLDER = ROOT / "examples" / "collapse"
SMALLER = shlex.split(
    "task.tokens_per_sample=32 model.max_positions=32 model.encoder_layers=2 model.encoder_embed_dim=32 "
    "model.encoder_ffn_embed_dim=64 dataset.batch_size=4 dataset.num_workers=0 task.precision=float32 "
    "common.log_interval=1 dataset.validate_interval_updates=3 dataset.max_valid_steps=2 "
    "optimization.max_update=3 lr_scheduler.warmup_updates=2"
)


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess:
    return run_module(script, list(map(str, arguments)), env={"PYTHONPATH": f"{FOLDER}:{ROOT}"})


def values(save_dir: Path, key: str, split: str) -> list[float]:
    return [record[key] for record in read_records(save_dir) if record["split"] == split]


@pytest.mark.parametrize(("study", "end_of_decay"), [("rows", 6400), ("screen", None)])  # None: any
def test_every_row_is_a_recipe(study: str, end_of_decay: int | None) -> None:
    specification = importlib.util.spec_from_file_location("sweep", FOLDER / "sweep.py")
    sweep = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(sweep)
    content = yaml.safe_load((FOLDER / f"{study}.yaml").read_text(encoding="utf-8"))
    for name in content["rows"]:
        recipe, settings = sweep.settings_of(name, content)
        cfg = compose_recipe(recipe, ["task.data=DATA", *settings])
        assert end_of_decay in (None, cfg.lr_scheduler.total_num_update), name


@pytest.mark.by_hand
def test_hugging_face_starts_where_a_row_starts(binarized_corpus: Path, tmp_path: Path) -> None:
    """The generator's losses of three updates agree: the same batches, weights, rates and optimizer; only samples differ."""
    swept = run("sweep", binarized_corpus, tmp_path, "--rows", "positions_none", *SMALLER)
    assert swept.returncode == 0, swept.stdout + swept.stderr
    table = (tmp_path / "collapse.md").read_text(encoding="utf-8").splitlines()
    assert table[0].startswith("| row | update | generator loss | AUC |")
    assert [line.split("|")[1:3] for line in table[2:]] == [[" positions_none ", " 3 "]]
    row = ["model.discriminator_lr_scale=1", "model.relative_position_scheme=none"]
    row += ["lr_scheduler.total_num_update=6400", f"task.data={binarized_corpus}", *SMALLER]
    compared = run("hugging_face", "electra_mini", "--out", tmp_path / "theirs", *row)
    assert compared.returncode == 0, compared.stderr
    theirs, ours = tmp_path / "theirs", tmp_path / "positions_none"
    losses, expected = (values(run, "mlm_loss_2", "train") for run in (theirs, ours))
    # The embeddings also learn from detection, whose samples differ; three updates change the loss by some hundredths.
    assert losses == pytest.approx(expected, abs=0.02)
    assert losses[0] == pytest.approx(expected[0], abs=2e-4)
    # Theirs is of the original text, ours of the text with samples.
    spread, expected = (values(run, "rtd_state_variance", "valid") for run in (theirs, ours))
    assert spread == pytest.approx(expected, rel=0.2)
