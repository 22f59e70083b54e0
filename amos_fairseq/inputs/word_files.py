"""Sentences of divided words, with labels or without: CoNLL-U, columns, tables of lists, and texts with spans of characters."""

import dataclasses
import itertools
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from amos_fairseq.errors import UserError
from amos_fairseq.inputs import TEXT_COLUMN
from amos_fairseq.inputs.files import CSV, FOLDER, JSONL, PARQUET, kind_of, print_what_was_read, read_lines
from amos_fairseq.inputs.raw_words import (
    INSIDE,
    UNSPACED,
    Ranges,
    is_blank,
    join_words,
    ranges_of_words,
    spaces_between,
)
from amos_fairseq.inputs.schemes import OUTSIDE
from amos_fairseq.inputs.tables import TableFile, require_columns

MANIFEST = "tagging.json"
# In the manifest. The second is there if words train in the raw text: some have no space between them; the third is the
# name of the training file if the dev sentences were chosen from it.
SEEN, RAW_TEXT, HELD_OUT, UNDIVIDED = "dev_sentences_in_train", "raw_text", "held_out", "undivided"
# Names of tasks, and so of folders in OUT of amos tag, begin with this: results of other benchmarks are not taken for these.
TASK_PREFIX = "tagging-"
UNLABELED = "unlabeled"  # the split of sentences without labels
WORD_ARRAYS = ("tokens", "word_start", "word_end")
_SPACES = re.compile(r"\s*")
WORD, LABEL = "word", "label"  # names of columns: in --columns the words; the last one where no names are given
CONLLU_NAMES = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
CONLLU, COLUMNS, LINES, ROWS = "CoNLL-U", "one word a line", "one sentence a line", "one sentence a row"
TEXTS, TEXT_LINES = "one text a row", "one text a line"
_SPANS = ("spans", "ents", "entities", "labels", "label")  # the columns of spans
FORMS = (
    "words are read from CoNLL-U, from columns (the word first and its label last, or --columns; a blank line after each "
    "sentence), and from JSON lines and Parquet with lists (tokens, tags) or a text and spans of its characters (text, "
    "label: [[start, end, label], ...]): docs/converting.md has commands for other files"
)
_OF_TEXT = (
    "raw text is read with --out SPANS.jsonl; else lines are sentences, with blank lines between all of them or none, or words "
    "with the columns that --columns names"
)
_LONGEST_FILE_OF_ONE = 200  # words of a file that may be a single sentence
_DOCUMENT_START = "-DOCSTART-"
_BLANKS = re.compile(r"[ \t]+")  # not str.split(), which also splits at a no-break space inside a word
_ID = re.compile(r"([0-9]+)(?:([-.])([0-9]+))?")
_NO_SPACE_AFTER = "SpaceAfter=No"

Lines = list[tuple[int, str]]  # numbered from 1


def is_column_name(name: str) -> bool:
    """Return whether this is a name such as upos, which can be part of the name of a folder."""
    return len(name) <= 100 and re.fullmatch(r"[\w.:+-]*\w[\w.:+-]*", name) is not None


