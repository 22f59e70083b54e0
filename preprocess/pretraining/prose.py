"""Select the English prose in a documentation text, and remove its markup.

Half of documentation is tables: parameter lists, examples, signatures. A language model trained on them learns punctuation.
So a paragraph is used only if it looks like sentences, and a doubtful one is dropped: there is enough text.
"""

import re
from typing import Iterator

# Words that English sentences need; they are 35 to 50 % of all words in prose.
FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a about after all also an and any are as at be because been before being both but by can could do "
        "does each either for from given had has have how if in instead into is it its may more most must no "
        "not of on one only or other over same should since so some such than that the their them then there "
        "these they this to two under used until use using was we were what when where which while will with "
        "within without would you your",
    )
)
MIN_WORDS = 6
MIN_FUNCTION_WORDS = 0.2
MIN_PLAIN_WORDS = 0.8
MAX_SYMBOLS = 0.02

# A paragraph that begins like this belongs to a table, a list, an example or a directive, not to prose.
STARTS_UNLIKE_PROSE = re.compile(r">>>|\.\.|[-*+|:@#$%<({\[]|\d+[.)]")
# In a paragraph, these indicate code, formulas, signatures or key = value lines.
CODE_OR_FORMULA = re.compile(r">>>|[=<>]{2}|->|\\|\{|\}|\w\(\w*\)?.*=|[|^~]|\b\w+=\S|\bhttps?:|__\w|\w_$")
HEADING_LINE = re.compile(r"([-=~^*#\"'`+.])\1{2,}\s*$")
SENTENCE_END = re.compile(r"[.!?:]['\")]?$")
PLAIN_WORD = re.compile(r"[(\"']*[A-Za-z]+(?:['-][A-Za-z]+)*[.,;:!?)\"']*$")
SYMBOL = re.compile(r"[^\w\s.,;:!?'\"()-]")

# The text before the sentence in a list item ("- ", "2. ") or in a described parameter ("name (type): ").
ITEM = re.compile(r"(?:[-*+]|\d+[.)]|\(?[a-z]\)|:\w+ [\w* ]+:|[*\w.]+(?: ?\([^()]*\))?:)\s+(?=\S)")

ROLE = re.compile(r":[\w:+-]+:`~?([^`<]*?)(?:\s*<[^`>]*>)?`_?_?")
REFERENCE = re.compile(r"\s*\[[\w, -]*\]_")
QUOTED = re.compile(r"(``|`|\*\*)(?=\S)(.+?)(?<=\S)\1_?_?")


def prose_paragraphs(text: str) -> Iterator[str]:
    """Yield the prose of a documentation text, one unwrapped paragraph at a time, in order.

    Args:
        text: a docstring or a chapter whose common indentation is removed.
    """
    for lines in paragraphs_of_lines(text):
        paragraph = without_markup(" ".join(" ".join(lines).split()))
        if is_prose(paragraph):
            yield paragraph


def paragraphs_of_lines(text: str) -> Iterator[list[str]]:
    """Split a text at blank lines, headings, list items and changes of the indentation.

    The mark of a list item is removed; more deeply indented lines after it continue the item.
    """
    paragraph: list[str] = []
    indent, in_item = 0, False
    for line in text.splitlines():
        stripped = line.strip()
        underline = HEADING_LINE.match(stripped)
        if underline:
            paragraph = paragraph[:-1]  # the title that this line underlines
        item = ITEM.match(stripped)
        line_indent = len(line) - len(line.lstrip())
        continues_item = in_item and line_indent > indent and not item
        if not stripped or underline or item or (line_indent != indent and not continues_item):
            if paragraph:
                yield paragraph
            paragraph = []
        if stripped and not underline:
            paragraph.append(stripped[item.end() :] if item else stripped)
        if not continues_item:
            indent, in_item = line_indent, bool(item)
    if paragraph:
        yield paragraph


def without_markup(paragraph: str) -> str:
    """Remove the markup of reStructuredText and Markdown, but not the words inside it."""
    paragraph = REFERENCE.sub("", ROLE.sub(r"\1", paragraph))
    return re.sub(r"::$", ":", QUOTED.sub(r"\2", paragraph).replace("``", '"'))


def is_prose(paragraph: str) -> bool:
    """Return whether an unwrapped paragraph consists of English sentences.

    It must begin with a capital letter, end like a sentence, contain no code, and consist of plain words (MIN_PLAIN_WORDS),
    MIN_FUNCTION_WORDS of them function words: a list of names passes every test except the last.
    """
    words = paragraph.split()
    if len(words) < MIN_WORDS or not paragraph[0].isupper() or not SENTENCE_END.search(paragraph):
        return False
    if STARTS_UNLIKE_PROSE.match(paragraph) or CODE_OR_FORMULA.search(paragraph):
        return False
    plain = sum(bool(PLAIN_WORD.match(word)) for word in words)
    function_words = sum(word.strip("(\"'.,;:!?)").lower() in FUNCTION_WORDS for word in words)
    return (
        plain >= MIN_PLAIN_WORDS * len(words)
        and function_words >= MIN_FUNCTION_WORDS * len(words)
        and len(SYMBOL.findall(paragraph)) <= MAX_SYMBOLS * len(paragraph)
    )
