"""Prepared data inside of OUT of a command that fine-tunes on raw files.

OUT/data/KIND/                  as ``amos prepare`` writes them, with the checkpoint's own tokenizer
OUT/data/KIND/.made_from.json   the hashes of tokenizer, raw files and prepared files, and the settings
"""

import contextlib
import json
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amos_fairseq import strangers
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.files import json_text, locked, refuse_link, whole_folder
from amos_fairseq.fingerprint import files_sha256
from amos_fairseq.output.terminal import say
from amos_fairseq.text.tokenization import Tokenizer
from amos_fairseq.text.workspace import check_paths, describe_source

DATA = "data"
RECORD = ".made_from.json"


def prepared_data(
    out: Path,
    kind: str,
    sources: Mapping[str, Path],
    tokenizer: Tokenizer | None,
    settings: Mapping[str, Any],
    write: Callable[[Path], None],
    used_by: Sequence[str],
    unscored: Collection[str] = (),
) -> Path:
    """Return ``OUT/data/KIND``, after ``write`` if it does not exist yet or was made of something else.

    Data that are damaged are written again. A folder is replaced as a whole: a command that fails or is killed leaves the
    earlier data, or none.

    Args:
        kind: name of the folder; it may have a parent, as in ``glue/RTE``.
        sources: the raw files, or folders, by split; names and contents count.
        tokenizer: the checkpoint's; None for data that do not depend on it.
        settings: what else determines the data, as plain values.
        write: fills an empty folder. It is called with the folder's name while the data are unfinished.
        used_by: files or folders in OUT with results of these data, such as ``runs/RTE``. While one of them exists, the data
            are not replaced by others: the results would no longer belong to them.
        unscored: those of ``sources`` on which no result depends, such as test sets without labels.

    Raises:
        UserError: a raw file is missing; OUT has results of other data; ``OUT/data/KIND`` is something else; another process
            is writing it; OUT cannot be written.
    """
    check_paths(*sources.values())
    for path in sources.values():
        if not path.exists():
            raise UserError(f"{path}: no such file")
    folder = out / DATA / kind
    made_from = {
        "settings": settings,
        "sources": {split: describe_source(path) for split, path in sources.items()},
        "tokenizer_sha256": None if tokenizer is None else tokenizer.sha256,
    }
    made_from = json.loads(json_text(made_from))  # as it will be read: lists instead of tuples
    if _is_complete(folder, made_from):
        return folder
    with _locked(folder):
        if _is_complete(folder, made_from):  # another process has made them meanwhile
            return folder
        _check_replaceable(out, folder, made_from, used_by, unscored)
        if sources:
            names = ", ".join(dict.fromkeys(path.name for path in sources.values()))
            with_tokenizer = "" if tokenizer is None else " with the tokenizer of the checkpoint"
            say(f"converts {names}{with_tokenizer}; the result is kept in {folder}")
        with whole_folder(folder, replace=True) as unfinished:
            write(unfinished)
            record = made_from | {"files": files_sha256(unfinished)}
            (unfinished / RECORD).write_text(json_text(record), encoding="utf-8")
    return folder


def _read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of ``folder``; None without one. Raise :class:`UserError` for a damaged one."""
    hint = f"delete {folder} and repeat the command"
    refuse_link(folder / RECORD)
    record = strangers.read_json(folder / RECORD, hint, optional=True)
    if record is not None and not all(isinstance(record.get(name), dict) for name in ("sources", "files")):
        raise UserError(f"{folder / RECORD} is damaged: {hint}")
    return record


def _is_complete(folder: Path, made_from: dict[str, Any]) -> bool:
    """Return whether ``folder`` was made from that, and its files are as they were written."""
    record = _read_record(folder)
    if record is None or any(record.get(name) != value for name, value in made_from.items()):
        return False
    return record["files"].items() <= files_sha256(folder).items()


def _check_replaceable(
    out: Path, folder: Path, made_from: dict[str, Any], used_by: Sequence[str], unscored: Collection[str]
) -> None:
    """Raise :class:`UserError` if ``folder`` holds other data that results in OUT are of, or something else."""
    if not os.path.lexists(folder):
        return
    record = _read_record(folder)
    if record is None:
        raise UserError(f"{folder} was not written by this command: move it away, or give another --out")
    results = [out / name for name in used_by if os.path.lexists(out / name)]
    if results and (change := _change(record, made_from, unscored)):
        listed = " ".join(shlex.quote(str(path)) for path in results)
        raise UserError(
            f"{change} since {folder} was made, and {out} has results of those data: give another --out, or delete "
            f"{listed} to begin again"
        )
    say(f"makes {folder} again: {_change(record, made_from) or 'its files are damaged'}")


def _change(record: dict[str, Any], made_from: dict[str, Any], unscored: Collection[str] = ()) -> str | None:
    """Say what has changed since ``record``; return None if nothing has, but for the ``unscored`` files."""
    if record.get("tokenizer_sha256") != made_from["tokenizer_sha256"]:
        return "the tokenizer of the checkpoint has changed"
    for split in sorted({*record["sources"], *made_from["sources"]} - set(unscored)):
        there, here = record["sources"].get(split), made_from["sources"].get(split)
        if here is None:
            return f"the file of the {split} split was taken away"
        if there is None:
            return f"the file {here['name']} of the {split} split is new"
        if there != here:
            is_same_name = isinstance(there, dict) and there.get("name") == here["name"]
            return f"the file {here['name']} {'has changed' if is_same_name else 'was put in the place of another one'}"
    if record.get("settings") != made_from["settings"]:
        values = f"{json.dumps(record.get('settings'))} there, {json.dumps(made_from['settings'])} here"
        return f"the settings have changed ({values})"
    return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder that may not exist yet; remove the folders above it that were created and stay empty."""
    created = [parent for parent in folder.parents if not parent.exists()]
    lock, problem = folder.with_name(f".{folder.name}.lock"), f"another command is preparing {folder}"
    with contextlib.ExitStack() as stack:
        with explain_os_errors(f"{folder.parent} cannot be written", ": give another --out"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(lock, problem, "wait for it, or give another --out"))
        try:
            yield
        finally:
            stack.close()
            for parent in created:
                with contextlib.suppress(OSError):  # it is not empty
                    parent.rmdir()
