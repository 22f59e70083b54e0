"""Checks and records around each conversion of ``amos prepare``, and the same data inside OUT of a fine-tuning command.

OUT/data/KIND/                  as ``amos prepare`` writes them, with the checkpoint's own tokenizer
OUT/data/KIND/.made_from.json   the hashes of tokenizer, raw files and prepared files, and the settings
"""

import contextlib
import hashlib
import json
import os
import random
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.files import (
    DICTIONARY_FILE,
    TOKENIZER_DIRECTORY,
    check_claim,
    file_sha256,
    files_sha256,
    first_difference,
    json_text,
    locked,
    refuse_link,
    whole_folder,
)
from amos_fairseq.output.terminal import say
from amos_fairseq.strangers import is_unicode, read_json
from amos_fairseq.text.tokenization.tokenizer import Tokenizer

DATA = "data"
RECORD = ".made_from.json"
DEV_SPLITS = {"dev", "valid"}
WITH_DEV, WITHOUT_DEV = "it was made with --dev", "it was made without --dev"


@dataclass(frozen=True)
class Sample:
    """How many examples of the training split are kept (None: all), and the seed that chooses them."""

    limit: int | None
    seed: int

    def describe(self, name: str) -> dict[str, int | None]:
        """Return the settings for a manifest, the limit under ``name``. The seed matters only if examples are chosen."""
        return {name: self.limit, "seed": None if self.limit is None else self.seed}

    def choose(self, total: int) -> list[int]:
        if self.limit is None or total <= self.limit:
            return list(range(total))
        return sorted(random.Random(self.seed).sample(range(total), self.limit))


def check_inputs(paths: Sequence[Path], advice: str) -> None:
    """Refuse a missing file or folder, and a name that UTF-8 cannot represent."""
    check_paths(*paths)
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file: {advice}")


def check_paths(*paths: Path) -> None:
    """Refuse the path of an input or output that UTF-8 cannot represent: manifests contain it."""
    for path in paths:
        if not is_unicode(str(path)):
            raise UserError(f"the name of {str(path)!r} is not UTF-8: rename it, for example with convmv")


def describe_source(path: Path) -> dict[str, str]:
    """Return name and sha256 of a file, or of the paths and contents of all files in a folder."""
    if path.is_dir():
        listed = json.dumps(files_sha256(path), sort_keys=True)
        return {"name": path.name, "sha256": hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest()}
    return {"name": path.name, "sha256": file_sha256(path)}


def description_of(sources: Mapping[str, Path], tokenizer: Tokenizer | None, settings: Any) -> dict[str, Any]:
    """Return what determines prepared data, as plain values: the raw files by split, the tokenizer and the settings."""
    return {
        "settings": settings,
        "sources": {split: describe_source(path) for split, path in sources.items()},
        "tokenizer_sha256": None if tokenizer is None else tokenizer.sha256,
    }


def fill_out(out: Path, description: Mapping[str, Any], kind: str, manifest: str, write: Callable[[Path], Any]) -> bool:
    """Fill OUT of ``amos prepare`` by ``write`` unless it :func:`is_finished`; return whether it did. Nothing is left if that
    fails."""
    if is_finished(out, description, kind, manifest):
        return False
    with whole_folder(out.absolute()) as unfinished:
        write(unfinished)
    return True


