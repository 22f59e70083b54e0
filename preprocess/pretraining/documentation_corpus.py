"""Write the English prose of the documentation that a fresh environment already holds: a corpus without a download.

Sources, in this order: the language reference (``pydoc_data.topics``), the docstrings of the standard library, those of
every package that amos_fairseq needs. Sources are read with ``ast`` and never imported. One document is one source file
(or one chapter of the reference), one line is one paragraph, a blank line separates documents; a paragraph seen before is
left out. The same environment gives the same bytes, whatever else is installed and for any number of processes.

    python -m preprocess.pretraining.documentation_corpus --out FILE        (from the checkout)
"""

import argparse
import ast
import importlib.metadata
import inspect
import os
import re
import sysconfig
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Iterable, Iterator

from packaging.requirements import Requirement
from tqdm import tqdm

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.files import whole_file
from preprocess.common.check_environment import name_of, requirements
from preprocess.pretraining.prose import prose_paragraphs

# Tests and vendored copies repeat what stands elsewhere, and distributions differ in which of them they ship.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "testing", "_vendor", "idlelib", "lib2to3", "site-packages", "dist-packages"}
)


def required_distributions() -> list[importlib.metadata.Distribution]:
    """Return everything that this package needs, directly or not and without extras, sorted by name.

    Where to begin is read from setup.py, because the package itself need not be installed.
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
    """Spell a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def python_sources() -> list[Path]:
    """Return the Python files to read: the standard library's, then each required distribution's, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted(path for path in library.rglob("*.py") if is_wanted(path.relative_to(library)))
    for distribution in required_distributions():
        files = sorted(str(file) for file in distribution.files or [] if file.suffix == ".py" and is_wanted(Path(file)))
        sources.extend(Path(str(distribution.locate_file(file))) for file in files)
    return sources


def is_wanted(path: Path) -> bool:
    """Tell whether a path, relative to its library, is outside the folders that are skipped."""
    return not SKIPPED_FOLDERS.intersection(path.parts) and ".." not in path.parts


def read_source(path: Path) -> list[list[str]]:
    """Return the documents of one Python file: its docstrings together, or each chapter of the language reference.

    A file that is not valid Python of this version (templates, data for tests) holds no documents.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the files of others
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        texts = [[chapter] for chapter in topic_chapters(tree)]
    else:
        texts = [documentation_of(tree)]
    return [[paragraph for text in document for paragraph in prose_paragraphs(text)] for document in texts]


def documentation_of(tree: ast.Module) -> list[str]:
    """Return, in the order of the file, its docstrings and the texts that it hands to functions like ``add_docstr``.

    The first are literals that stand alone, the second literals of several lines; neither keeps its indentation.
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
    """Return the texts of ``topics = {name: text, ...}``, read as a literal."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return [text for _, text in sorted(ast.literal_eval(statement.value).items())]
    return []


def without_repetitions(documents: Iterable[list[str]]) -> Iterator[list[str]]:
    """Leave out every paragraph whose letters were seen before, and documents that are then empty."""
    seen: set[str] = set()
    for document in documents:
        kept = []
        for paragraph in document:
            key = re.sub(r"[^a-z]", "", paragraph.lower())
            if key not in seen:
                seen.add(key)
                kept.append(paragraph)
        if kept:
            yield kept


def documents_of(sources: list[Path], processes: int) -> Iterator[list[str]]:
    """Read the sources side by side and yield their documents in the order of ``sources``, with a progress bar."""
    with ProcessPoolExecutor(processes) as pool:
        results = pool.map(read_source, sources, chunksize=32)
        for documents in tqdm(results, total=len(sources), desc="documentation", unit=" files", mininterval=1.0):
            yield from documents


def write_corpus(documents: Iterable[list[str]], target: Path) -> tuple[int, int, int, int]:
    """Write documents separated by blank lines; return the numbers of documents, paragraphs, words and bytes.

    Raises:
        UserError: ``target`` cannot be written, the disk is full; it is then as it was.
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


@report_user_errors()
def main() -> None:
    """Read the command line and write the corpus."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="text file to write")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes that read sources")
    arguments = parser.parse_args()
    if not arguments.out.parent.is_dir():
        raise UserError(f"the folder of --out {arguments.out} does not exist: make it first")
    documents = without_repetitions(documents_of(python_sources(), max(1, arguments.processes)))
    counts = write_corpus(documents, arguments.out)
    print("{:,} documents, {:,} paragraphs, {:,} words, {:,} bytes".format(*counts), f"in {arguments.out}")


if __name__ == "__main__":
    main()