@dataclass
class Sentence:
    """The words of a sentence, and its columns by name, each as long as ``words``.

    Attributes:
        spaces: whether a space follows each word in the text, and False for the last; None where the file does not say it.
        lines: the line of each word, or its row in a table.
        raw: the text as it was read; None for words that were read divided.
    """

    words: list[str]
    columns: dict[str, list[str]]
    spaces: list[bool] | None = None
    lines: Sequence[int] = field(default=(), compare=False, repr=False)
    raw: str | None = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        return join_words(self.words, self.spaces)

    def places(self) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, as it was read if it was, and the range of its characters that each word has."""
        text, ranges, end = self.text if self.raw is None else self.raw, [], 0
        for word in self.words:
            start = text.index(word, end)
            end = start + len(word)
            ranges.append((start, end))
        return text, ranges

    def without_blank_words(self) -> "Sentence":
        kept = [place for place, word in enumerate(self.words) if not is_blank(word)]
        if len(kept) == len(self.words):
            return self
        columns = {name: [labels[place] for place in kept] for name, labels in self.columns.items()}
        words, lines = [self.words[place] for place in kept], [self.lines[place] for place in kept]
        text = join_words([" " if is_blank(word) else word for word in self.words], self.spaces)
        return Sentence(words, columns, self.spaces and spaces_in(text, words), lines)


@dataclass
class WordFile:
    """The sentences of a file, one or more.

    Attributes:
        kind: how it was read.
        left_out: what is no word or sentence, and how many.
    """

    path: Path
    kind: str
    sentences: list[Sentence]
    left_out: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.sentences:
            raise UserError(f"{self.path} has no sentence: {FORMS}")

    @property
    def names(self) -> list[str]:
        return list(self.sentences[0].columns)

    def report(self, command: str = "prepare", column: str | None = None) -> None:
        """Print what was read, and the first sentence with its labels in ``column``."""
        first, num_words = self.sentences[0], sum(len(sentence.words) for sentence in self.sentences)
        shown, columns = first.text, []
        if column is not None:
            shown, columns = " ".join(map("/".join, zip(first.words, first.columns[column], strict=True))), [column]
        what = f"sentences of {num_words:,} words"
        print_what_was_read(self.path, self.kind, columns, len(self.sentences), self.left_out, shown, command, what)

    def divided(self, signs: str, whole: Collection[str]) -> "WordFile":
        """Return the file with words as `words_in` has them, where they were made of raw text."""
        raw = [(sentence.raw, sentence.lines[0]) for sentence in self.sentences if sentence.raw is not None]
        return dataclasses.replace(self, sentences=[words_in(*each, signs, whole)[0] for each in raw] or self.sentences)

    def label_column(self) -> str:
        """Return the name of the column of labels where the user gives none: upos, or the last one."""
        return "upos" if "upos" in self.names else self.names[-1]


def spaces_in(text: str, words: Sequence[str]) -> list[bool] | None:
    """Return whether a space follows each word in the text; None if it does not consist of these words and spaces."""
    spaces, place, text = [], 0, text.strip()
    for word in words:
        if not text.startswith(word, place):
            return None
        end = place + len(word)
        place = _SPACES.match(text, end).end()
        spaces.append(place > end)
    return spaces if place == len(text) else None


def count_labels(sentences: Sequence[Sentence], column: str) -> Counter[str]:
    return Counter(label for sentence in sentences for label in sentence.columns[column])


def join_unspaced_words(sentences: Sequence[Sentence]) -> None:
    """Where a file does not tell the spaces, take those of ``spaces_between``."""
    for sentence in sentences:
        if sentence.spaces is None:
            sentence.spaces = spaces_between(sentence.words)


def read_sentences(
    path: Path, names: Sequence[str] | None = None, column: str | None = None, labeled: bool = True, raw: bool = False
) -> WordFile:
    """Read sentences in any of these forms; text may be compressed. Words that look blank are left out.

    - CoNLL-U: ten columns separated by tabs, numbers first. Words are the syntactic ones, without ranges (``1-2``) and empty
      nodes (``1.1``). SpaceAfter=No, if it is in the file, tells where no space is.
    - One word a line and its labels, separated by tabs or else by blanks; a blank line after each sentence. The word is first,
      and the last column is called ``label``.
    - JSON lines, Parquet, or a folder of ``save_to_disk``: ``tokens`` (or ``words``) is a list, and so are the labels; or
      ``text`` has words between spaces and punctuation, and ``spans`` (or ``ents``, ``entities``, ``labels``, ``label``) has
      the labels of ranges of its characters.
    - Unless ``labeled``, one sentence a line with blanks between its words: if no line has a tab, and no two lines without a
      blank one between them follow each other, or all do.

    Unless ``labeled``, the sentences have no columns.

    Args:
        names: of all columns, with ``word`` among them, of a file with one word a line.
        column: the labels of a table, by default ``tags`` or ``ner_tags``, or those of spans.
        raw: a file that is no table and no CoNLL-U, and has no ``names``, has a text in each line, as tables have it in rows.
    """
    is_table = kind_of(path) in (JSONL, PARQUET, FOLDER)
    if names and (is_table or WORD not in names):
        raise UserError(f"{path}: --columns names all columns, with {WORD} among them, of a file with one word a line")
    if is_table:
        file = _read_table(path, column, labeled)
    else:
        blocks, num_marks = _read_blocks(path)
        if not names and _is_conllu(path, blocks):
            file = _read_conllu(path, blocks)
        elif raw and not names and kind_of(path) != CSV:
            file = WordFile(path, TEXT_LINES, [words_in(text, number)[0] for block in blocks for number, text in block])
        elif not labeled and not names and kind_of(path) != CSV and _has_a_sentence_a_line(blocks):
            sentences = [(n, _BLANKS.split(text.strip(" \t"))) for block in blocks for n, text in block]
            file = WordFile(path, LINES, [Sentence(words, {}, lines=[n] * len(words)) for n, words in sentences])
        else:
            file = _read_columns(path, blocks, names, labeled)
        file.left_out[f"lines with {_DOCUMENT_START}"] = num_marks
    return _without_blank_words(file, labeled)


def read_conllu(path: Path) -> WordFile:
    """Read a CoNLL-U file, with all of its words."""
    file = _read_conllu(path, _read_blocks(path)[0])
    join_unspaced_words(file.sentences)
    return file


def _without_blank_words(file: WordFile, labeled: bool) -> WordFile:
    sentences = [sentence.without_blank_words() for sentence in file.sentences]
    num_words, num_kept = (sum(len(sentence.words) for sentence in each) for each in (file.sentences, sentences))
    kept = [sentence for sentence in sentences if sentence.words not in ([], [_DOCUMENT_START])]
    if not labeled and file.kind != COLUMNS:  # which may be text: see refuse_other_form()
        kept = [dataclasses.replace(sentence, columns={}) for sentence in kept]
    join_unspaced_words(kept)
    left_out = {"blank words": num_words - num_kept, "sentences without words": len(sentences) - len(kept)}
    return WordFile(file.path, file.kind, kept, file.left_out | left_out)


def _read_blocks(path: Path) -> tuple[list[Lines], int]:
    """Return the lines between blank ones, and the number of lines with -DOCSTART-, which are left out like these."""
    blocks: list[Lines] = [[]]
    num_marks = 0
    for number, content in read_lines(path):
        for line in content.replace("\0", "").rstrip("\r\n").split("\r"):
            is_mark = line.startswith(_DOCUMENT_START)
            num_marks += is_mark
            if not is_mark and not is_blank(line):
                blocks[-1].append((number, line))
            elif blocks[-1]:
                blocks.append([])
    return [block for block in blocks if block], num_marks


def _has_a_sentence_a_line(blocks: Sequence[Lines]) -> bool:
    has_tab = any("\t" in line for block in blocks for _, line in block)
    return not has_tab and (len(blocks) == 1 or all(len(block) == 1 for block in blocks))


def _cells_of(line: str) -> list[str]:
    line = line.rstrip(" \t")
    return [cell.strip(" ") for cell in line.split("\t")] if "\t" in line else _BLANKS.split(line.strip(" "))


def _read_columns(path: Path, blocks: Sequence[Lines], names: Sequence[str] | None, labeled: bool) -> WordFile:
    if names is None:
        width = max(1 + labeled, len(_cells_of(blocks[0][0][1])) if blocks else 0)
        names = [WORD, *map(str, range(2, width)), *([LABEL] if width > 1 else [])]
    is_brat = path.suffix == ".ann"
    if kind_of(path) == CSV or is_brat or (len(blocks) == 1 and len(blocks[0]) > _LONGEST_FILE_OF_ONE):
        problem = f"has no blank line, so that its {len(blocks[0]):,} words are one sentence: put one after each"
        if is_brat:
            problem = "holds brat's spans without their text: write JSON lines with text and spans"
        if kind_of(path) == CSV:
            problem = "is CSV: make lists of a row for each word, with .ffill() if only the first has a number"
        raise UserError(f"{path} {problem} (docs/converting.md, Words)")
    sentences = []
    for block in blocks:
        rows = [_cells_of(line) for _, line in block]
        for (number, _), cells in zip(block, rows, strict=True):
            if len(cells) != len(names) or not all(cells):
                problem = f"{len(cells)} columns ({' '.join(cells):.60}), expected {', '.join(names)}"
                raise UserError(f"{path}, line {number}: {problem}: {FORMS if labeled else _OF_TEXT}")
        columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        sentences.append(Sentence(columns.pop(WORD), columns, lines=[number for number, _ in block]))
    return WordFile(path, COLUMNS, sentences)


def _is_conllu(path: Path, blocks: Sequence[Lines]) -> bool:
    first = next((line for block in blocks for _, line in block if not line.startswith("#")), "")
    cells = first.split("\t")
    has_ids = len(cells) == len(CONLLU_NAMES) and _ID.fullmatch(cells[0].strip(" ")) is not None
    return has_ids or ".conllu" in path.suffixes


class _Token(NamedTuple):
    """What the text has between spaces or signs: one word, or those of a range such as ``1-2``."""

    form: str
    has_space_after: bool
    words: list[str]


def _read_conllu(path: Path, blocks: Sequence[Lines]) -> WordFile:
    has_space_after = any(_NO_SPACE_AFTER in line for block in blocks for _, line in block)
    sentences = []
    for block in blocks:
        words, tokens = _read_conllu_block(path, block)
        if not words:
            continue
        columns = dict(
            zip(CONLLU_NAMES[1:], map(list, zip(*(cells[1:] for _, cells in words), strict=True)), strict=True)
        )
        spaces = _spaces_of_words(tokens) if has_space_after else None
        sentences.append(Sentence(columns["form"], columns, spaces, [number for number, _ in words]))
    return WordFile(path, CONLLU, sentences)


def _read_conllu_block(path: Path, block: Lines) -> tuple[list[tuple[int, list[str]]], list[_Token]]:
    """Return the words with the numbers of their lines, and the tokens."""
    words, ranges = [], {}
    for number, line in block:
        if line.startswith("#"):
            continue
        cells = [cell.strip(" ") for cell in line.split("\t")]
        word_id = _ID.fullmatch(cells[0])
        first, sign, last = word_id.groups() if word_id else (None, None, None)
        is_next = sign is not None or first == str(len(words) + 1)
        if len(cells) != len(CONLLU_NAMES) or not all(cells) or not is_next:
            expected = (
                f"expected word {len(words) + 1} in the ten columns of CoNLL-U, separated by tabs, none of them empty"
            )
            raise UserError(f"{path}, line {number}: {expected}, with a blank line after each sentence: {line!r:.60}")
        if sign == "-":
            ranges[first] = (last, cells)
        elif sign is None:
            words.append((number, cells))
    return words, _tokens([cells for _, cells in words], ranges)


def _tokens(words: Sequence[list[str]], ranges: dict[str, tuple[str, list[str]]]) -> list[_Token]:
    """Return the tokens of a sentence. ``ranges``: the id of the last word and the cells, by the id of the first word."""
    places = {cells[0]: place for place, cells in enumerate(words)}
    tokens, place = [], 0
    while place < len(words):
        last, cells = ranges.get(words[place][0], ("", words[place]))
        end = max(places.get(last, place), place) + 1
        is_joined = _NO_SPACE_AFTER in cells[9].split("|")
        tokens.append(_Token(cells[1], not is_joined, [word[1] for word in words[place:end]]))
        place = end
    return tokens


def _spaces_of_words(tokens: Iterable[_Token]) -> list[bool]:
    """Return whether a space follows each word. The words of a range that are not its characters, as de les for des, have
    spaces between them, so that each has a piece of its own."""
    spaces = []
    for token in tokens:
        spaces += [token.form != "".join(token.words)] * (len(token.words) - 1) + [token.has_space_after]
    return [*spaces[:-1], False]


def _read_table(path: Path, column: str | None, labeled: bool) -> WordFile:
    """Read a table with a row for each sentence: a list of words and one of labels that is as long, or a text with spans."""
    table = TableFile(path)
    lists = [name for name in ("tokens", "words") if name in table.columns]
    first = next(table.rows(lists))[1] if lists else {}
    has_words = any(_texts_in(first[name]) is not None for name in lists)  # Prodigy's and spaCy's tokens are objects
    spans_name = column or next((name for name in _SPANS if name in table.columns), None)
    if TEXT_COLUMN in table.columns and not has_words and (spans_name in table.columns or not labeled):
        return _read_spans(table, spans_name if labeled else None, column or LABEL)
    words_name = next(iter(lists), "tokens")
    label_name = column or next((name for name in ("tags", "ner_tags") if name in table.columns), "tags")
    names = [words_name, *([label_name] if labeled else [])]
    require_columns(table, names, f"{'choose the labels with --column; ' if labeled else ''}{FORMS}")
    sentences = []
    for number, row in table.rows(names):
        lists = {name: _texts_in(row[name]) for name in names}
        for name, texts in lists.items():
            if texts is None or len(texts) != len(lists[words_name]) or (name != words_name and not all(texts)):
                problem = f"{name} is no list of texts that is as long as {words_name}: {row[name]!r:.60}"
                raise UserError(f"{path}, row {number}: {problem}: {FORMS}")
        words = lists.pop(words_name)
        sentences.append(Sentence(words, lists, lines=[number] * len(words)))
    return WordFile(path, ROWS, sentences)


def words_in(text: str, number: int, signs: str = "", whole: Collection[str] = ()) -> tuple[Sentence, Ranges]:
    """Return a text as words that have no labels yet, and their ranges of characters; see ``ranges_of_words``."""
    ranges = ranges_of_words(text, signs, whole)
    spaces = [start > end for (_, end), (start, _) in itertools.pairwise([*ranges, *ranges[-1:]])]
    return Sentence([text[start:end] for start, end in ranges], {}, spaces, [number] * len(ranges), text), ranges


def undivided(sentences: Sequence[Sentence]) -> tuple[str, list[str]]:
    """Return for ``words_in`` the signs between letters that are inside of words, as in vice-president, more often than at
    their ends, as in ``'s`` (a full stop ends abbreviations, too); and the words that are divided nevertheless."""
    counts: Counter[str] = Counter()
    for sentence in sentences:
        text, ranges = sentence.places()
        ends = {place for each in ranges for place in each}
        for sign in INSIDE.finditer(text):
            counts[sign[0]] += -1 if ends & {*sign.span()} else 1
        counts.subtract("".join(word[0] + word[-1].strip(".") for word in sentence.words if len(word) > 1))
    signs = "".join(sorted(sign for sign, count in counts.items() if count > 0))
    words = {word for sentence in sentences for word in sentence.words if not UNSPACED.search(word) and " " not in word}
    return signs, sorted(word for word in words if len(words_in(word, 0, signs)[0].words) > 1)


