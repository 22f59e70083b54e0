"""The size of the package: ceilings, lowered with each change that makes it smaller.

A line of code is one that is not blank, and holds more than a comment or a docstring. Branches of a function: if, for, while,
except, case, conditional expressions, conditions of comprehensions, and operands of ``and`` and ``or`` after the first.
"""

import ast
import io
import tokenize

from tiny_runs import ROOT

FILES = list((ROOT / "amos_fairseq").rglob("*.py"))
MOST_LINES, MOST_FILES, MOST_RAISES, MOST_BRANCHES = 36_000, 195, 16.9, 20
MOST_LINES_OF_TESTS = 34_620
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def lines_of_code(text: str, tree: ast.Module) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def branches(function: ast.AST) -> int:
    counted = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
    total = 0
    for node in ast.walk(function):
        total += isinstance(node, counted)
        total += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        total += len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return total


def test_the_package_is_not_larger_than_it_was() -> None:
    code, raises, lines = 0, 0, 0
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        code, lines = code + lines_of_code(text, tree), lines + text.count("\n")
        raises += sum(isinstance(node, ast.Raise) for node in ast.walk(tree))
    assert lines <= MOST_LINES
    assert len(FILES) <= MOST_FILES
    assert 1000 * raises / code <= MOST_RAISES
    tests = sum(path.read_text(encoding="utf-8").count("\n") for path in (ROOT / "tests").rglob("*.py"))
    assert tests <= MOST_LINES_OF_TESTS


def test_functions_have_few_branches() -> None:
    large = {
        f"{path}: {node.name}": branches(node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and branches(node) > MOST_BRANCHES
    }
    assert large == {}
