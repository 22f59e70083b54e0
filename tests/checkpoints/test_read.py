"""The safe reading of checkpoints and of frozen generators: which are refused, and what can be read without a generator."""

import argparse
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from saved_models import TEXT, add_settings, change_checkpoint, small_tokenizer, write_run

import amos_fairseq
from amos_fairseq.checkpoints.read import dictionary_of, load_checkpoint, load_generator
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.export import export
from amos_fairseq.models.amos import AmosConfig
from amos_fairseq.report.inspection import inspect_text
from amos_fairseq.report.runs import read_runs
from amos_fairseq.setting_checks import model_settings
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer

SMALLER = {"encoder_embed_dim": 8, "encoder_layers": 1}


@pytest.fixture
def save_dir(tmp_path):
    return write_run(tmp_path)


def test_lines_end_as_in_a_corpus(save_dir):
    """Line breaks of any system begin a new line; those of Unicode alone do not, as in amos prepare."""
    pretrained = load_checkpoint(save_dir)
    eos = pretrained.dictionary.eos()
    for ends, num_lines in (("\n", "\r\n", "\r"), 2), (("\u2028", "\x85", "\v"), 1):
        found = [pretrained.tokens(f"the dog{end}the fox").tolist().count(eos) for end in ends]
        assert found == [num_lines] * 3
    lines: list[str] = []
    read = dataclasses.replace(pretrained, tokenizer=SimpleNamespace(encode=lambda line: lines.append(line) or ["a"]))
    read.token_ids("the dog\x0cthe fox\nthe end")  # other tokenizers than this one would join the words
    assert lines == ["the dog the fox", "the end"]


def test_settings_added_later_have_their_defaults(save_dir):
    """A checkpoint of ``--arch amos_base`` names the architecture, and fairseq adds new fields to models only."""
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    newer = ("token_types", "max_update", "generator_checkpoint", "_name")
    settings = {name: value for name, value in state["cfg"]["model"].items() if name not in newer}
    torch.save(state | {"cfg": state["cfg"] | {"model": settings | {"_name": "amos_base"}}}, save_dir / "older.pt")
    newer, older = load_checkpoint(save_dir), load_checkpoint(save_dir / "older.pt")
    assert older.model.cfg.token_types == 0
    tokens = newer.tokens("the end")[None]
    assert torch.equal(newer.model.extract_features(tokens), older.model.extract_features(tokens))


def test_no_kernels_are_compiled_where_a_model_is_loaded(tmp_path: Path) -> None:
    """Only a training says first that Triton or its compiler is missing."""
    file = write_run(tmp_path, kernels="triton")
    assert str(load_checkpoint(file).model.cfg.kernels) == "fast"


def test_half_precision_weights_become_float32(save_dir):
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    halves = {name: tensor.bfloat16() for name, tensor in state["model"].items()}
    change_checkpoint(save_dir, "bf16.pt", model=halves)
    weights = load_checkpoint(save_dir / "bf16.pt").model.state_dict()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    torch.testing.assert_close(weights["embed_tokens.weight"], halves["embed_tokens.weight"].float(), rtol=0, atol=0)


def test_only_the_tokenizer_of_the_run_is_accepted(save_dir, tmp_path_factory):
    elsewhere, tokenizer = tmp_path_factory.mktemp("elsewhere"), small_tokenizer()
    FastTokenizer(tokenizer.model, tokenizer.special_tokens).save(elsewhere / "wrong")
    with pytest.raises(UserError, match=r"wrong is not the tokenizer that .*checkpoint_last\.pt was trained with"):
        load_checkpoint(save_dir, elsewhere / "wrong")
    (save_dir / "tokenizer").rename(elsewhere / "moved")
    with pytest.raises(UserError, match="name the tokenizer of the run with --tokenizer DIR"):
        load_checkpoint(save_dir)
    assert load_checkpoint(save_dir, elsewhere / "moved").num_updates == 7


def circle() -> list:
    content: list = []
    content.append(content)
    return content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(optimizer_history=[{}]), "does not say after how many updates"),
        (
            lambda state: state["cfg"]["model"].update(encoder_layers=3),
            r"lacks \d+ weights, such as discriminator\.layers\.2",
        ),
        (lambda state: state["model"].pop("embed_tokens.weight"), r"other\.pt does not contain a model of"),
        # Building it would need the settings of its own task.
        (
            lambda state: state["cfg"].update(model={"_name": "transformer_lm"}),
            "architecture 'transformer_lm', which is",
        ),
        (lambda state: state["cfg"].pop("task"), r"other\.pt is not a checkpoint of fairseq-train"),
        (lambda state: state["cfg"]["model"].update(dropout=10**400), r"contains a setting that no run has \(1000"),
        (lambda state: state["cfg"]["task"].update(data=circle()), "values|levels deep"),
    ],
)
def test_other_checkpoints_are_refused(save_dir, change, message):
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    change(state)
    torch.save(state, save_dir / "other.pt")
    with pytest.raises(UserError, match=message):
        load_checkpoint(save_dir / "other.pt")


