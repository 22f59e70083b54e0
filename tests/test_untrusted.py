"""Files, JSON, numbers and names of strangers: what is accepted, and the one line of what is refused."""

import collections
import json
import math
import os
from argparse import Namespace

import pytest

from amos_fairseq import untrusted
from amos_fairseq.errors import UserError
from amos_fairseq.untrusted import finite_number, parse_json, plain_name, read_json, values_in, whole_number


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    "text", ["{}", '{"a": [1, 2.5, -1e308, null, true, "\\u00e9"]}', nested(99), '{"a": %s}' % 10**30]
)
def test_json_is_read_as_python_reads_it(text, tmp_path):
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    assert read_json(tmp_path / "a.json", "hint") == json.loads(text)
    assert parse_json(f"[{text}]", list) == [json.loads(text)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        (b"\xff", "is not UTF-8 text"),
        ("[]", "contains [], not an object"),
        ('"x"', "contains 'x', not"),
        (nested(101), "has more than 100 levels"),
        ('{"a": %s}' % ("9" * 400), "has 99999999999999999999, which is not a finite number"),
        ('{"a": 1e309}', "1e309, which is not a finite number"),
        ('{"a": NaN}', "has NaN, which is not"),
        ('{"b": {"a": 1, "a": 1}}', "has the key 'a' twice"),
        (json.dumps("x" * 10**5), "contains 'xxxx"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_json_is_refused(text, reason, tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as refused:
        read_json(file, "get another")
    assert str(refused.value).startswith(f"{file} ")
    assert str(refused.value).endswith(": get another")
    assert reason in str(refused.value)
    assert len(str(refused.value)) - len(str(file)) < 200


def test_of_equal_keys_the_last_counts_in_files_of_hugging_face(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1, "b": {"c": 2, "c": 3}, "a": 4}')
    assert read_json(tmp_path / "a.json", "hint", **untrusted.LAST_KEYS) == {"a": 4, "b": {"c": 3}}


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "lost").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(101))
    for name, reason in (
        ("folder", "is a folder, not a file"),
        ("circle", "cannot be read (Too many levels"),
        ("missing", "is missing"),
        ("lost", "is a link to a file that does not exist"),
        ("pipe", "is a pipe or a device"),
        ("a\0b", "cannot be read"),
        ("large", "is too large (101 bytes; at most 100 are read)"),
        ("x" * 300, "cannot be read (File name too long)"),
        ("folder/large/x", "is missing"),
        ("large/x", "cannot be read (Not a directory)"),
    ):
        with pytest.raises(UserError) as refused:
            untrusted.read_bytes(tmp_path / name, "get another", largest=100)
        assert reason in str(refused.value), name
    assert read_json(tmp_path / "missing", "hint", optional=True) is None
    assert read_json(tmp_path / "large" / "x", "hint", optional=True) is None
    with pytest.raises(UserError):
        read_json(tmp_path / "lost", "hint", optional=True)


def test_every_value_is_visited_and_circles_end(monkeypatch):
    monkeypatch.setattr(untrusted, "MOST_VALUES", 1000)
    assert list(values_in({"a": [1, (2,)], "b": Namespace(c="x")}))[3:] == [1, (2,), "x", 2]
    circle: list = [1]
    circle += [circle, circle]
    tower: list = [1]
    deep: list = []
    for level in range(101):
        tower, deep = [tower] * 10 if level < 50 else tower, [deep]
    for content, reason in ((circle, "values"), (tower, "values"), (deep, "levels")):
        with pytest.raises(ValueError, match=reason):
            collections.deque(values_in(content), maxlen=0)
    seen = []
    with pytest.raises(ValueError, match="values"):
        seen.extend(values_in([[0] * 900] * 900))
    assert len(seen) <= 2, "the limit holds before a level is collected, not after it"


def test_numbers_have_a_range():
    assert [finite_number(5), finite_number(0.5, 0, 1), whole_number(7, 1, 7)] == [5.0, 0.5, 7]
    for check, value, limits in (
        *((finite_number, value, ()) for value in (True, "5", None, math.nan, -math.inf, 10**400)),
        *((whole_number, value, ()) for value in (True, "5", None, 1.0, -1, 2**53 + 1)),
        (finite_number, 1.5, (0, 1)),
        (whole_number, 8, (1, 7)),
    ):
        with pytest.raises(ValueError, match="is not"):
            check(value, *limits)


def test_names_can_be_printed_and_stored():
    for good in ("a", "dense.weight", "Å ñ 漢字", "a b"):
        assert plain_name(good) == good
    for bad in (5, None, ["a"], "", "x" * 1001, "a\0b", "a\x1b[31m", "a\nb", "\x9b", "\ud800"):
        with pytest.raises(ValueError, match="is not a printable") as refused:
            plain_name(bad)
        assert len(str(refused.value)) < 200
        assert str(refused.value).isprintable()


WRONG_YAML = ["a: [", "[" * 20_000, "a: &x 5\nb: *x", "a: &x [*x]", "!!python/object:os.system {}", "a: 2000-99-99"]
WRONG_YAML += ["\0", "\ud800", "? [1]\n: 2", "a: 1\nb: 2\na: 3"]
WRONG_YAML += ["a: 1" + "0" * 5000, "# " + "x" * (1 << 20)]


@pytest.mark.parametrize("text", WRONG_YAML, ids=lambda text: text[:20])
def test_yaml_that_is_refused(text, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(text, errors="surrogatepass")
    with pytest.raises(UserError, match=r"a\.yaml .*: hint$") as refusal:
        untrusted.read_yaml(path, "hint")
    assert len(str(refusal.value)) < 600
    assert "\n" not in str(refusal.value)


def test_yaml_is_read_as_it_is(tmp_path):
    """Interpolations too: a variable of the environment is not looked up."""
    (tmp_path / "a.yaml").write_text("a: {b: [1, x]}\nc: ${oc.env:HOME}")
    assert untrusted.read_yaml(tmp_path / "a.yaml", "hint") == {"a": {"b": [1, "x"]}, "c": "${oc.env:HOME}"}
