"""``amos_fairseq.load`` and the safe reading of checkpoints."""

import argparse

import pytest
import torch
from small_checkpoint import write_checkpoint, write_save_dir

import amos_fairseq
from amos_fairseq.checkpoints.read import load_pretrained
from amos_fairseq.errors import UserError
from amos_fairseq.tokenization.fast_tokenizer import FastTokenizer


@pytest.fixture
def save_dir(tmp_path):
    return tmp_path


@pytest.fixture(autouse=True)
def tokenizer(save_dir):
    return write_save_dir(save_dir)


def test_load_gives_an_encoder_whose_padding_changes_nothing(save_dir):
    encoder = amos_fairseq.load(save_dir / "checkpoint_last.pt")
    assert not any(module.training for module in encoder.modules())
    with torch.no_grad():
        both, alone = encoder(["the lazy dog jumps over the fox", "the end"]), encoder("the end")
    tokens = encoder.pretrained.tokens("the end")
    assert alone.tokens.tolist() == [tokens.tolist()]
    assert both.states.shape == (2, both.mask.sum(1).max(), 16)
    assert both.mask[1].tolist() == [True] * len(tokens) + [False] * (both.mask.size(1) - len(tokens))
    torch.testing.assert_close(both.states[1, both.mask[1]], alone.states[0])
    torch.testing.assert_close(alone.states, encoder.model.extract_features(tokens[None]))


def test_allow_list_of_torch_is_unchanged(save_dir):
    """fairseq's own loading in the same process relies on the one allow-list: leaving a narrower one must not empty it."""
    allowed = set(torch.serialization.get_safe_globals())
    load_pretrained(save_dir)
    assert set(torch.serialization.get_safe_globals()) == allowed
    assert argparse.Namespace in allowed


def test_lines_end_as_in_a_corpus(save_dir):
    """A line break of any system begins a new line; what only Unicode calls one stands inside a line, as in prepare.sh."""
    pretrained = load_pretrained(save_dir)
    eos = pretrained.dictionary.eos()
    assert [pretrained.tokens(f"the dog{end}the fox").tolist().count(eos) for end in ("\n", "\r\n", "\r")] == [2, 2, 2]
    assert [pretrained.tokens(f"the dog{end}the fox").tolist().count(eos) for end in ("\u2028", "\x85", "\v")] == [
        1,
        1,
        1,
    ]


def test_settings_added_later_have_their_defaults(save_dir):
    """A checkpoint of ``--arch amos_base`` names the architecture, and fairseq adds new fields to models only."""
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    settings = {name: value for name, value in state["cfg"]["model"].items() if name not in ("token_types", "_name")}
    torch.save(state | {"cfg": state["cfg"] | {"model": settings | {"_name": "amos_base"}}}, save_dir / "older.pt")
    newer, older = load_pretrained(save_dir), load_pretrained(save_dir / "older.pt")
    assert older.model.cfg.token_types == 0
    tokens = newer.tokens("the end")[None]
    assert torch.equal(newer.model.extract_features(tokens), older.model.extract_features(tokens))


def test_half_precision_weights_become_float32(save_dir, tokenizer):
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    halves = {name: tensor.bfloat16() for name, tensor in state["model"].items()}
    write_checkpoint(save_dir, tokenizer, "bf16.pt", model=halves)
    weights = load_pretrained(save_dir / "bf16.pt").model.state_dict()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    torch.testing.assert_close(weights["embed_tokens.weight"], halves["embed_tokens.weight"].float(), rtol=0, atol=0)


class Foreign:
    """An object whose loading would run code."""

    ran = False

    def __reduce__(self):
        return setattr, (Foreign, "ran", True)


def test_foreign_objects_are_refused_without_running_them(save_dir, tokenizer):
    write_checkpoint(save_dir, tokenizer, extra=Foreign())
    with pytest.raises(UserError, match="which is not loaded because it could run code"):
        load_pretrained(save_dir)
    assert not Foreign.ran


def test_only_the_tokenizer_of_the_run_is_accepted(save_dir, tokenizer, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    tokenizer.save(elsewhere / "right")
    FastTokenizer(tokenizer.model, tokenizer.special_tokens).save(elsewhere / "wrong")
    with pytest.raises(UserError, match=r"wrong is not the tokenizer that .*checkpoint_last\.pt was trained with"):
        load_pretrained(save_dir, elsewhere / "wrong")
    (save_dir / "tokenizer").rename(elsewhere / "moved")
    with pytest.raises(UserError, match="name the tokenizer of the run with --tokenizer DIR"):
        load_pretrained(save_dir)
    assert load_pretrained(save_dir, elsewhere / "right").num_updates == 7


def test_text_longer_than_max_positions_is_refused(save_dir):
    with pytest.raises(UserError, match=r"text 2 has \d+ tokens, the encoder reads 80: shorten or split it"):
        amos_fairseq.load(save_dir)(["the end", "the end " * 60])


def test_weights_of_another_model_are_refused(save_dir, tokenizer):
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    state["model"].pop("embed_tokens.weight")
    write_checkpoint(save_dir, tokenizer, model=state["model"])
    with pytest.raises(UserError, match=r"checkpoint_last\.pt does not contain a model of this package"):
        load_pretrained(save_dir)


def test_another_architecture_of_fairseq_is_refused_by_its_name(save_dir):
    """It would be built with the settings of its own task, which are not here."""
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    foreign = state["cfg"] | {"model": {"_name": "transformer_lm"}}
    torch.save(state | {"cfg": foreign}, save_dir / "other.pt")
    with pytest.raises(UserError, match=r"architecture 'transformer_lm', which is not one of this package"):
        load_pretrained(save_dir / "other.pt")


def test_checkpoint_without_number_of_updates_is_refused(save_dir):
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    torch.save(state | {"optimizer_history": [{}]}, save_dir / "other.pt")
    with pytest.raises(UserError, match=r"does not say after how many updates"):
        load_pretrained(save_dir / "other.pt")


def test_a_missing_layer_is_named(save_dir):
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    deeper = state["cfg"] | {"model": state["cfg"]["model"] | {"encoder_layers": 3}}
    torch.save(state | {"cfg": deeper}, save_dir / "other.pt")
    with pytest.raises(UserError, match=r"Missing key.*discriminator\.layers\.2"):
        load_pretrained(save_dir / "other.pt")
