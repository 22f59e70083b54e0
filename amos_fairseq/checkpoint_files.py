"""Find the files of checkpoints, verify their checksums, and load them as data only."""

import contextlib
import dataclasses
import errno
import itertools
import pickle
import re
import shlex
import textwrap
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.files import file_version
from amos_fairseq.untrusted import LARGEST_COUNT, are_labels, field, finite_number, plain_name, text_in, whole_number

HEADS = "heads"  # in the state of a task
HEAD_KINDS = ("classes", "labels", "number", "words", "spans", "trees")
# One of them makes a folder a model of Hugging Face's tools, or what their users take for one.
_HUGGING_FACE = (
    *("config.json", "modules.json", "adapter_config.json"),
    *("checkpoint-*/config.json", "snapshots/*/config.json"),
)
_verified: set[tuple] = set()  # name and version of checkpoints with right checksums


class DamagedCheckpoint(UserError):
    """The file is not a complete checkpoint: it is truncated, empty, changed, or in another format."""


def is_hugging_face(path: Path) -> bool:
    """Return whether ``path`` is a folder of Hugging Face's tools, and no SAVE_DIR."""
    files = itertools.chain.from_iterable(map(path.glob, _HUGGING_FACE))
    return next(files, None) is not None and not any(path.glob("checkpoint_*.pt"))


def checkpoint_file(path: Path) -> Path:
    """Return ``path``; of a directory ``checkpoint_last.pt``, or ``checkpoint_best.pt`` if fine-tuning kept only that one."""
    files = [path / "checkpoint_last.pt", path / "checkpoint_best.pt"] if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            return file
    advice = "give a checkpoint or the SAVE_DIR of a run that has saved one; or hf download NAME --local-dir DIR"
    if is_hugging_face(path):
        advice = f"{path} is a Hugging Face model, run amos import {shlex.quote(str(path))} OUT.pt and give OUT.pt"
    elif runs := sorted(file.parent for file in path.glob("runs/**/checkpoint_*.pt")):
        advice = f"{path} holds fine-tuning results, give one of their runs, such as {runs[0]}"
    elif others := sorted(
        [*path.glob("*.pt"), *path.glob("*/checkpoint_last.pt")], key=lambda file: file.stat().st_mtime
    ):
        advice = f"give {others[-1]}"
    raise UserError(f"{files[0]} is missing: {advice}")


def check_output_file(out: Path) -> None:
    """Refuse an ``out`` that cannot become a new checkpoint; called before any long work."""
    if out.suffix != ".pt":
        raise UserError(f"{out} must end in .pt: fairseq recognizes checkpoints by this ending")
    if out.exists():
        raise UserError(f"{out} exists: remove it, or give another name")


def verify_checksums(path: str) -> None:
    """Read a checkpoint and compare the CRC-32 that ``torch.save`` has stored for each tensor; torch.load ignores them.

    A process verifies a file once, until it is replaced or written to. The file is streamed; 1 GB in the page cache took 1.8 s
    on one core of a busy machine. Files in the format before torch 1.6 have no checksums.
    """
    version = path, *file_version(path)
    if version in _verified:
        return
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            # torch.save does not compress; unpacking could take any amount of time and memory.
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise DamagedCheckpoint(f"{path} was not written by torch.save (it is compressed): give another file")
            if (member := archive.testzip()) is not None:
                problem = f"the checksum of {member} in it is wrong"
                raise DamagedCheckpoint(f"{path} is damaged ({problem}): give another checkpoint, or copy it again")
    _verified.add(version)


def read_header(path: str) -> dict[str, Any]:
    """Load a checkpoint with memory-mapped tensors; nothing in the file can run code (see compat/checkpoints.py)."""
    import torch  # not needed to find files

    with explain_load_errors(path):
        # Files in the format before torch 1.6, which is no archive, cannot be mapped.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{path} contains a {type(content).__name__}, not a checkpoint: give another file")
    return content


def describe_other_weights(error: str) -> str:
    """Return in a few words what the error of ``load_state_dict`` lists: which weights of a checkpoint do not fit a model."""
    differences = []
    for title, kind in (("Missing", "lacks"), ("Unexpected", "has needless")):
        section = re.search(rf"{title} key\(s\) in state_dict: ([^\n]*)", error)
        names = re.findall(r'"([^"]+)"', section[1]) if section else []
        if names:
            differences.append(f"it {kind} {len(names)} weight{'s' * (len(names) > 1)}, such as {names[0]}")
    sizes = re.findall(r"size mismatch for (\S+): .*?torch\.Size\((.*?)\).*?torch\.Size\((.*?)\)", error)
    if sizes:
        name, there, here = sizes[0]
        differences.append(f"{len(sizes)} have other sizes, such as {name}, which is {there} there and {here} here")
    return "; ".join(differences) or textwrap.shorten(error, width=300, placeholder=" ...")