def is_finished(out: Path, description: Mapping[str, Any], kind: str, manifest: str) -> bool:
    """Return whether OUT holds the data of ``description``, entries of its file ``manifest``; refuse OUT with other ``kind``s
    of data."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not out.is_dir():
        raise UserError(f"OUT {out} is not a directory")
    problem, advice = f"{out} was made with other files or settings", "give another OUT, or remove it"
    if not check_claim(out / manifest, description, problem, advice, only_these=True):
        raise UserError(f"OUT {out} is not empty and contains no {kind} data of amos prepare: give another directory")
    say(f"{out} is finished already, with these files and settings: nothing to do")
    return True


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write ``tokenizer/``, and its ``dict.txt`` beside it, where fairseq looks for one."""
    tokenizer.save(directory / TOKENIZER_DIRECTORY)
    shutil.copyfile(directory / TOKENIZER_DIRECTORY / DICTIONARY_FILE, directory / DICTIONARY_FILE)


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Write the last file of prepared data, with the hashes of the others."""
    path.write_text(json_text({**content, "sha256": files_sha256(path.parent)}), encoding="utf-8")


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
    """Return ``OUT/data/KIND`` after :func:`prepare_folder`; ``kind`` may have a parent, as in ``glue/RTE``, and ``used_by``
    names files or folders in OUT with results, such as ``runs/RTE``."""
    folder = out / DATA / kind
    prepare_folder(folder, sources, tokenizer, settings, write, [out / name for name in used_by], unscored)
    return folder


def prepare_folder(
    folder: Path,
    sources: Mapping[str, Path],
    tokenizer: Tokenizer | None,
    settings: Mapping[str, Any],
    write: Callable[[Path], None],
    results: Sequence[Path] = (),
    unscored: Collection[str] = (),
) -> bool:
    """Fill ``folder`` by ``write`` if it does not exist yet, is damaged, or was made of something else; return whether it did.

    A folder is replaced as a whole: a command that fails or is killed leaves the earlier data, or none. While one of the
    ``results`` of these data exists, they are not replaced by others.

    Args:
        sources: the raw files, or folders, by split; names and contents count.
        write: fills the empty folder that it is called with.
        unscored: those of ``sources`` on which no result depends, such as test sets without labels.
    """
    check_inputs(list(sources.values()), "correct its name")
    # As it will be read: lists instead of tuples.
    made_from = json.loads(json_text(description_of(sources, tokenizer, settings)))
    if _is_complete(folder, made_from):
        return False
    with _locked(folder):
        if _is_complete(folder, made_from):  # another process has made them meanwhile
            return False
        _check_replaceable(folder, made_from, results, unscored)
        if sources:
            names = ", ".join(dict.fromkeys(path.name for path in sources.values()))
            with_tokenizer = "" if tokenizer is None else " with the tokenizer of the checkpoint"
            say(f"converts {names}{with_tokenizer if results else ''}; the result is kept in {folder}")
        with whole_folder(folder, replace=True) as unfinished:
            write(unfinished)
            record = made_from | {"files": files_sha256(unfinished)}
            (unfinished / RECORD).write_text(json_text(record), encoding="utf-8")
    return True


def _read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of ``folder``; None without one."""
    hint = f"delete {folder} and repeat the command"
    refuse_link(folder / RECORD)
    record = read_json(folder / RECORD, hint, optional=True)
    if record is not None and not all(isinstance(record.get(name), dict) for name in ("sources", "files")):
        raise UserError(f"{folder / RECORD} is damaged: {hint}")
    return record


def _is_complete(folder: Path, made_from: dict[str, Any]) -> bool:
    """Return whether ``folder`` was made from ``made_from``, and its files are as they were written."""
    record = _read_record(folder)
    if record is None or any(record.get(name) != value for name, value in made_from.items()):
        return False
    return record["files"].items() <= files_sha256(folder).items()


def _check_replaceable(
    folder: Path, made_from: dict[str, Any], results: Sequence[Path], unscored: Collection[str]
) -> None:
    """Refuse to replace data of which there are results, or a folder that this command did not write."""
    if not os.path.lexists(folder):
        return
    record = _read_record(folder)
    if record is None:
        raise UserError(f"{folder} was not written by this command: move it away, or give another --out")

    def scored(source: dict[str, Any]) -> dict[str, Any]:
        sources = {split: value for split, value in source["sources"].items() if split not in unscored}
        return {**{name: source.get(name) for name in made_from}, "sources": sources}

    results = [path for path in results if os.path.lexists(path)]
    if results and scored(record) != scored(made_from):
        listed = " ".join(shlex.quote(str(path)) for path in results)
        difference = _difference(scored(record), scored(made_from))
        advice = {WITH_DEV: "give it, ", WITHOUT_DEV: "leave it out, "}.get(difference, "")
        raise UserError(
            f"{folder} was made of something else ({difference}), and there are results of those data: {advice}give another "
            f"--out, or delete {listed} to begin again"
        )
    there = {name: record.get(name) for name in made_from}
    reason = "its files are damaged" if there == made_from else _difference(there, made_from)
    say(f"makes {folder} again: {reason}")


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """Name the first file, or else the first setting, that differs; a dev set that only one of them has comes first."""
    had_dev, has_dev = (not DEV_SPLITS.isdisjoint(made_from["sources"]) for made_from in (there, here))
    if had_dev != has_dev:
        return WITH_DEV if had_dev else WITHOUT_DEV
    for split, source in here["sources"].items():
        before = there["sources"].get(split)
        if before is not None and before != source and before["sha256"] == source["sha256"]:
            return f"the file of the {split} split was {before['name']}: rename {source['name']}"
        if before != source:
            return f"the file {source['name']} of the {split} split is another one now"
    return first_difference(there, here)


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
