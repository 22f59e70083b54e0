"""The safe reading of checkpoints, and which ones are refused."""

import argparse

import pytest
import torch
from saved_models import write_checkpoint, write_save_dir

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.errors import UserError
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer


@pytest.fixture
def save_dir(tmp_path):
    return tmp_path


@pytest.fixture(autouse=True)
def tokenizer(save_dir):
    return write_save_dir(save_dir)


def test_lines_end_as_in_a_corpus(save_dir):
    """Line breaks of any system begin a new line; those of Unicode alone do not, as in amos prepare."""
    pretrained = load_checkpoint(save_dir)
    eos = pretrained.dictionary.eos()
    for ends, num_lines in (("\n", "\r\n", "\r"), 2), (("\u2028", "\x85", "\v"), 1):
        found = [pretrained.tokens(f"the dog{end}the fox").tolist().count(eos) for end in ends]
        assert found == [num_lines] * 3


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


def test_half_precision_weights_become_float32(save_dir, tokenizer):
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    halves = {name: tensor.bfloat16() for name, tensor in state["model"].items()}
    write_checkpoint(save_dir, tokenizer, "bf16.pt", model=halves)
    weights = load_checkpoint(save_dir / "bf16.pt").model.state_dict()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    torch.testing.assert_close(weights["embed_tokens.weight"], halves["embed_tokens.weight"].float(), rtol=0, atol=0)


def test_only_the_tokenizer_of_the_run_is_accepted(save_dir, tokenizer, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    tokenizer.save(elsewhere / "right")
    FastTokenizer(tokenizer.model, tokenizer.special_tokens).save(elsewhere / "wrong")
    with pytest.raises(UserError, match=r"wrong is not the tokenizer that .*checkpoint_last\.pt was trained with"):
        load_checkpoint(save_dir, elsewhere / "wrong")
    (save_dir / "tokenizer").rename(elsewhere / "moved")
    with pytest.raises(UserError, match="name the tokenizer of the run with --tokenizer DIR"):
        load_checkpoint(save_dir)
    assert load_checkpoint(save_dir, elsewhere / "right").num_updates == 7


def circle(times: int = 1) -> list:
    content: list = []
    content.extend([content] * times)
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
        (lambda state: state["cfg"].pop("task"), r"other\.pt does not say what was trained"),
        (lambda state: state["optimizer_history"][-1].update(num_updates=10**400), "does not say after how many"),
        (lambda state: state["cfg"]["model"].update(dropout=10**400), "contains a setting that no run has: 1000"),
        (lambda state: state["cfg"]["task"].update(data=circle()), "values|levels deep"),
        (lambda state: state["cfg"].update(more=argparse.Namespace(a=circle())), "values|levels deep"),
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
    state["cfg"] = {name: as_namespace(section) for name, section in state["cfg"].items()}
    torch.save(state, save_dir / "other.pt")
    loaded = load_checkpoint(save_dir / "other.pt")
    assert (loaded.task, loaded.criterion, loaded.separator) == (expected.task, expected.criterion, None)


def as_namespace(section: object) -> object:
    return argparse.Namespace(**section) if isinstance(section, dict) else section
