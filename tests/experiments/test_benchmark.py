"""Fine-tuning of every objective: the flags that are read from a checkpoint build its encoder."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from saved_models import TEXT, write_run
from synthetic_glue import session as open_session

import amos_fairseq
from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.model import FineTunedModel
from amos_fairseq.errors import UserError
from amos_fairseq.experiments import benchmark, recipe_names
from amos_fairseq.experiments.benchmark import (
    PretrainedCheckpoint,
    Session,
    read_pretrained_checkpoint,
)

TWO_TOWER = {"electric_variant": "two_tower", "generator_size": 1, "generator_loss_tokens": "all"}
RUNS = {
    "mlm": ("mlm", {}),
    "mlm, compiled and checkpointed": ("mlm", {"compile": True, "activation_checkpointing": True}),
    "teams": ("teams", {}),
    "teams, extra layer, rtd branch": ("teams", {"task_heads": "extra_layer", "representation": "rtd"}),
    "electric": ("electric", {}),
    "electra_tt": ("electric", {"electric_variant": "electra_tt"}),
    "electra that shares all": ("electra", {"share_weights": "all", "generator_size": 1}),
    "electra without a generator's weights": ("electra", {"generator": "uniform"}),
    "all-tokens mlm": ("electra", {"main_objective": "all_tokens_mlm"}),
}


def fine_tuned(start: PretrainedCheckpoint, pretrained) -> FineTunedModel:
    """As fairseq-train builds and fills it for a labelled task."""
    fixed = ["data", "--task", "sentence_prediction", "--criterion", "sentence_prediction", "--optimizer", "adam"]
    parser = options.get_training_parser()
    flags = options.parse_args_and_arch(parser, [*fixed, *start.model_flags()])
    config = convert_namespace_to_omegaconf(flags)
    model = build_model(config.model, SimpleNamespace(source_dictionary=pretrained.dictionary))
    state = torch.load(start.file, weights_only=True)["model"]
    model.load_state_dict(state, strict=True, model_cfg=config.model)
    return model.eval()


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", RUNS)
def test_flags_and_weights_give_the_encoder_of_the_run(name: str, tmp_path: Path) -> None:
    """Bit for bit the states of the pretraining model's own encoder; those of `amos_fairseq.load` too."""
    objective, settings = RUNS[name]
    run = write_run(tmp_path, objective, **settings)
    pretrained = load_checkpoint(run)
    model = fine_tuned(read_pretrained_checkpoint(run), pretrained)
    tokens = pretrained.tokens(TEXT)[None]
    expected = pretrained.model.extract_features(tokens)
    assert isinstance(model, FineTunedModel)
    assert torch.equal(model.extract_features(tokens), expected)
    features = amos_fairseq.load(run)(TEXT)
    assert torch.equal(features.tokens, tokens)
    assert torch.equal(features.states, expected)


def test_settings_of_computation_are_not_inherited(tmp_path: Path) -> None:
    computing = {"compile": True, "activation_checkpointing": True, "kernels": "reference"}
    start = read_pretrained_checkpoint(write_run(tmp_path, "mlm", **computing))
    assert start.model["max_positions"] > 0
    assert not start.model.keys() & computing.keys()


def test_a_linear_head_of_an_earlier_fine_tuning_is_not_inherited(tmp_path: Path) -> None:
    """The recipe says which head this one has; only a linear one has a flag."""
    for activation, inherited in (("linear", None), ("gelu", "gelu")):
        run = write_run(tmp_path / activation, "mlm", classes=2, pooler_activation_fn=activation)
        assert read_pretrained_checkpoint(run).model.get("pooler_activation_fn") == inherited


