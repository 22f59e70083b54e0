"""A model for longer sequences that starts from the weights of one for shorter ones."""

from typing import Any

import pytest
import torch
from small_models import small_amos, small_electra, small_electric, small_mlm, small_teams

BUILDERS = {
    "amos": small_amos,
    "electra": small_electra,  # generator and discriminator share their positions
    "electric": small_electric,
    "mlm": small_mlm,
    "teams": small_teams,
    "modern": lambda **settings: small_mlm(encoder="modernbert", **settings),  # without learned positions
}


@pytest.mark.parametrize("name", BUILDERS)
def test_positions_start_as_copies_and_short_texts_have_the_same_states(name: str) -> None:
    short, long = BUILDERS[name](max_positions=16), BUILDERS[name](max_positions=40)
    saved = short.state_dict()
    long.may_be_longer = True
    long.load_state_dict(dict(saved))
    tokens = torch.randint(4, 40, (3, 16), generator=torch.Generator().manual_seed(1))
    assert torch.equal(long.eval().extract_features(tokens), short.eval().extract_features(tokens))
    tables = {key: table for key, table in long.state_dict().items() if key.endswith("embed_positions.weight")}
    assert bool(tables) == (name != "modern")
    for key, table in tables.items():
        assert all(torch.equal(table[position], saved[key][position % 16]) for position in range(40))


@pytest.mark.parametrize(("here", "may_be_longer"), [(40, False), (8, True)])
def test_other_lengths_are_refused(here: int, may_be_longer: bool) -> None:
    """A run that continues has moments for its positions; a table that is too long has no row to leave out."""
    model: Any = small_electra(max_positions=here)
    model.may_be_longer = may_be_longer
    with pytest.raises(RuntimeError, match="embed_positions"):
        model.load_state_dict(small_electra(max_positions=16).state_dict())