def test_sections_of_a_namespace_are_read_as_dictionaries(save_dir):
    """As fairseq saves the settings of a run with flags in "args"."""
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    expected = load_checkpoint(save_dir)
    state["cfg"] = {name: argparse.Namespace(**section) for name, section in state["cfg"].items()}
    torch.save(state, save_dir / "other.pt")
    loaded = load_checkpoint(save_dir / "other.pt")
    assert (loaded.task, loaded.criterion, loaded.separator) == (expected.task, expected.criterion, None)


@pytest.mark.parametrize("objective", ["electra", "amos"])
def test_a_run_is_read_without_the_file_of_its_generator(objective: str, tmp_path: Path) -> None:
    """Features, export and fine-tuning use the discriminator alone; the commands that sample need the file, unchanged."""
    file = write_run(tmp_path / "generator", "mlm", **SMALLER) / "checkpoint_last.pt"
    deeper = write_run(tmp_path / "deeper", "amos") / "checkpoint_last.pt"
    files = f"{file}:{deeper}" if objective == "amos" else str(file)
    run = write_run(tmp_path / "run", objective, generator_checkpoint=files)
    state = torch.load(run / "checkpoint_last.pt", weights_only=True)
    loaded = load_checkpoint(run)
    inspection = inspect_text(loaded, TEXT, seed=1)
    assert inspection.depth_names == (["1"] if objective == "electra" else ["1_1", "1_2", "2_3", "4_4"])
    if objective == "amos":
        assert loaded.model.mixture.v.equal(state["model"]["mixture.v"])
    features = amos_fairseq.load(run)("the quick dog").states

    with pytest.raises(UserError, match=r"was not trained together with its generator, which is .*checkpoint_last.pt"):
        export(run, tmp_path / "other", part="generator")
    file.rename(tmp_path / "moved.pt")
    assert amos_fairseq.load(run)("the quick dog").states.equal(features)
    export(run, tmp_path / "exported")
    settings = model_settings(run, state["cfg"]["model"])
    task = SimpleNamespace(source_dictionary=dictionary_of(small_tokenizer()))
    fine_tuned = type(loaded.model).build_model(settings, task)
    fine_tuned.load_state_dict(dict(state["model"]))
    expected = loaded.model.extract_features(loaded.tokens(TEXT)[None])
    torch.testing.assert_close(fine_tuned.eval().extract_features(loaded.tokens(TEXT)[None]), expected)
    with pytest.raises(UserError, match=r"^--generator-checkpoint: .*generator/checkpoint_last.pt is missing: give"):
        inspect_text(load_checkpoint(run), TEXT, seed=1)
    add_settings(run, f"{objective}_tiny")
    (reported,) = read_runs([run])
    assert "checkpoint_last.pt is missing" in reported.notes[0]


def test_refusals(tmp_path: Path) -> None:
    mlm = write_run(tmp_path / "mlm", "mlm", **SMALLER)
    dictionary, other = (dictionary_of(small_tokenizer()) for _ in range(2))
    other.symbols[7] = "unlike"
    frozen = write_run(tmp_path / "frozen", "electra", generator_checkpoint=str(mlm / "checkpoint_last.pt"))
    rows = [
        (tmp_path / "nowhere.pt", dictionary, "nowhere.pt is missing"),
        (f"{mlm}:{tmp_path / 'nowhere.pt'}", dictionary, "nowhere.pt is missing"),
        (write_run(tmp_path / "tuned", "mlm", classes=2), dictionary, "tuned/.* 0 networks with an MLM head"),
        (write_run(tmp_path / "electric", "electric"), dictionary, "electric/.* 0 networks"),
        (frozen, dictionary, "frozen/.* 0 networks"),
        (write_run(tmp_path / "short", "mlm", max_positions=64), dictionary, "reads 64 tokens .* --max-positions 150"),
        (mlm, other, "has other tokens than the corpus"),
    ]
    for files, tokens, message in rows:
        with pytest.raises(UserError, match=f"^--generator-checkpoint: .*{message}"):
            load_generator(AmosConfig(generator_checkpoint=str(files), max_positions=150), tokens)
    (mlm / "tokenizer" / "dict.txt").unlink()
    with pytest.raises(UserError, match="has other tokens than the corpus, or no tokenizer beside it"):
        load_generator(AmosConfig(generator_checkpoint=str(mlm), max_positions=150), dictionary)
