"""Names of the packaged recipes and variants, and of the variants that run other code than their base."""

import yaml

from amos_fairseq.recipes import RECIPES

RECIPE_NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
VARIANTS = sorted(f"variants/{path.stem}" for path in RECIPES.glob("variants/*.yaml"))


def runs_other_code(variant: str) -> bool:
    """Whether it sets a choice, a switch, or a weight to 0; other numbers lead through the code of its base."""
    stated = yaml.safe_load((RECIPES / f"{variant}.yaml").read_text(encoding="utf-8"))
    values = [value for group in ("model", "criterion") for value in stated.get(group, {}).values()]
    return any(isinstance(value, (bool, str)) or value == 0 for value in values)


# Of ELECTRA, Electric and TEAMS; tests/cuda/test_steps.py has the settings of AMOS on its smallest recipe.
WITH_OTHER_CODE = [name for name in VARIANTS if runs_other_code(name) and not name.startswith("variants/amos_")]
