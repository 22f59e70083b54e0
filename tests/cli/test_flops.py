"""``amos flops``: values for recipes, files and runs, and errors."""

from pathlib import Path

import pytest
import torch
from failures import error_line
from omegaconf import OmegaConf
from saved_models import change_checkpoint, write_run

from amos_fairseq.cli.main import main
from amos_fairseq.flops import FlopsReport, read_configuration, report_flops, training_flops
from amos_fairseq.recipes.composition import compose_recipe


def report(source: str, *settings: str) -> FlopsReport:
    """What the command prints."""
    cfg, size = read_configuration(source, settings)
    return report_flops(cfg, size)


def test_name_path_and_overrides_describe_one_recipe(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    main(["flops", "mlm_tiny", "--set", "optimization.max_update=7", "--vocabulary-size", "600"])
    by_name = capsys.readouterr().out
    expected = training_flops(compose_recipe("mlm_tiny", ["optimization.max_update=7"]), 600)
    assert by_name.startswith("mlm_tiny (mlm): 7 updates of ")
    assert "64 tokens; 640 rows of token embeddings" in by_name
    rows = [" ".join(line.split()) for line in by_name.splitlines()]
    assert {f"per update {expected.per_update:.3g}", f"all updates {expected.total:.3g}"} <= {*rows}
    assert expected.total == 7 * expected.per_update
    assert "Inference on one text of 64 tokens: " in by_name
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [_self_, /mlm_base, /sizes/common_tiny, seven@_global_]\n")
    (tmp_path / "seven.yaml").write_text("optimization: {max_update: 7}\n")
    main(["flops", str(mine), "--vocabulary-size", "600"])
    assert capsys.readouterr().out.replace(str(mine), "mlm_tiny") == by_name


def test_inference_of_debertas_encoder() -> None:
    """6 layers of width 128 over 128 tokens, each with 2 x 255 projected rows of positions, met by queries and by keys."""
    layer = 24 * 128 * 128**2 + 4 * 128**2 * 128 + 2 * 2 * 255 * 128**2 + 2 * 2 * 128 * 255 * 128
    assert report("electra_deberta_mini").inference == 6 * layer


def test_run_is_counted_with_its_own_settings_and_vocabulary(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    write_run(tmp_path)
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    settings = OmegaConf.to_container(compose_recipe("amos_tiny", ["dataset.batch_size=2"]))
    change_checkpoint(tmp_path, cfg=settings | {"model": state["cfg"]["model"]})
    counted = report(str(tmp_path), "optimization.max_update=11")
    rows, length = counted.update.model.embed_tokens.num_embeddings, counted.update.cfg.task.tokens_per_sample
    assert (rows, counted.training.max_update, length) == (64, 11, 64)
    assert counted.training.total == 11 * counted.training.per_update > 0
    for setting, message in (("model.nothing=1", "Key 'nothing'"), ("task.mask_prob=x", "Value 'x'")):
        line = error_line(capsys, main, "flops", tmp_path, "--set", setting)
        assert f"{setting[:-2]}: {message}" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["amos_nope"], "there is no recipe amos_nope"),
        (["mlm_tiny", "--set", "model.encoder_layrs=3"], "encoder_layrs"),
        (["mlm_tiny", "--vocabulary-size", "5"], "5 must be at least 6"),
        (["mlm_tiny", "--set", "optimization.max_update=0"], "sets no end"),
        (["mlm_tiny", "--set", "dataset.batch_size=null"], "has no room for a sequence"),
        (["mlm_tiny", "--set", "model.encoder_attention_heads=3"], "multiple of the number of attention heads"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert message in error_line(capsys, main, "flops", *arguments)
