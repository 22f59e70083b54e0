"""The workspace of a corpus of text, whose finished stages a later run continues, and its record ``corpus.json``."""

import dataclasses
import os
import re
import reprlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text, refuse_link, write_text
from amos_fairseq.fingerprint import TOKENIZER_DIRECTORY, file_sha256, joined_sha256, sample_sha256
from amos_fairseq.process import version_of
from amos_fairseq.strangers import field, finite_number, read_json, text_in, whole_number
from amos_fairseq.text import TEXT_COLUMN
from amos_fairseq.text.split import DocumentFile, Split, size_of
from amos_fairseq.text.table_files import files_of
from amos_fairseq.text.tokenization import Tokenizer
from amos_fairseq.text.workspace import Workspace

MANIFEST = "corpus.json"
_COUNTS = "counts.json"
_DOCUMENT_FILE = re.compile(r"(\d{5,}|valid|sample)\.txt")
_LIBRARIES = ("fairseq-fixed", "sentencepiece", "tokenizers")
_REPEAT = "what is unfinished was removed, repeat the command"


class TextWorkspace(Workspace):
    """``OUT/.prepare``: the stages text, tokenizer and a shard each. Under its final name a stage is complete."""

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        """``identity``: settings and inputs; a run continues an earlier one only if they are equal."""
        super().__init__(out)
        self._identity = identity
        self.text, self.tokenizer = self.root / "text", self.root / TOKENIZER_DIRECTORY

    def check_out(self) -> None:
        if self.out.exists() and not self.root.is_dir() and any(self.out.iterdir()):
            raise UserError(
                f"--out {self.out} is not empty and contains no corpus of amos prepare: give another directory"
            )

    def open(self) -> None:
        path = self.root / "identity.json"
        identity = read_json(path, f"remove {self.root} and repeat the command", optional=True)
        # The identity is written before any stage, so stages without one are not of this command.
        stages = [self.root / MANIFEST, self.text, self.tokenizer, *self.root.glob("shard*")]
        is_new = identity is None and not any(stage.exists() for stage in stages)
        if identity != self._identity and not is_new:
            raise UserError(
                f"{self.out} contains an unfinished corpus of other inputs or settings: repeat the command that started "
                f"it, or remove {self.root}"
            )
        write_text(path, json_text(self._identity))

    def can_continue(self) -> bool:
        return self.text.is_dir()

    def shard(self, number: int) -> Path:
        return self.root / f"shard{number}"

    def finish(self, unfinished: Path) -> None:
        unfinished.rename(unfinished.with_suffix(""))

    def save_split(self, directory: Path, split: Split) -> None:
        write_text(directory / "split.json", json_text(dataclasses.asdict(split)))

    def load_split(self) -> Split | None:
        path = self.text / "split.json"
        if not path.is_file():
            return None
        record = read_json(path, _REPEAT)
        try:
            train = [_document_file(each) for each in field(record, "train", list)]
            return Split(
                field(record, "inputs", list), train, _document_file(record["valid"]), _document_file(record["sample"])
            )
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged: {_REPEAT}") from error

    def save_counts(self, directory: Path, counts: dict[str, Any]) -> None:
        write_text(directory / _COUNTS, json_text(counts))

    def load_counts(self, number: int) -> dict[str, Any] | None:
        path = self.shard(number) / _COUNTS
        counts = read_json(path, _REPEAT, optional=True)
        if counts is None:
            return None
        try:
            for part in ("train", "valid") if number == 0 else ("train",):
                for count in field(counts, part, dict).values():
                    finite_number(count)
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}): {_REPEAT}") from error
        return counts

    def publish(self, shards: int, manifest: dict[str, Any]) -> None:
        """Move the finished stages into ``out``, the manifest last; the next run completes an interrupted move."""
        write_text(self.root / MANIFEST, json_text(manifest))
        for number in range(shards):
            self._move(self.shard(number), self._target(number, shards))
        self._move(self.tokenizer, self.out / TOKENIZER_DIRECTORY)
        os.replace(self.root / MANIFEST, self.out / MANIFEST)
        shutil.rmtree(self.root)

    def continue_publishing(self) -> bool:
        """Complete the publishing of an interrupted run; return whether there was one."""
        path = self.root / MANIFEST
        if not path.is_file():
            return False
        hint = f"remove {self.out} and repeat the command"
        manifest = read_json(path, hint)
        if not isinstance(manifest.get("shards"), list):
            raise UserError(f"{path} is damaged: {hint}")
        self.publish(len(manifest["shards"]), manifest)
        return True

    def _target(self, number: int, shards: int) -> Path:
        return self.out / f"shard{number}" if shards > 1 else self.out

    def _move(self, source: Path, target: Path) -> None:
        if target != self.out:  # the user named OUT, which may be a link
            refuse_link(target)
        target.mkdir(exist_ok=True)
        for path in sorted(source.iterdir()) if source.is_dir() else []:
            if path.name != _COUNTS:
                os.replace(path, target / path.name)


