"""Folders of prepared data: OUT of ``amos prepare``, and OUT/data/KIND-HASH of a fine-tuning command.

A folder is written under a temporary name and renamed, so that one that is there is whole. HASH is that of what the data are
made of: raw files, tokenizer and settings. Other files or settings give another folder, two commands at once the same.
"""

import contextlib
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError, explain_os_errors, printable
from amos_fairseq.files import DICTIONARY_FILE, TOKENIZER_DIRECTORY, file_sha256, files_sha256, json_text, whole_folder
from amos_fairseq.output.terminal import say
from amos_fairseq.text.tokenization.tokenizer import Tokenizer
from amos_fairseq.text.tokenization.word_pieces import unspell_piece
from amos_fairseq.untrusted import is_unicode, read_json

DATA = "data"
FORMAT = 1  # of manifests
SHOWN_TOKENS = 60  # of an example
PREPARE_AGAIN = "prepare the data again"
Write = Callable[[Path], Any]  # fills the empty folder that it is called with


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


def check_paths(inputs: Sequence[Path], *outputs: Path) -> None:
    """Refuse an input that is missing, and a path that UTF-8 cannot represent: manifests contain it."""
    for path in (*inputs, *outputs):
        if not is_unicode(str(path)) or (path in inputs and not path.exists()):
            raise UserError(f"{printable(str(path))}: no such file, or a name that is not UTF-8: correct it")


def describe_source(path: Path) -> dict[str, str]:
    """Return name and sha256 of a file, or of the paths and contents of all files in a folder."""
    if path.is_dir():
        listed = json.dumps(files_sha256(path), sort_keys=True)
        return {"name": path.name, "sha256": hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest()}
    return {"name": path.name, "sha256": file_sha256(path)}


def description_of(sources: Mapping[str, Path], tokenizer: Tokenizer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what determines prepared data, as JSON gives it back: the raw files, or folders, by split, the tokenizer and the
    settings. Names and contents of the files count."""
    check_paths(list(sources.values()))
    description = {
        "settings": settings,
        "sources": {split: describe_source(path) for split, path in sources.items()},
        "tokenizer_sha256": tokenizer.sha256,
    }
    return json.loads(json_text(description))


def fill_out(out: Path, description: Mapping[str, Any], manifest: str, write: Write) -> bool:
    """Fill OUT of ``amos prepare``, and return whether it was written: it is finished if its file ``manifest`` has the entries
    of ``description``."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        record = read_json(out / manifest, "give another OUT", optional=True) or {}
        if description.items() <= record.items():
            say(f"{out} is finished already, with these files and settings: nothing to do")
            return False
        raise UserError(f"OUT {out} is not empty, and was not made of these files and settings: give another folder")
    with whole_folder(out.absolute()) as unfinished:
        write(unfinished)
    return True


def prepared_data(out: Path, kind: str, description: Mapping[str, Any], write: Write) -> Path:
    """Return ``OUT/data/KIND-HASH``, which is written unless it is there."""
    made_of = json.dumps(description, sort_keys=True).encode()
    folder = out / DATA / f"{kind}-{hashlib.sha256(made_of).hexdigest()[:8]}"
    if folder.is_dir():
        return folder
    names = ", ".join(dict.fromkeys(source["name"] for source in description["sources"].values()))
    say(f"converts {names} with the tokenizer of the checkpoint; the result is kept in {folder}")
    created = [parent for parent in (folder.parent, out) if not parent.exists()]
    try:
        with explain_os_errors(f"{folder.parent} cannot be written", ": give another --out"):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as unfinished:
            write(unfinished)
    except BaseException as error:
        for parent in created:
            with contextlib.suppress(OSError):  # it is not empty
                parent.rmdir()
        if not (isinstance(error, OSError) and folder.is_dir()):  # another command has made the same folder meanwhile
            raise
    return folder


def say_first_example(tokens: Sequence[str], target: object) -> None:
    """Print the first training example as the model will see it: its tokens, with ▁ for a space, and what it is to predict."""
    pieces = [unspell_piece(token).replace(" ", "▁") for token in tokens[:SHOWN_TOKENS]]
    shown = " ".join(pieces) + (" ..." if len(tokens) > SHOWN_TOKENS else "")
    say(f"the first example to train on, in tokens: {shown} -> {target}")


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write ``tokenizer/``, and its ``dict.txt`` beside it, where fairseq looks for one."""
    tokenizer.save(directory / TOKENIZER_DIRECTORY)
    shutil.copyfile(directory / TOKENIZER_DIRECTORY / DICTIONARY_FILE, directory / DICTIONARY_FILE)


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Write the last file of prepared data, with the hashes of the others, by which damage of a disk is noticed."""
    record = {"format": FORMAT, **content, "sha256": files_sha256(path.parent)}
    path.write_text(json_text(record), encoding="utf-8")


def read_manifest(path: Path) -> dict[str, Any]:
    """Return what :func:`write_manifest` wrote."""
    record = read_json(path, "give a folder that amos prepare wrote")
    if record.get("format") != FORMAT:
        raise UserError(f"{path} is not readable as prepared data: {PREPARE_AGAIN}")
    return record
