"""The user's own tables beside GLUE's tasks: the YAML of ``amos glue --own-tasks``."""

import re
from pathlib import Path
from typing import Any

from amos_fairseq.downstream.texts.glue.tasks import TASKS
from amos_fairseq.downstream.texts.prepare import TABLE_OPTIONS
from amos_fairseq.errors import UserError
from amos_fairseq.inputs.rows import KINDS, Tables
from amos_fairseq.untrusted import read_yaml

# Results and heads have the names of tasks; multi and average are those of all tasks together.
TAKEN = {"multi", "average", *map(str.lower, TASKS)}
HINT = "give names and the options of amos classify, such as 'reviews: {train: reviews.tsv, label: stars}'"


def read_own_tasks(file: Path) -> dict[str, Tables]:
    """Read the tasks: a YAML of names and the options of ``amos classify`` for each.

    ::

        reviews: {train: reviews.tsv, dev: dev.tsv, text: [text], label: stars, kind: number}

    Paths are relative to the YAML; everything but ``train`` may be left out, as for the command.
    """
    content = read_yaml(file, HINT)
    if not isinstance(content, dict) or not content:
        raise UserError(f"{file} has no tasks: {HINT}")
    tasks = {}
    for name, options in content.items():
        where = f"{file}, {str(name)[:40]!r}"
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,40}", str(name)) or str(name).lower() in TAKEN:
            raise UserError(f"{where}: a task has a name of letters, digits, - and _ that is no task of GLUE's")
        if not isinstance(options, dict) or not options.get("train") or set(options) - set(TABLE_OPTIONS):
            raise UserError(f"{where} needs train, and may only have {', '.join(TABLE_OPTIONS)}")
        values = {option: value for option, value in options.items() if value is not None}
        for option, value in values.items():
            if not is_valid(option, value):
                raise UserError(f"{where}: {option} cannot be {value!r:.60}: {HINT}")
        tasks[name] = own_tables(file.parent, values).check()
    return tasks


def is_valid(option: str, value: Any) -> bool:
    if option == "no_header":
        return isinstance(value, bool)
    if option == "kind":
        return value in KINDS
    values = value if option == "text" and isinstance(value, list) else [value]
    return all(type(each) in (str, int) for each in values)


def own_tables(folder: Path, options: dict[str, Any]) -> Tables:
    """Return the tables that the options of a task describe; columns of a file without a header are called 1, 2, ..."""
    plain = {option: value if isinstance(value, bool) else str(value) for option, value in options.items()}
    if "text" in options:
        texts = options["text"] if isinstance(options["text"], list) else [options["text"]]
        plain["text"] = list(map(str, texts))
    return Tables(**plain | {name: folder / plain[name] for name in ("train", "dev") if name in plain})
