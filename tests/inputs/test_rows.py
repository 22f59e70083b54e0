"""What the labels of a column are, by hand: classes, sets of labels, numbers, and their names."""

import math

import pytest

from amos_fairseq.inputs.rows import infer_kind, is_missing, name_of, number_of, parse_label, sorted_names

NUMBERS = {"0": 0.0, "-1": -1.0, "+2.50": 2.5, " 3. ": 3.0, ".5": 0.5, "1e-05": 1e-05, 7: 7.0, 2.25: 2.25, "007": 7.0}
NAMES = ("inf", "-Infinity", "nan", "", ".", "1,5", "1 2", "0x1", "1e+31", "\u22121", True, None, [1], math.inf, "NA")


def test_numbers_and_names():
    assert {spelled: number_of(spelled) for spelled in NUMBERS} == NUMBERS
    assert [name for name in NAMES if number_of(name) is not None] == []


KINDS = {
    "names": (["good", "bad"], "classes"),
    "booleans": ([True, False, True], "classes"),
    "two of a table": (["1", "0"], "classes"),
    "sentiment": ([-1, 1, 1, -1], "classes"),
    "prices without cents": ([str(37 * number % 1000) for number in range(300)], "classes"),
    "a number and a word": (["1.5", "2.25", "?"], "classes"),
    "whole numbers beside a missing one": ([1.0, 0.0], "classes"),
    "similarities": (["0.0", "2.75", "5.0"], "number"),
    "small numbers": (["1e-05", "2e-05"], "number"),
    "lists": ([["a"], []], "labels"),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_that_are_inferred(name):
    labels, kind = KINDS[name]
    assert infer_kind(labels) == kind


def test_missing_values():
    """A blank, null and nan of a format; words are no missing values."""
    assert all(map(is_missing, [None, math.nan, "", " \t", "\u200b"]))
    assert not any(map(is_missing, ["NA", "None", "nan", "NULL", "\\N", "0", 0, False, []]))


def test_names_of_classes():
    assert sorted_names({"10", "9", "-1.5"}) == ["-1.5", "9", "10"]
    assert sorted_names({"nan", "10", "9"}) == ["10", "9", "nan"]
    values = (1.0, "1.00", " a ", True, 0, "01", "1.5", "-2.0", "New\xa0York", "a\tb", "e\u0301")
    assert list(map(name_of, values)) == ["1", "1", "a", "true", "0", "01", "1.5", "-2", "New York", "a b", "\u00e9"]
    assert name_of("a\u200b") == "a\ufffd"
    assert parse_label(["b", None, "a", "", "b", 1.0], "labels", ",") == ["b", "a", "1"]
    assert parse_label("a; b;a;", "labels", ";") == ["a", "b"]
    assert parse_label("", "labels", ",") == parse_label(None, "labels", ",") == []
    assert parse_label("1e1", "number", ",") == 10
    for value, kind in (({"id": 1}, "classes"), ([["a"]], "labels"), (["a"], "classes"), ("free", "number")):
        with pytest.raises(ValueError, match="the label"):
            parse_label(value, kind, ",")
