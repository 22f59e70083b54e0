"""Tasks with labels: one folder a task, and what they share: the encoder with a head, runs, results and their table.

Here is which recipes there are, for commands that look for one before they import PyTorch.
"""

from pathlib import Path

from amos_fairseq.errors import UserError, explain_os_errors

RECIPES = Path(__file__).with_name("recipes")
SAMPLING_EXPONENT = 0.75  # of several tasks; thesis, section 3.3, from Bowman et al. (2018)
# Cross-view training on unlabeled sentences (CVT; thesis, chapter 4).
FULL, WORD_DROPOUT = "full", "word_dropout"
# View -> the direction of attention that gives the states that it reads.
DIRECTIONS = {"forward": "past", "backward": "future", "future": "past", "past": "future"}
TAGGING_VIEWS = (FULL, *DIRECTIONS)
# Of the word as a head, and of the word as a dependent (section 4.2.3).
PARSING_VIEWS = (FULL, *(f"{head}-{word}" for head in ("forward", "backward") for word in ("forward", "backward")))


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_file(name: str) -> Path:
    """Return the file of a built-in recipe, or the path that the user gives; refuse one that does not exist."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    with explain_os_errors(f"{path}", ": give the path of a .yaml file"):
        is_there = path.exists()
    if not is_there:
        known = ", ".join(recipe_names())
        raise UserError(f"there is no recipe {name}: give the path of a .yaml file or one of {known}")
    return path
