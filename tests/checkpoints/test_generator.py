"""Files of frozen generators: which are refused, and what of a run can be read without them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from saved_models import TEXT, add_settings, small_tokenizer, write_run

import amos_fairseq
from amos_fairseq.checkpoints.read import dictionary_of, load_checkpoint, load_generator
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.export import export
from amos_fairseq.hugging_face.parts import Choice
from amos_fairseq.models.amos import AmosConfig
from amos_fairseq.report.inspection import inspect_text
from amos_fairseq.report.runs import read_runs
from amos_fairseq.setting_checks import model_settings

SMALLER = {"encoder_embed_dim": 8, "encoder_layers": 1}


@pytest.mark.parametrize("objective", ["electra", "amos"])
def test_a_run_is_read_without_the_file_of_its_generator(objective: str, tmp_path: Path) -> None:
    """Features, export and fine-tuning use the discriminator alone; the commands that sample need the file, unchanged."""
    file = write_run(tmp_path / "generator", "mlm", **SMALLER) / "checkpoint_last.pt"
    deeper = write_run(tmp_path / "deeper", "amos") / "checkpoint_last.pt"
    files = f"{file}:{deeper}" if objective == "amos" else str(file)
    run = write_run(tmp_path / "run", objective, generator_checkpoint=files)
    state = torch.load(run / "checkpoint_last.pt", weights_only=True)
    loaded = load_checkpoint(run)
    inspection = inspect_text(loaded, TEXT, seed=1, mask_prob=0.2, top=2, with_samples=True)
    assert inspection.depth_names == (["1"] if objective == "electra" else ["1_1", "1_2", "2_3", "4_4"])
    if objective == "amos":
        assert loaded.model.mixture.v.equal(state["model"]["mixture.v"])
    features = amos_fairseq.load(run)("the quick dog").states

    moved = file.rename(tmp_path / "moved.pt")
    assert amos_fairseq.load(run)("the quick dog").states.equal(features)
    export(run, tmp_path / "exported")
    with pytest.raises(UserError, match=r"was not trained with it: export .*checkpoint_last.pt"):
        export(run, tmp_path / "other", choice=Choice(part="generator"))
    settings = model_settings(run, state["cfg"]["model"])
    task = SimpleNamespace(source_dictionary=dictionary_of(small_tokenizer()))
    fine_tuned = type(loaded.model).build_model(settings, task)
    fine_tuned.load_state_dict(dict(state["model"]))
    expected = loaded.model.extract_features(loaded.tokens(TEXT)[None])
    torch.testing.assert_close(fine_tuned.eval().extract_features(loaded.tokens(TEXT)[None]), expected)
    with pytest.raises(UserError, match=r"^--generator-checkpoint: .*generator/checkpoint_last.pt is missing: give"):
        inspect_text(load_checkpoint(run), TEXT, seed=1, mask_prob=0.2, top=2)
    add_settings(run, f"{objective}_tiny")
    (reported,) = read_runs([str(run)])
    assert "checkpoint_last.pt is missing" in reported.missing["losses"]

    changed = torch.load(moved, weights_only=True)
    changed["model"]["mlm_head.bias"][5] += 1
    torch.save(changed, file)
    with pytest.raises(UserError, match=r"has changed since .*run/checkpoint_last.pt was trained"):
        inspect_text(load_checkpoint(run), TEXT, seed=1, mask_prob=0.2, top=2)


def test_refusals(tmp_path: Path) -> None:
    mlm = write_run(tmp_path / "mlm", "mlm", **SMALLER)
    dictionary, other = (dictionary_of(small_tokenizer()) for _ in range(2))
    other.symbols[7] = "unlike"
    frozen = write_run(tmp_path / "frozen", "electra", generator_checkpoint=str(mlm / "checkpoint_last.pt"))
    rows = [
        (tmp_path / "nowhere.pt", dictionary, "nowhere.pt is missing"),
        (f"{mlm}:{tmp_path / 'nowhere.pt'}", dictionary, "nowhere.pt is missing"),
        (write_run(tmp_path / "tuned", "mlm", classes=2), dictionary, "tuned/.* has no MLM head"),
        (write_run(tmp_path / "electric", "electric"), dictionary, "electric/.* has no MLM head"),
        (frozen, dictionary, "frozen/.* has no MLM head"),
        (write_run(tmp_path / "short", "mlm", max_positions=64), dictionary, "reads 64 tokens, --max-positions is 150"),
        (mlm, other, f"token 7 is {dictionary.symbols[7]!r} there, and 'unlike' here"),
    ]
    for files, tokens, message in rows:
        with pytest.raises(UserError, match=f"^--generator-checkpoint: .*{message}"):
            load_generator(AmosConfig(generator_checkpoint=str(files), max_positions=150), tokens)
    (mlm / "tokenizer" / "dict.txt").unlink()
    with pytest.raises(UserError, match=r"tokenizer/dict.txt is missing, or not the dictionary"):
        load_generator(AmosConfig(generator_checkpoint=str(mlm), max_positions=150), dictionary)
