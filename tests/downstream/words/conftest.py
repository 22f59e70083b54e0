"""Prepared columns of synthetic sentences; tests must not change them."""

import pytest
from synthetic_tagging import prepare_tagging


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Entities of 40 sentences."""
    return prepare_tagging(tmp_path_factory.mktemp("tagging"))


@pytest.fixture(scope="session")
def pos(tmp_path_factory):
    return prepare_tagging(tmp_path_factory.mktemp("pos"), "--column", "pos")
