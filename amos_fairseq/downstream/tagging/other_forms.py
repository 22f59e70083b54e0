"""Forms of labeled words that are not read, and how to convert them."""

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from amos_fairseq.errors import UserError

_SAVE_TABS = "header=None, dtype=str, keep_default_na=False, skip_blank_lines=False).to_csv(NEW, sep='\\t', quoting=3, "
_SAVE_LISTS = (
    "table = pandas.read_csv(FILE); table['tokens'] = table.SENTENCE.str.split() (a list: .map(ast.literal_eval)); "
    "table['ner_tags'] = table.TAGS.map(ast.literal_eval); "
    "table[['tokens', 'ner_tags']].to_json('NEW.jsonl', orient='records', lines=True)"
)
# The pattern of most lines, the name of the form, and the advice.
_FORMS = [
    (
        r"[TREAMN*#][0-9]*\t\S+( [0-9]+ [0-9; ]+\t| \w+:T[0-9]| T[0-9])",
        "an annotation of brat",
        "brat's tools/anntoconll.py FILE.txt writes words; give --columns ner,start,end,word --column ner for these",
    ),
    (r"[0-9]+-[0-9]+(\.[0-9]+)?\t[0-9]+-[0-9]+\t", "WebAnno TSV", "export it as CoNLL 2002"),
    (
        r"\s*\( ?\(?[A-Z]+[^\s()]* ",
        "a bracketed tree",
        "convert trees to a column of tags, for example with nltk's Tree.pos()",
    ),
    (r""".*"\[ *['"]""", "CSV with lists", f"write JSON lines: {_SAVE_LISTS}"),
    (
        r"[^\s/]+/\S+( +[^\s/]+/\S+)*\s*$",
        "word/tag",
        r"write one a line, for example with sed -E 's:/([^/ ]+)( |$):\t\1\n:g' FILE > NEW",
    ),
]
for separator in ",;|":
    pattern = rf"[^\s{separator}]*([{separator}][^\s{separator}]*)+\s*$"
    advice = f"write tabs: pandas.read_csv(FILE, sep='{separator}', {_SAVE_TABS}header=False, index=False)"
    _FORMS.append((pattern, "CSV", advice))
_NUMBER_OF_SENTENCE = re.compile(r"(sentence[: _-]*)?[0-9]+", re.IGNORECASE)
_NAME_OF_NUMBER = re.compile(r"sent(ence)?[ _]?(#|id|idx|no|nr|number)", re.IGNORECASE)


def refuse_other_forms(path: Path, lines: Sequence[str], first_cells: Sequence[str]) -> None:
    """Raise :class:`UserError` if most ``lines``, or their first cells, have one of these forms."""
    for pattern, name, advice in _FORMS:
        if 2 * sum(re.match(pattern, line) is not None for line in lines) > len(lines):
            raise UserError(f"{path}: {lines[0]!r:.60} is {name}: {advice}")
    numbers = [number for number, _ in groupby(filter(None, first_cells[1:]))]
    are_numbers = len(set(numbers)) == len(numbers) and all(map(_NUMBER_OF_SENTENCE.fullmatch, numbers))
    if _NAME_OF_NUMBER.fullmatch(first_cells[0]) or (are_numbers and 0 < 2 * len(numbers) < len(first_cells)):
        cut = r"\t" if "\t" in lines[0] else " "
        awk = f"""awk -F'{cut}' '$1 != "" && $1 != n {{print ""; n = $1}} {{sub(/^[^{cut}]*{cut}/, ""); print}}' FILE > NEW"""
        raise UserError(f"{path}: column 1 numbers the sentences: write blank lines instead: {awk}")
