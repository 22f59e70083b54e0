"""``corpus.json``: the inputs, settings and content of a finished corpus."""

import reprlib
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List

from amos_fairseq.errors import UserError
from amos_fairseq.fingerprint import file_sha256, sample_sha256
from amos_fairseq.preprocess.pretraining.encoding import Counts
from amos_fairseq.preprocess.pretraining.splitting import Split
from amos_fairseq.preprocess.pretraining.workspace import MANIFEST
from amos_fairseq.strangers import field, read_json, text_in, whole_number
from amos_fairseq.tokenization import Tokenizer
from amos_fairseq.versions import version_of

_LIBRARIES = ("fairseq-fixed", "sentencepiece", "tokenizers")


def describe(counts: Counts) -> Dict[str, Any]:
    """Return the counts for ``corpus.json``. ``tokens``: ids in the binarized file, including ``</s>``."""
    return {
        "documents": counts.documents,
        "paragraphs": counts.paragraphs,
        "words": counts.words,
        "bytes": counts.bytes,
        "pieces": counts.pieces,
        "tokens": counts.pieces + counts.lines,
        "unknown": counts.unknown,
        "unknown_share": counts.unknown / max(1, counts.pieces),
        "pieces_per_word": counts.pieces / max(1, counts.words),
    }


def file_hashes(directory: Path) -> Dict[str, Dict[str, str]]:
    """Return the hashes of whole files, for ``amos verify``, and of samples, which every training compares."""
    paths = [path for path in sorted(directory.iterdir()) if path.suffix in (".bin", ".idx")]
    hashes = {"sha256": file_sha256, "sample_sha256": sample_sha256}
    return {name: {path.name: compute(path) for path in paths} for name, compute in hashes.items()}


def build_manifest(
    out: Path, settings: Dict[str, Any], split: Split, tokenizer: Tokenizer, shards: List[Dict[str, Any]]
) -> Dict[str, Any]:
    """Return the content of ``corpus.json``. ``shards``: ``train`` and ``valid`` counts and ``sha256`` of each."""
    names = [f"shard{number}" for number in range(len(shards))] if len(shards) > 1 else ["."]
    return {
        "task_data": ":".join(str(out / name) for name in names),
        "settings": settings,
        "versions": {library: version_of(library) for library in _LIBRARIES},
        "tokenizer": {**tokenizer.settings(), "pieces": len(tokenizer), "sha256": tokenizer.sha256},
        "vocabulary_sample": asdict(split.sample),
        "inputs": split.inputs,
        "train": _sum([shard["train"] for shard in shards]),
        "valid": shards[0]["valid"],
        "shards": [{"directory": name, **shard} for name, shard in zip(names, shards, strict=True)],
    }


def is_finished(out: Path, settings: Dict[str, Any], inputs: List[Path]) -> bool:
    """Return whether ``out`` contains the finished corpus of these inputs and settings.

    Raises:
        UserError: it contains a finished corpus of other inputs or settings.
    """
    if not (out / MANIFEST).is_file():
        return False
    manifest = read_manifest(out)
    earlier, records = manifest["settings"], manifest["inputs"]
    different = sorted(name for name in settings if settings[name] != earlier.get(name))
    if different:
        name = different[0]
        raise UserError(
            f"{out} contains a finished corpus with {name} = {reprlib.repr(earlier.get(name))}, not {settings[name]!r}: give "
            "another --out, or remove it"
        )
    _compare_inputs(out, inputs, records)
    shutil.rmtree(out / ".prepare", ignore_errors=True)  # left by a run that was killed in its last step
    return True


def read_manifest(out: Path) -> Dict[str, Any]:
    """Return ``corpus.json`` of ``out``; raise :class:`UserError` if another program wrote it."""
    path = out / MANIFEST
    manifest = read_json(path, "it was not written by prepare.sh; give another --out")
    try:
        text_in(manifest["task_data"])
        field(manifest, "settings", dict)
        field(manifest, "shards", list)
        for record in field(manifest, "inputs", list):
            whole_number(record["bytes"])
            text_in(record["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} was not written by prepare.sh: give another --out") from error
    return manifest


def _compare_inputs(out: Path, inputs: List[Path], records: List[Dict[str, Any]]) -> None:
    same = [path.stat().st_size for path in inputs] == [record["bytes"] for record in records]
    if same:
        same = all(file_sha256(path) == record["sha256"] for path, record in zip(inputs, records, strict=True))
    if not same:
        raise UserError(f"{out} contains a finished corpus of other inputs: give another --out, or remove it")


def _sum(counts: List[Dict[str, Any]]) -> Dict[str, Any]:
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    total["unknown_share"] = total["unknown"] / max(1, total["pieces"])
    total["pieces_per_word"] = total["pieces"] / max(1, total["words"])
    return total
