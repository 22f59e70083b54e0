"""The README and docs: links, navigation, reference, and each command, which a test runs at small size (commands.yaml)."""

import ast
import importlib
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from fairseq import options
from source_imports import parsed
from tiny_runs import ROOT, run_process

from amos_fairseq.cli.main import build_parser
from amos_fairseq.cli.prepare import with_kind
from amos_fairseq.recipes import find_recipe
from amos_fairseq.recipes.composition import compose_with_hydra

SCRIPTS = [path for path in sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.sh")) if path.parts[0][0] != "."]
DOCUMENTS = sorted(path.relative_to(ROOT) for pattern in ("*.md", "docs/**/*.md") for path in ROOT.glob(pattern))
PAGES = [document for document in DOCUMENTS if document.parts[0] == "docs"]
RUN_BY = yaml.safe_load((Path(__file__).parent / "commands.yaml").read_text(encoding="utf-8"))
README_LINES = 90
# Folders at the top of a checkout; a path in backticks that starts with one must exist.
FOLDERS = ("amos_fairseq/", "docs/", "examples/", "preprocess/", "tests/")


@cache
def text_of(document: Path) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@cache
def commands(document: Path) -> list[list[str]]:
    """The commands of a document's bash blocks, as a shell would split them; continued lines are joined."""
    found: list[list[str]] = []
    for block in re.findall(r"^```bash\n(.*?)^```", text_of(document), flags=re.DOTALL | re.MULTILINE):
        unfinished = ""
        for line in block.replace("\\\n", " ").splitlines(keepends=True):
            unfinished += line
            try:
                found.append(shlex.split(unfinished, comments=True))
            except ValueError:
                continue  # a quotation that goes on in the next line
            unfinished = ""
        assert not unfinished, f"{document}: an open quotation in {block}"
    return [words for words in found if words]


def arguments_of(program: str, module: str | None = None) -> list[list[str]]:
    """What follows ``program``, or ``-m module`` (as under torchrun), wherever a command of a document holds it."""
    found = []
    for words in (words for document in DOCUMENTS for words in commands(document)):
        for position, word in enumerate(words):
            follows_a_flag = position > 0 and words[position - 1].startswith("--") and word != "amos"
            is_value = position > 0 and words[position - 1] in ("--criterion", "--recipe")
            is_program = Path(word).name == program and not follows_a_flag and not is_value
            if is_program or (module and words[position - 1 : position + 1] == ["-m", module]):
                found.append(words[position + 1 :])
    return found


def headings(document: Path) -> set[str]:
    """Anchors as GitHub and Python-Markdown make them of headings."""
    titles = re.findall(r"^#+ (.+)$", text_of(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_paths_and_scripts_exist(document: Path):
    """Links of docs stay in docs, because the site has no other files. x_: an objective that a reader is about to write."""
    missing = []
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)", text_of(document)):
        if "://" in target:
            continue
        path = (ROOT / document.parent / target).resolve() if target else ROOT / document
        in_docs = document not in PAGES or path.is_relative_to(ROOT / "docs")
        if not path.exists() or not in_docs or (anchor and anchor not in headings(path.relative_to(ROOT))):
            missing.append(f"{target}#{anchor}")
    named = [path for path in re.findall(r"`([\w./]+)`", text_of(document)) if path.startswith(FOLDERS)]
    missing += [path for path in named if not (ROOT / path).exists() and not re.search(r"[/_]x[_.]", path)]
    scripts = [word for words in commands(document) for word in words if word.endswith((".sh", ".py"))]
    assert missing + [script for script in scripts if not (ROOT / script).is_file()] == []


def test_readme_is_short_and_every_page_is_in_the_navigation():
    assert len(text_of(Path("README.md")).splitlines()) <= README_LINES
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to("docs")) for page in PAGES)
    tasks = [page for page in listed if not page.startswith("api/") and page != "index.md"]
    assert not [page for page in tasks if f"]({page})" not in text_of(Path("docs/index.md"))]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path):
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):  # the extra docs
        pytest.importorskip(module)
    result = run_process([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"])
    assert result.returncode == 0, result.stderr
    pages = [page.read_text(encoding="utf-8") for page in (tmp_path / "site" / "api").rglob("*.html")]
    assert len(pages) == len(list((ROOT / "docs/api").iterdir()))
    # Roles of Sphinx would show as they are typed.
    assert not [role for page in pages for role in re.findall(r":(?:class|func|meth|mod|attr|data):.{9}", page)]


@pytest.mark.parametrize("page", [page for page in PAGES if page.parts[1] == "api"], ids=str)
def test_names_of_the_reference_have_docstrings(page: Path):
    names = re.findall(r"^::: (\S+)$", text_of(page), re.MULTILINE)
    assert names
    for name in names:
        try:
            named = importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, attribute = name.rpartition(".")
            named = getattr(importlib.import_module(module), attribute)
        assert named.__doc__, name


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_scripts_are_valid_bash(script: Path):
    result = run_process(["bash", "-n", script])
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if commands(document)], ids=str)
def test_each_command_is_run_by_a_test_or_says_why_not(document: Path):
    for words in commands(document):
        command = " ".join(" ".join(words).split())
        runner = next((runner for pattern, runner in RUN_BY.items() if re.fullmatch(pattern, command)), None)
        assert runner, f"no entry of commands.yaml matches: {command}"
        if str(runner).startswith("not run"):
            assert "not run" in text_of(document).lower(), f"{document} does not say so: {command}"


