"""What the documents tell users to type and to open exists: links, scripts, commands with every flag and override."""

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest
from fairseq import options

import amos_fairseq  # noqa: F401  (registers what the commands name)
from amos_fairseq.cli.main import build_parser
from amos_fairseq.composition import compose_with_hydra

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path.relative_to(ROOT) for path in ROOT.rglob("*.sh") if not path.parts[len(ROOT.parts)].startswith(".")
)
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("README.md", "examples/**/*.md", "preprocess/**/*.md")
    for path in ROOT.glob(pattern)
)


def commands(document: Path) -> list[list[str]]:
    """The commands of a document's bash blocks, as a shell would split them; continued lines are joined."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found: list[list[str]] = []
    for block in re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
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


def arguments_of(document: Path, program: str, module: str | None = None) -> list[list[str]]:
    """What follows ``program``, or ``-m module`` (as under torchrun), wherever a command of the document holds it."""
    found = []
    for words in commands(document):
        for position, word in enumerate(words):
            follows_a_flag = position > 0 and words[position - 1].startswith("-")  # --criterion amos
            is_program = Path(word).name == program and not follows_a_flag
            if is_program or (module and words[position - 1 : position + 1] == ["-m", module]):
                found.append(words[position + 1 :])
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_relative_links_lead_somewhere(document: Path):
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text) if "://" not in target]
    missing = [target for target in targets if not (ROOT / document.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_scripts_are_valid_bash(script: Path):
    result = subprocess.run(["bash", "-n", str(ROOT / script)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_scripts_named_exist(document: Path):
    named = [word for words in commands(document) for word in words if word.endswith((".sh", ".py"))]
    assert not [word for word in named if not (ROOT / word).is_file()]


def test_readme_flags_of_fairseq_train_are_known():
    tasks = {}
    for arguments in arguments_of(Path("README.md"), "fairseq-train", "fairseq_cli.train"):
        parser = options.get_training_parser()
        parsed = options.parse_args_and_arch(parser, input_args=arguments)
        tasks[parsed.data] = parsed.task
    assert tasks == {"DATA": "text_pretraining", "GLUE/CoLA": "sentence_prediction"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_configs_and_overrides_of_hydra_exist(document: Path):
    given = arguments_of(document, "fairseq-hydra-train", "fairseq_cli.hydra_train")
    assert given or document != Path("README.md")
    for arguments in given:
        flags, overrides = split_hydra(arguments)
        name = flags["--config-name"]
        if name.startswith("x_"):
            continue  # the config of an objective that a reader is about to write
        compose_with_hydra(name, overrides, ROOT / flags["--config-dir"])  # raises for a key that does not exist


def split_hydra(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """(flag: value) and the key=value overrides; switches such as --multirun take no value."""
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
    given = arguments_of(Path("README.md"), "amos")
    assert {arguments[0] for arguments in given} == {
        "plot", "inspect", "glue", "squad", "export", "import", "score", "flops", "bench",
    }  # fmt: skip
    for arguments in given:
        build_parser().parse_args(arguments)  # exits for an unknown flag or a missing argument


@cache
def help_of(script: str) -> str:
    """What a script of preprocess/ prints for --help."""
    return subprocess.run(["bash", script, "--help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_flags_of_preprocess_are_in_its_help(document: Path):
    given = {
        (script, flag)
        for words in commands(document)
        for position, script in enumerate(words)
        if script.startswith("preprocess/") and script.endswith(".sh")
        for flag in words[position + 1 :]
        if flag.startswith("--")
    }
    assert given or document != Path("README.md")
    assert not [pair for pair in given if not re.search(rf"{re.escape(pair[1])}\b", help_of(pair[0]))]