def _document_file(record: Any) -> DocumentFile:
    """Return a file of the split; raise ``ValueError``, ``KeyError`` or ``TypeError`` if its record is damaged. The file that
    it names is removed once it is encoded, so it must be one of the workspace."""
    if not _DOCUMENT_FILE.fullmatch(field(record, "name", str)):
        raise ValueError(f"{record['name']!r:.60} is not the name of a file of documents")
    return DocumentFile(
        record["name"], *(whole_number(record[count]) for count in ("documents", "paragraphs", "bytes"))
    )


def with_shares(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a split for ``corpus.json`` (:class:`~amos_fairseq.text.encoding.TextCounts`)."""
    return dict(counts) | {
        "unknown_share": counts["unknown"] / max(1, counts["pieces"]),
        "pieces_per_word": counts["pieces"] / max(1, counts["words"]),
    }


def file_hashes(directory: Path) -> dict[str, dict[str, str]]:
    """Return the hashes of whole files, for ``amos verify``, and of samples, which every training compares."""
    paths = [path for path in sorted(directory.iterdir()) if path.suffix in (".bin", ".idx")]
    hashes = {"sha256": file_sha256, "sample_sha256": sample_sha256}
    return {name: {path.name: compute(path) for path in paths} for name, compute in hashes.items()}


def build_manifest(
    out: Path, settings: dict[str, Any], split: Split, tokenizer: Tokenizer, shards: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the content of ``corpus.json``. ``shards``: ``train`` and ``valid`` counts and ``sha256`` of each."""
    names = [f"shard{number}" for number in range(len(shards))] if len(shards) > 1 else ["."]
    return {
        "task_data": ":".join(str(out / name) for name in names),
        "settings": settings,
        "versions": {library: version_of(library) for library in _LIBRARIES},
        "tokenizer": {**tokenizer.settings(), "pieces": len(tokenizer), "sha256": tokenizer.sha256},
        "vocabulary_sample": dataclasses.asdict(split.sample),
        "inputs": split.inputs,
        "train": with_shares({name: sum(shard["train"][name] for shard in shards) for name in shards[0]["train"]}),
        "valid": shards[0]["valid"],
        "shards": [{"directory": name, **shard} for name, shard in zip(names, shards, strict=True)],
    }


def is_finished_corpus(out: Path, settings: dict[str, Any], inputs: list[Path]) -> bool:
    """Return whether ``out`` contains the finished corpus of these inputs and settings.

    Raises:
        UserError: it contains a finished corpus of other inputs or settings.
    """
    if not (out / MANIFEST).is_file():
        return False
    manifest = read_corpus_manifest(out)
    # Corpora that were made before there was a choice had this column.
    earlier, records = {"text_column": TEXT_COLUMN, "csv_quotes": False} | manifest["settings"], manifest["inputs"]
    different = sorted(name for name in settings if settings[name] != earlier.get(name))
    if different:
        name = different[0]
        raise UserError(
            f"{out} contains a finished corpus with {name} = {reprlib.repr(earlier.get(name))}, not {settings[name]!r}: give "
            "another --out, or remove it"
        )
    same = [size_of(path) for path in inputs] == [record["bytes"] for record in records]
    hashes = (joined_sha256(files_of(path)) for path in inputs)
    if not same or any(found != one["sha256"] for found, one in zip(hashes, records, strict=True)):
        raise UserError(f"{out} contains a finished corpus of other inputs: give another --out, or remove it")
    shutil.rmtree(out / Workspace.hidden, ignore_errors=True)  # left by a run that was killed in its last step
    return True


def read_corpus_manifest(out: Path) -> dict[str, Any]:
    """Return ``corpus.json`` of ``out``; raise :class:`UserError` if another program wrote it."""
    path = out / MANIFEST
    manifest = read_json(path, "it was not written by amos prepare; give another --out")
    try:
        text_in(manifest["task_data"])
        field(manifest, "settings", dict)
        field(manifest, "shards", list)
        for part in ("train", "valid"):
            whole_number(field(manifest, part, dict)["tokens"])
        for record in field(manifest, "inputs", list):
            whole_number(record["bytes"])
            text_in(record["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} was not written by amos prepare: give another --out") from error
    return manifest