def _read_spans(table: TableFile, spans_name: str | None, column: str) -> WordFile:
    """Read a text in each row, and the labels of its words (IOB) as ``column`` from the spans in ``spans_name``, if given, as
    doccano, Prodigy and spaCy write them. Rows of Prodigy that were not accepted are left out."""
    names = [name for name in (TEXT_COLUMN, spans_name, "answer") if name in table.columns]
    sentences, left_out, fits = [], Counter(), Counter()
    for number, row in table.rows(names):
        text, given = row[TEXT_COLUMN], row.get(spans_name) or []
        if spans_name and row.get("answer") in ("reject", "ignore"):
            left_out["rows whose answer is reject or ignore"] += 1
            continue
        is_text = isinstance(text, str) and isinstance(given, list)
        spans = [_parse_span(span, text) for span in given] if is_text else [None]
        if None in spans:
            problem = f"{text!r:.60} is no text, or {given!r:.60} no list of spans"
            if is_text:
                problem = f"{given[spans.index(None)]!r:.100} is not start, end and label of a span in a text of {len(text):,} "
                problem += "characters, counted from 0 (JavaScript counts an emoji twice), or its own text is not there"
            raise UserError(f"{table.path}, row {number}: {problem}: {FORMS}")
        sentence, ranges = words_in(text, number)
        if spans_name:
            sentence.columns[column] = _labels_of_words(ranges, spans, left_out)
            begins = {start for start, _ in ranges}
            fits.update(shift for start, _, _ in spans for shift in (0, 1) if start - shift in begins)
        sentences.append(sentence)
    if fits[1] > 2 * fits[0] + 2:
        raise UserError(f"{table.path}: {fits[1]:,} spans begin one character into a word: count characters from 0")
    return WordFile(table.path, f"{TEXTS}, spans in {spans_name}" if spans_name else TEXTS, sentences, left_out)


