"""The ``amos`` command as users meet it: its help, its exit codes, one line on stderr."""

import sys

import pytest
from tiny_runs import ROOT, environment, run_process

from amos_fairseq.cli import main as command
from amos_fairseq.cli.main import main


def test_help_names_every_subcommand_and_nothing_else_is_printed():
    result = run_process([sys.executable, "-m", "amos_start", "--help"], env=environment({"PYTHONPATH": str(ROOT)}))
    assert (result.returncode, result.stderr) == (0, "")
    for subcommand in command.SUBCOMMANDS:
        name = subcommand.__name__.rpartition(".")[2].rstrip("_")  # import_: the word itself is Python's
        assert f"    {name} " in result.stdout


@pytest.mark.parametrize(
    ("subcommand", "defaults"),
    [
        ("report", {"--device": "cpu", "--out": "report.html"}),
        ("import", {"--from": "hugging-face"}),
        ("score", {"--batch-tokens": "2048", "--device": "cpu"}),
    ],
)
def test_help_of_a_subcommand_states_each_default(subcommand, defaults, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit_info:
        main([subcommand, "--help"])
    assert exit_info.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for flag, default in defaults.items():
        assert next(line for line in lines if line.strip().startswith(flag)).endswith(f"(default: {default})")
    assert not [line for line in lines if line.startswith("  --") and "(default: " not in line]


# A command that only prints, as its argument says.
PRINTING = """
import sys
import amos_start
amos_start.start()
from amos_fairseq.cli import main, recipes
def show(arguments):
    from rich.console import Console
    for _ in range(100):  # more than a pipe holds
        {"rich": Console().print, "python": print}[arguments.recipes[0]]("x" * 1000)
        sys.stdout.flush()
recipes.run = show
sys.argv[0] = "amos"
sys.exit(main.main())
"""


@pytest.mark.parametrize(
    ("library", "where", "code", "line"),
    [
        ("rich", ">/dev/full", 1, "amos_fairseq: error: the output cannot be written (No space left on device): make"),
        ("rich", "| head -n 1", 0, ""),
        ("python", "| head -n 1", 0, ""),
        ("python", "<&- >&- 2>&-", 0, ""),
    ],
)
def test_output_that_cannot_be_written(library, where, code, line, tmp_path):
    (tmp_path / "printing.py").write_text(PRINTING)
    shell = f'"{sys.executable}" printing.py recipes {library} {where}'
    variables = environment({"PYTHONPATH": str(ROOT)})
    result = run_process(["bash", "-o", "pipefail", "-c", shell], tmp_path, variables)
    assert result.returncode == code
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == bool(line)