def settings_in(checkpoint: dict[str, Any], section: str) -> dict[str, Any]:
    """Return a section of the settings of the run that wrote a checkpoint; empty where they are not recorded."""
    cfg = checkpoint.get("cfg")
    settings = cfg.get(section) if isinstance(cfg, dict) else None
    return settings if isinstance(settings, dict) else {}


def num_updates_of(path: str, checkpoint: dict[str, Any]) -> int:
    history = checkpoint.get("optimizer_history")
    last = history[-1] if isinstance(history, list) and history else None
    try:
        return whole_number(last.get("num_updates") if isinstance(last, dict) else None)
    except ValueError as error:
        advice = "give a checkpoint of fairseq, or a folder of Hugging Face"
        raise UserError(f"{path} does not say after how many updates it was saved ({error}): {advice}") from error


@dataclass(frozen=True)
class HeadOutputs:
    """What the outputs of a head mean. A task puts it into its state as plain values, which fairseq saves in checkpoints.

    Attributes:
        kind: of texts "classes", "labels" (any number of them) or "number"; of words "words" or "spans", where the labels mark
            spans; "trees", where they are relations.
        labels: names of the outputs in their order; none of a number.
        name: of the task or column, as the user wrote it.
        text_columns, header: how the table of the texts was read.
        raw_text: whether a sentence had its text as it is written, with spaces between some words alone.
        signs, whole: of words of the training data, for raw text: see ``word_files.undivided``.
    """

    kind: str
    labels: list[str]
    name: str = ""
    text_columns: list[str] = dataclasses.field(default_factory=list)
    header: bool = True
    raw_text: bool = False
    signs: str = ""
    whole: Collection[str] = dataclasses.field(default_factory=list)

    @classmethod
    def parse(cls, content: Any) -> "HeadOutputs":
        """Return the head of these plain values; raise ``ValueError`` for others."""
        kind, labels = field(content, "kind", str), field(content, "labels", list)
        if kind not in HEAD_KINDS or (kind == "number") == bool(labels) or (labels and not are_labels(labels)):
            raise ValueError(f"kind {kind!r:.60} with {len(labels):,} labels is not what a head predicts")
        name, signs = (text_in(field(content, name, str)) for name in ("name", "signs"))
        columns, whole = (list(map(text_in, field(content, name, list))) for name in ("text_columns", "whole"))
        options = {name: field(content, name, bool) for name in ("header", "raw_text")}
        return cls(kind, labels, name, columns, signs=signs, whole=frozenset(whole), **options)


def task_state_of(path: str, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``task_state`` of a checkpoint, empty if there is none: sha256 of the vocabulary, and under
    :data:`HEADS` what :func:`heads_in` reads."""
    state = checkpoint.get("task_state") or {}
    try:
        heads_in(state)
        if not all(isinstance(value, str | None) for name, value in state.items() if name != HEADS):
            raise ValueError("a fingerprint is no text")
    except (AttributeError, ValueError) as error:
        raise UserError(f"{path} has a damaged task_state ({error}): give another checkpoint") from error
    return dict(state)


def heads_in(task_state: dict[str, Any]) -> dict[str, HeadOutputs]:
    """Return what the outputs of each head mean; raise ``ValueError`` for values that no task has written."""
    heads = field(task_state, HEADS, dict) if HEADS in task_state else {}
    return {plain_name(name): HeadOutputs.parse(head) for name, head in heads.items()}


def training_seconds_of(checkpoint: dict[str, Any]) -> float:
    """Return the training time up to a checkpoint; raise ``ValueError`` if it is missing or damaged."""
    import torch

    state = checkpoint.get("extra_state")
    seconds = state.get("previous_training_time") if isinstance(state, dict) else None
    if torch.is_tensor(seconds) and seconds.numel() == 1 and not seconds.is_complex():  # the mean over several ranks
        seconds = seconds.item()
    return finite_number(seconds, 0, LARGEST_COUNT)


@contextlib.contextmanager
def explain_load_errors(path: str) -> Iterator[None]:
    """Verify the checksums of the file ``path``, and turn what ``torch.load`` raises for it into a :class:`UserError`."""
    try:
        with open(path, "rb"):  # torch reports a file without read permission as "not an archive"
            verify_checksums(path)
            yield
    except UserError:
        raise
    except Exception as error:
        # In a truncated file torch seeks to an invalid position: EINVAL. Every other OSError comes from the disk.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise UserError(f"{path} cannot be read ({error.strerror}): permit it, or give another file") from error
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and foreign:
            raise UserError(
                f"{path} contains an object of class {foreign.group(1)}, which is not loaded because it could run code of "
                "the author of the file: store only tensors, numbers, strings, lists and dictionaries in it"
            ) from error
        problem = "truncated, or not written by fairseq"
        raise DamagedCheckpoint(f"{path} is not a complete checkpoint ({problem}): give another file") from error