def _parse_span(span: Any, text: str) -> tuple[int, int, str] | None:
    own = span.get("text") if isinstance(span, dict) else None
    if isinstance(span, dict):
        span = [span.get("start", span.get("start_offset")), span.get("end", span.get("end_offset")), span.get("label")]
    if not isinstance(span, list) or len(span) != 3 or not all(type(place) is int for place in span[:2]):
        return None
    start, end, label = *span[:2], *(_texts_in(span[2:]) or [""])
    is_there = not isinstance(own, str) or own.split() == text[max(start, 0) : max(end, 0)].split()
    return (start, end, label) if label and 0 <= start <= end <= len(text) and is_there else None


def _labels_of_words(
    words: Sequence[tuple[int, int]], spans: Iterable[tuple[int, int, str]], left_out: Counter[str]
) -> list[str]:
    """Return the labels (IOB) of words, given as ranges of characters, and count in ``left_out``. A span is extended to the
    words that it cuts. Of overlapping ones the longest in words stays, or else the first (``filter_spans`` of spaCy)."""
    starts, ends = [start for start, _ in words], [end for _, end in words]
    labels, ranges = [OUTSIDE] * len(words), []
    for start, end, label in spans:
        first, last = bisect_right(ends, start), bisect_left(starts, end)
        if start == end or first == last:
            left_out["spans without a word"] += 1
        else:
            cut = (starts[first] < start) + (end < ends[last - 1])
            left_out["exact ends of spans inside of words (whole words are labeled)"] += cut
            ranges.append((first, last, label))
    for first, last, label in sorted(ranges, key=lambda span: (span[0] - span[1], span[0])):
        if any(given != OUTSIDE for given in labels[first:last]):
            left_out["spans that overlap another one (the longest stays)"] += 1
        else:
            labels[first:last] = [f"B-{label}", *[f"I-{label}"] * (last - first - 1)]
    return labels


def _texts_in(values: Any) -> list[str] | None:
    """Return a list of texts on one line each, without spaces around them; None for anything else."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return None
    texts = [value.strip() for value in values]
    return None if any(re.search(r"[\t\r\n]", text) for text in texts) else texts


def heads_of(path: Path, sentence: Sentence) -> list[int]:
    """Return the number of the head of each word of CoNLL-U, 0 for the root."""
    heads = sentence.columns["head"]
    for number, (line, word, head) in enumerate(zip(sentence.lines, sentence.words, heads, strict=True), start=1):
        # int() of very many digits fails.
        if not head.isdecimal() or len(head) > 9 or int(head) > len(heads) or int(head) == number:
            raise UserError(f"{path}, line {line}: the head {head!r:.20} of {word!r:.60} is no other word: correct it")
    return list(map(int, heads))
