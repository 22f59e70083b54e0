"""Write the English prose of the documentation in a new environment: a corpus without a download.

Sources, in this order: the language reference (``pydoc_data.topics``), the docstrings of the standard library, and those of
every package that amos_fairseq needs. Sources are parsed with ``ast`` and never imported. One document is one source file
(or one chapter of the reference), one line is one paragraph, and a blank line separates documents; repeated paragraphs are
removed. The output does not depend on other installed packages or on the number of processes.

    python -m amos_fairseq.preprocess.pretraining.documentation_corpus --out FILE        (from the checkout)
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
from amos_fairseq.preprocess.common.check_environment import name_of, requirements
from amos_fairseq.preprocess.pretraining.prose import prose_paragraphs

# Tests and vendored copies repeat other text, and distributions differ in which of them they contain.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "testing", "_vendor", "idlelib", "lib2to3", "site-packages", "dist-packages"}
)


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
        raise UserError(f"the folder of --out {arguments.out} does not exist: create it first")
    documents = without_repetitions(documents_of(python_sources(), max(1, arguments.processes)))
    counts = write_corpus(documents, arguments.out)
    print("{:,} documents, {:,} paragraphs, {:,} words, {:,} bytes".format(*counts), f"in {arguments.out}")


if __name__ == "__main__":
    main()