def test_tests_that_run_commands_exist_and_no_entry_is_unused():
    spoken = {" ".join(" ".join(words).split()) for document in DOCUMENTS for words in commands(document)}
    for pattern, runner in RUN_BY.items():
        assert any(re.fullmatch(pattern, command) for command in spoken), f"unused: {pattern}"
        for test in runner if isinstance(runner, list) else [runner]:
            file, _, name = test.partition("::")
            if name:
                assert name in functions_of(file), test
            else:
                assert " " in test  # a reason


@cache
def functions_of(file: str) -> set[str]:
    return {node.name for node in ast.walk(parsed(ROOT / file)) if isinstance(node, ast.FunctionDef)}


def test_flags_of_fairseq_train_are_known():
    tasks = {}
    for arguments in arguments_of("fairseq-train", "fairseq_cli.train"):
        if "..." in arguments:
            continue  # a part of a command
        parser = options.get_training_parser()
        parsed = options.parse_args_and_arch(parser, input_args=arguments)
        tasks[parsed.data] = parsed.task
    assert tasks == {
        "DATA": "text_pretraining",
        "GLUE/CoLA": "sentence_prediction",
        "GLUE/RTE:GLUE/MRPC:GLUE/STS-B": "multi_task",
        "SQUAD": "squad",
        "RESULTS/data/classification-*": "text_classification",
    }


def test_configs_and_overrides_of_hydra_exist():
    given = [split_hydra(arguments) for arguments in arguments_of("fairseq-hydra-train", "fairseq_cli.hydra_train")]
    recipes = [(ROOT / flags["--config-dir"], flags["--config-name"], overrides) for flags, overrides in given]
    for command, *rest in arguments_of("amos"):
        if command == "train" and not rest[0].startswith("x_"):  # x_tiny: a reader is about to write it
            recipes.append((*find_recipe(rest[0]), [word for word in rest[1:] if "=" in word]))
    assert len(recipes) >= 6
    for config_dir, name, overrides in recipes:
        compose_with_hydra(name, overrides, config_dir)  # raises for a key that does not exist


def split_hydra(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """(flag: value) and the key=value overrides; switches such as --cpu take no value."""
    flags: dict[str, str] = {}
    overrides: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in ("--config-dir", "--config-name"):
            flags[word] = next(words)
        elif not word.startswith("-"):
            overrides.append(word)
    return flags, overrides


def test_amos_commands_are_accepted():
    given = [arguments for arguments in arguments_of("amos") if not {"...", "done"} & set(arguments)]  # parts, loops
    spoken = "prepare recipes train adapt report classify glue squad tag parse probe export import score verify"
    assert {arguments[0] for arguments in given} == set(spoken.split())
    for arguments in given:
        build_parser().parse_args(with_kind(arguments))  # exits for an unknown flag or a missing argument
