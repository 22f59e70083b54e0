"""Write the English prose of the documentation in a new environment: a corpus without a download.

Sources, in this order: the language reference (``pydoc_data.topics``), the docstrings of the standard library, and those of
every package that amos_fairseq needs. Sources are parsed with ``ast`` and never imported. One document is one source file
(or one chapter of the reference), one line is one paragraph, and a blank line separates documents; repeated paragraphs are
removed. The output does not depend on other installed packages or on the number of processes.

    python examples/documentation_corpus.py --out FILE

Half of documentation is tables: parameter lists, examples, signatures. A language model trained on them learns punctuation.
So a paragraph is used only if it looks like sentences, and a doubtful one is dropped: there is enough text.
"""

import argparse
import ast
import importlib.metadata
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from check_environment import name_of, requirements
from packaging.requirements import Requirement
from tqdm import tqdm

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.files import whole_file

# Tests and vendored copies repeat other text, and distributions differ in which of them they contain.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "testing", "_vendor", "idlelib", "lib2to3", "site-packages", "dist-packages"}
)

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


def required_distributions() -> list[importlib.metadata.Distribution]:
    """Return all direct and indirect dependencies of this package without extras, sorted by name.

    The direct ones come from setup.py, because the package itself need not be installed.
    """
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [name_of(line) for line in requirements()]
    while waiting:
        current = canonical_name(waiting.pop())
        if current in found:
            continue
        try:
            found[current] = importlib.metadata.distribution(current)
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in found[current].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return [found[key] for key in sorted(found)]


def canonical_name(name: str) -> str:
    """Return a distribution's name in the form that package indexes compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def python_sources() -> list[Path]:
    """Return the Python files of the standard library, then of each required distribution, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted(path for path in library.rglob("*.py") if is_wanted(path.relative_to(library)))
    for distribution in required_distributions():
        files = sorted(str(file) for file in distribution.files or [] if file.suffix == ".py" and is_wanted(Path(file)))
        sources.extend(Path(str(distribution.locate_file(file))) for file in files)
    return sources


def is_wanted(path: Path) -> bool:
    """Return whether a path, relative to its library, is outside the folders that are skipped."""
    return not SKIPPED_FOLDERS.intersection(path.parts) and ".." not in path.parts


def read_source(path: Path) -> list[list[str]]:
    """Return the documents of one Python file: its docstrings together, or each chapter of the language reference.

    A file that is not valid Python of this version (templates, data for tests) contains no documents.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in third-party files
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        texts = [[chapter] for chapter in topic_chapters(tree)]
    else:
        texts = [documentation_of(tree)]
    return [[paragraph for text in document for paragraph in prose_paragraphs(text)] for document in texts]


def documentation_of(tree: ast.Module) -> list[str]:
    """Return the docstrings of a file and the texts that it passes to functions like ``add_docstr``, in order.

    The former are literals that are statements, the latter literals of several lines; their indentation is removed.
    """
    texts: dict[int, str] = {}
    for node in ast.walk(tree):
        literal = node.value if isinstance(node, ast.Expr) else node
        if not isinstance(literal, ast.Constant) or not isinstance(literal.value, str):
            continue
        if literal is not node or "\n" in literal.value:
            texts[literal.lineno] = inspect.cleandoc(literal.value)
    return [texts[line] for line in sorted(texts)]


def topic_chapters(tree: ast.Module) -> list[str]:
    """Return the texts of ``topics = {name: text, ...}``, evaluated as a literal."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return [text for _, text in sorted(ast.literal_eval(statement.value).items())]
    return []


def without_repetitions(documents: Iterable[list[str]]) -> Iterator[list[str]]:
    """Drop every paragraph whose letters were seen before, and documents that become empty."""
    seen: set[str] = set()
    for document in documents:
        new = []
        for paragraph in document:
            key = re.sub(r"[^a-z]", "", paragraph.lower())
            if key not in seen:
                seen.add(key)
                new.append(paragraph)
        if new:
            yield new


def documents_of(sources: list[Path], processes: int) -> Iterator[list[str]]:
    """Read the sources in parallel and yield their documents in the order of ``sources``, with a progress bar."""
    with ProcessPoolExecutor(processes) as pool:
        results = pool.map(read_source, sources, chunksize=32)
        for documents in tqdm(results, total=len(sources), desc="documentation", unit=" files", mininterval=1.0):
            yield from documents


def write_corpus(documents: Iterable[list[str]], target: Path) -> tuple[int, int, int, int]:
    """Write documents separated by blank lines; return the numbers of documents, paragraphs, words and bytes.

    Raises:
        UserError: ``target`` cannot be written, for example because the disk is full; it is unchanged.
    """
    num_documents = num_paragraphs = num_words = 0
    try:
        with (
            whole_file(str(target)) as unfinished,
            open(unfinished, "w", encoding="utf-8", errors="replace", newline="\n") as file,
        ):
            for document in documents:
                file.write("\n".join(document) + "\n\n")
                num_documents += 1
                num_paragraphs += len(document)
                num_words += sum(len(paragraph.split()) for paragraph in document)
            num_bytes = file.tell()
    except OSError as error:
        raise UserError(
            f"{target} cannot be written ({error.strerror}): make room there, or give another --out"
        ) from error
    return num_documents, num_paragraphs, num_words, num_bytes


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


@report_user_errors()
def main() -> None:
    """Read the command line and write the corpus."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="text file to write")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes that read sources")
    arguments = parser.parse_args()
    if not arguments.out.parent.is_dir():
        raise UserError(f"the folder of --out {arguments.out} does not exist: create it first")
    documents = without_repetitions(documents_of(python_sources(), max(1, arguments.processes)))
    counts = write_corpus(documents, arguments.out)
    print("{:,} documents, {:,} paragraphs, {:,} words, {:,} bytes".format(*counts), f"in {arguments.out}")


if __name__ == "__main__":
    main()