@pytest.mark.parametrize("encoder", ["bert", "modernbert"])
def test_modernbert_is_fine_tuned_without_attention_dropout(encoder: str, tmp_path: Path) -> None:
    """By the recipes of this package, whose 0.1 is BERT's; a recipe of one's own says what it says."""
    modern = {"encoder": encoder, "relative_position_scheme": "none", "embedding_dim": 0}
    run = write_run(tmp_path / "run", "mlm", **(modern if encoder == "modernbert" else {}))
    own = tmp_path / "own.yaml"
    settings = "{lr: 0.1, epochs: 1, batch_size: 8, warmup: 0.1, attention_dropout: 0.2}"
    own.write_text(f"tasks: {{RTE: {settings}}}\n", encoding="utf-8")
    for recipe in (*recipe_names(), str(own)):
        session = open_session(run, tmp_path / "out", recipe=recipe, lr=0.01)
        values = values_of(session, "--attention-dropout")
        assert values == ({"0.2"} if recipe == str(own) else {"0.0" if encoder == "modernbert" else "0.1"})
        assert values_of(session, "--lr") == {"0.01"}
        assert ("attention_dropout" in session.overrides) == (encoder == "modernbert" and recipe != str(own))


def test_a_head_alone_has_a_rate_of_its_own(tmp_path: Path) -> None:
    """Instead of that of each recipe of this package; other recipes, and --lr, say what they say."""
    run, own = write_run(tmp_path / "run", "mlm"), tmp_path / "own.yaml"
    own.write_text("tasks: {RTE: {lr: 0.1, epochs: 1, batch_size: 8, warmup: 0.1}}\n", encoding="utf-8")
    for recipe in ("amos_grid", "electra", str(own)):
        for given, expected in (({}, "0.1" if recipe == str(own) else "0.001"), ({"lr": 0.01}, "0.01")):
            session = open_session(run, tmp_path / "out", recipe=recipe, freeze_encoder=True, **given)
            assert values_of(session, "--lr") == {expected}
            assert values_of(session, "--layer-wise-lr-decay") == {"1.0"}
            assert all("--freeze-encoder" in flags for flags in flags_of_trials(session))


def flags_of_trials(session: Session) -> list[list[str]]:
    trials = [trial for own_trials in session.recipe.trials.values() for trial in own_trials]
    return [trial.train_flags(trial.schedule(1000)) for trial in trials]


def values_of(session: Session, name: str) -> set[str]:
    return {flags[flags.index(name) + 1] for flags in flags_of_trials(session)}


def test_cloze_model_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, "electric", **TWO_TOWER)
    for read in (read_pretrained_checkpoint, amos_fairseq.load):
        with pytest.raises(UserError, match="has no encoder to fine-tune or to load"):
            read(run)


def test_settings_of_a_stranger_are_refused(tmp_path: Path) -> None:
    """By fine-tuning, which passes them on a command line, and by load; fairseq's training saves none of these."""
    run = write_run(tmp_path, "mlm")
    saved = torch.load(run / "checkpoint_last.pt", weights_only=True)
    for settings, reason in (
        ({"pooler_activation_fn": "--user-dir=model/src"}, "model.pooler_activation_fn: Invalid value '--user-dir="),
        ({"layer_norm_eps": "__import__('os')"}, "model.layer_norm_eps: Value"),
        ({"dropout": float("nan")}, "--dropout nan must be a finite number"),
        ({"encoder_attention_heads": -1}, "--encoder-attention-heads -1 must be above 0"),
        ({"_name": "os.system"}, "architecture 'os.system', which is not one of this package"),
        ({"max_positions": "${oc.env:HOME}"}, r"a setting that no run has \('\${oc.env:HOME}'\)"),
    ):
        cfg = saved["cfg"] | {"model": saved["cfg"]["model"] | settings}
        torch.save(saved | {"cfg": cfg}, run / "checkpoint_last.pt")
        for read in (read_pretrained_checkpoint, amos_fairseq.load):
            with pytest.raises(UserError, match=reason) as refused:
                read(run)
            assert "\n" not in str(refused.value)


def test_precision_of_a_device_without_fast_bfloat16(monkeypatch):
    """choose() of run/precision.py has its own tests."""
    monkeypatch.setattr(benchmark, "gpus_support_bf16", lambda: False)
    assert benchmark.choose_precision("auto", ["cuda:0"]) == "float32"
    for asked, devices in (("bf16", ["cuda:0"]), ("fp16", ["cpu", "cpu"])):
        with pytest.raises(UserError, match=f"^--precision {asked} needs"):
            benchmark.choose_precision(asked, devices)
