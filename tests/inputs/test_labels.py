"""What the labels of a column are, by hand: classes, sets of labels, numbers, missing values, and columns in doubt."""

import json
import math
from decimal import Decimal

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.labels import (
    check_lists,
    infer_kind,
    is_missing,
    missing_words,
    name_of,
    number_of,
    parse_label,
)

NUMBERS = {"0": 0.0, "-1": -1.0, "+2.50": 2.5, " 3. ": 3.0, ".5": 0.5, "1e-05": 1e-05, "1.5E+02": 150.0}
NUMBERS |= {7: 7.0, 2.25: 2.25, Decimal("1.5"): 1.5}
# Python's float reads all of these strings.
NAMES = ("1_1", "1E1", "2e5", "inf", "-Infinity", "nan", "\u0661", "\u0663.\u0665", "007", "-01", "00.5")
OTHERS = ("", ".", "1,5", "1 2", "0x1", "1e+999", "\u22121", True, None, [1], math.inf)


def test_numbers_and_names():
    assert {spelled: number_of(spelled) for spelled in NUMBERS} == NUMBERS
    assert [name for name in (*NAMES, *OTHERS) if number_of(name) is not None] == []
    assert all(map(float, NAMES))


KINDS = {
    "names": (["good", "bad"], "classes"),
    "names that Python reads as numbers": (["1_1", "1E1", "inf", "0x1", "\u0661"] * 2, "classes"),
    "booleans": ([True, False, True], "classes"),
    "two of a table": (["1", "0"], "classes"),
    "stars": ([*"12345"] * 2, "classes"),
    "sentiment": ([-1, 1, 1, -1], "classes"),
    "codes of few classes": (["100", "250", "999"] * 3, "classes"),
    "20 numbers": ([*range(20), 7], "classes"),
    "one name": (["1"], "classes"),
    "21 numbers, three rows each": ([str(number % 21) for number in range(63)], "classes"),
    "Banking77": ([number % 77 for number in range(231)], "classes"),
    "CLINC150, from 1 on": ([str(1 + number % 150) for number in range(600)], "classes"),
    "similarities": (["0.0", "2.75", "5.0", "2.75"], "number"),
    "small numbers": (["1e-05", "2e-05"], "number"),
    "lists": ([["a"], []], "labels"),
}
DOUBTS = {
    "prices": [str(37 * number % 1000 + 100) for number in range(300)],
    "ages": [18 + number % 60 for number in range(600)],
    "grades from 1 to 100": [str(1 + number % 100) for number in range(1000)],
    "numbers of rows": list(range(500)),
    "years": [str(1990 + number % 31) for number in range(620)],
    "ranks": ["1", "2", "3"],
    "scores and a word": ["1.5", "2.25", "?", "3.75"],
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_that_are_inferred(name):
    labels, kind = KINDS[name]
    assert infer_kind(labels, "t.csv") == kind


@pytest.mark.parametrize("name", DOUBTS)
def test_in_doubt_the_kind_is_asked_for(name):
    with pytest.raises(UserError, match=r"^t\.csv: whether the labels are classes or numbers.*: give --kind classes"):
        infer_kind(DOUBTS[name], "t.csv")


def test_decimal_commas_are_named():
    with pytest.raises(UserError, match=r"the labels have commas, spaces or %, such as '0,5': write numbers as"):
        infer_kind(["0,5", "1,25", "2"], "t.csv")
    with pytest.raises(UserError, match=r"the labels have commas, spaces or %, such as '1.u202f000'"):
        infer_kind(["1\u202f000", "12 500", "999"], "t.csv")
    with pytest.raises(ValueError, match="write it with a decimal point"):
        parse_label("0,5", "number", ",")
    assert infer_kind(["a,b", "0,5"], "t.csv") == infer_kind(["a%", "5%"], "t.csv") == "classes"


def test_numbers_that_the_user_asks_for():
    assert [parse_label(label, "number", ",") for label in ("1E1", "007", " -2 ", 3, 1e30)] == [10, 7, -2, 3, 1e30]
    for label in ("1_1", "inf", "nan", "0x1", "\u0661", "1e999", "", "1-2", True, "free"):
        with pytest.raises(ValueError, match="is not a finite number"):
            parse_label(label, "number", ",")
    with pytest.raises(UserError, match="a label is infinite"):
        infer_kind([1.0, math.inf, 2.0], "t.parquet")


def test_missing_values():
    """A blank, none and what databases, pandas and Excel write; words that may be names are missing beside numbers alone."""
    missing = [None, math.nan, "", " \t", "\\N", "NULL", "null", " NaN ", "nan", "<NA>", "#N/A"]
    assert all(map(is_missing, missing))
    assert not any(map(is_missing, ["NA", "None", "n/a", "0", 0, False, "Null Island", "inf", []]))
    beside_numbers = ["1", "2", "NA", "nan"], ["1.5", "N/A", None]
    for labels in (*beside_numbers, ["against", "None"], ["NA", "EU"], ["None", "NULL"], ["007", "NA"]):
        words = missing_words(labels, None)
        assert {"NA", "N/A", "None"}.isdisjoint(words) == (labels not in beside_numbers), labels
        assert "\\N" in words
    assert "NA" in missing_words(["free", "NA"], "number")


def test_names_of_classes():
    values = (1.0, "1.00", " a ", True, 0, "01", "1.5", "-2.0", "1_1")
    assert list(map(name_of, values)) == ["1", "1", "a", "true", "0", "01", "1.5", "-2", "1_1"]
    assert parse_label(["b", None, "a", "nan", "b"], "labels", ",") == ["b", "a"]
    joined = ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\u0915\u094d\u200d\u0937"]
    joined += ["\U0001f3f3\ufe0f\u200d\U0001f308"]
    assert parse_label([*joined, "New\xa0York"], "labels", ",") == [*joined, "New York"]
    for name in ("a\u200b", "\u200da", "a\u200c", "a\ufeffb", "a\u202eb", "a\x1bb"):
        with pytest.raises(ValueError, match=r"has the invisible character U\+"):
            parse_label(name, "classes", ",")
    assert parse_label("\\N", "labels", ",") == []
    for value in ({"id": 1}, [["a"]]):
        with pytest.raises(ValueError, match="an object, or a list of lists"):
            parse_label(value, "labels", ",")


def test_lists_of_numbers_are_no_labels():
    """One zero or one for each label, and probabilities; numbers of labels are names of labels."""
    for lists in ([[0, 1, 0], [1, 0, 0]], [[True, False]], [[1.0, 0.0], [0.0, 1.0]], [[0.2, 0.8], [1, 0]]):
        with pytest.raises(UserError, match="its lists are numbers, such as"):
            check_lists(lists, "t.jsonl")
    for lists in ([[0, 1], [1]], [[27], [3]], [[1], [0]], [["a"], []], [[], []], ["a,b", "c"]):
        check_lists(json.loads(json.dumps(lists)), "t.jsonl")
