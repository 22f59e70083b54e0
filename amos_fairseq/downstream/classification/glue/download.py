"""``amos prepare glue-download``: GLUE's official files, in the layout that ``amos prepare glue`` reads.

For each task: download -> check -> unpack into a temporary directory -> rename. Sizes and sha256 are those that others have
published, in ``datasets/glue/dataset_infos.json`` of Hugging Face's ``datasets`` repository, whose ``glue.py`` downloads the
same addresses; they were not verified here. For SST-2, and for MRPC's training file and list of development pairs, the same
hashes are also known from other copies.
"""

import argparse
import io
import shutil
from dataclasses import dataclass
from http.client import REQUESTED_RANGE_NOT_SATISFIABLE, responses
from pathlib import Path
from time import sleep

from amos_fairseq.downstream.classification.glue.tasks import TASKS, GlueTask, parse_tasks
from amos_fairseq.downstream.classification.glue.unpacking import build_mrpc, extract_tables
from amos_fairseq.errors import UserError
from amos_fairseq.files import no_links
from amos_fairseq.fingerprint import file_sha256
from amos_fairseq.output.terminal import say
from amos_fairseq.text.workspace import Workspace

COMMAND = "download"


@dataclass(frozen=True)
class RemoteFile:
    """``path``: relative to the base address."""

    path: str
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


MRPC_TRAIN = RemoteFile(
    "senteval/senteval_data/msr_paraphrase_train.txt",
    1_047_044,
    "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
)
MRPC_TEST = RemoteFile(
    "senteval/senteval_data/msr_paraphrase_test.txt",
    441_275,
    "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784",
)
MRPC_DEV_IDS = RemoteFile(
    "glue/data/mrpc_dev_ids.tsv", 6_222, "971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7"
)


def _archive(name: str, size: int, sha256: str) -> tuple[RemoteFile, ...]:
    return (RemoteFile(f"glue/data/{name}", size, sha256),)


REMOTE_FILES: dict[str, tuple[RemoteFile, ...]] = {
    "CoLA": _archive("CoLA.zip", 376_971, "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff"),
    "SST-2": _archive("SST-2.zip", 7_439_277, "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"),
    "MRPC": (MRPC_TRAIN, MRPC_TEST, MRPC_DEV_IDS),
    "STS-B": _archive("STS-B.zip", 802_872, "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85"),
    "QQP": _archive("QQP-clean.zip", 41_696_084, "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0"),
    "MNLI": _archive("MNLI.zip", 312_783_507, "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633"),
    "QNLI": _archive("QNLIv2.zip", 10_627_589, "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5"),
    "RTE": _archive("RTE.zip", 697_150, "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee"),
    "WNLI": _archive("WNLI.zip", 28_999, "ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46"),
    "AX": _archive("AX.tsv", 222_257, "0e13510b1bb14436ff7e2ee82338f0efb0133ecf2e73507a697dc210db3f05fd"),
}

LARGEST_BYTES = 1 << 30  # three times the largest file
TRIES = 5
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
_ADVICE = "give the address of a mirror with --base-url, or copy the files by hand (docs/glue_data.md)"


class DownloadWorkspace(Workspace):
    """``OUT/.download``: partial downloads stay in it for the next run."""

    hidden = ".download"
    command = "amos prepare glue-download"

    def can_continue(self) -> bool:
        return {path.name for path in self.root.iterdir()} > {"lock"}


def run(given: argparse.Namespace) -> None:
    """Download the files of the tasks into OUT.

    Raises:
        UserError: bad arguments; or a file cannot be downloaded, or is not the expected one. Tasks that are finished stay.
    """
    tasks = [TASKS[name] for name in parse_tasks(",".join(given.tasks) or "ALL", TASKS, TASKS)]
    if not given.base_url.startswith(("https://", "http://")):
        raise UserError(f"--base-url {given.base_url}: expected an address that begins with https://")
    if given.mrpc_dev_ids is not None and not given.mrpc_dev_ids.is_file():
        raise UserError(f"--mrpc-dev-ids {given.mrpc_dev_ids}: no such file")
    with DownloadWorkspace(given.out) as work:
        for task in tasks:
            target = given.out / _folder(task)
            if all((target / name).is_file() for name in _names(task)):
                say(f"{task.name} is already there: skipped", COMMAND)
            elif target.exists():
                raise UserError(
                    f"{target} exists, but lacks official files of {task.name}: remove it or give another OUT"
                )
            else:
                _download_task(task, target, work, given)
                say(f"{task.name}: {', '.join(sorted(path.name for path in target.iterdir()))}", COMMAND)


def _download_task(task: GlueTask, target: Path, work: Workspace, given: argparse.Namespace) -> None:
    own_list = given.mrpc_dev_ids if task.name == "MRPC" else None
    needed = [file for file in REMOTE_FILES[task.name] if own_list is None or file is not MRPC_DEV_IDS]
    fetched = [_fetch_once(file, work.root, given) for file in needed]
    unfinished = work.unfinished(task.name)
    try:
        if task.name == "MRPC":
            train, test, *dev_ids = fetched
            build_mrpc(train, test, dev_ids[0] if dev_ids else own_list, unfinished)
        elif task.name == "AX":
            shutil.copyfile(fetched[0], unfinished / _names(task)[0])
        else:
            extract_tables(fetched[0], task.name, _names(task), unfinished)
    except UserError:
        for path in fetched:  # so that the next run downloads it again
            path.unlink()
        raise
    unfinished.rename(target)
    for path in fetched:
        path.unlink()


def _fetch_once(file: RemoteFile, folder: Path, given: argparse.Namespace) -> Path:
    target, url = folder / file.name, f"{given.base_url.rstrip('/')}/{file.path}"
    known = None if given.accept_other_hashes else file
    if not target.exists():
        download_file(url, target, known)
    elif known is not None:  # a run was interrupted between download and unpacking
        check_hash(target, known, url)
    return target


def _folder(task: GlueTask) -> str:
    """Return the folder's name in the official download: ``diagnostic`` for AX."""
    return next(iter(task.files.values()))[0].split("/")[0]


def _names(task: GlueTask) -> list[str]:
    return [places[0].split("/")[1] for places in task.files.values()]


class _Download(io.BufferedWriter):
    """A file of at most ``LARGEST_BYTES`` that continues ``path``."""

    def __init__(self, path: Path, url: str) -> None:
        super().__init__(io.FileIO(path, "ab", opener=no_links))
        self._url = url

    def write(self, content: bytes) -> int:
        if self.tell() + len(content) > LARGEST_BYTES:
            self.truncate(0)
            size = f"{LARGEST_BYTES >> 20:,} MiB"
            raise UserError(f"{self._url} has more than {size}: this is not an official file; {_ADVICE}")
        return super().write(content)


def download_file(url: str, target: Path, known: RemoteFile | None) -> None:
    """Download ``url`` to ``target`` with the client of ``huggingface_hub``, which connects again where a connection ends.

    An unfinished download stays as ``target.part``, where a later try or run continues it. Tries wait 1, 2, 4, ... seconds.

    Args:
        known: the expected file; None if only its format is checked, by the code that opens it.

    Raises:
        UserError: the server refuses, cannot be reached, or sends another file than ``known``.
    """
    part = target.with_name(target.name + ".part")
    try:
        problem = _continue(url, part, known)
    finally:
        if part.exists() and part.stat().st_size == 0:
            part.unlink()
    if problem:
        raise UserError(
            f"{url} could not be downloaded ({problem}): check the connection and repeat the command, it continues where it "
            f"stopped; or {_ADVICE}"
        )
    if known is not None:
        check_hash(part, known, url)
    part.rename(target)


def _continue(url: str, part: Path, known: RemoteFile | None) -> str:
    """Append what is missing of ``part``; return why that failed, empty if it did not."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it warns of each lost connection
    problem = ""
    for number in range(TRIES):
        if number:
            sleep(2.0 ** (number - 1))
        with _Download(part, url) as stream:
            start = stream.tell()
            try:
                # Of a compressed answer, a part could not be continued.
                headers = {"Accept-Encoding": "identity"}
                http_get(url, stream, resume_size=start, headers=headers, displayed_filename=part.stem)
            except HfHubHTTPError as error:
                status = error.response.status_code
                problem = responses.get(status, f"status {status}")
                if status == REQUESTED_RANGE_NOT_SATISFIABLE:
                    stream.truncate(0)  # the part does not belong to the file on the server
                elif status not in _TEMPORARY:
                    raise UserError(f"{url}: the server answers {status} ({problem}): {_ADVICE}") from error
                continue
            except (UserError, TypeError, AttributeError):  # not of the network
                raise
            except Exception as error:  # which class a lost connection has depends on the version of huggingface_hub
                if isinstance(error, OSError) and error.errno is not None:  # of the disk
                    raise
                return str(error) or type(error).__name__
        if start == 0 or known is None or file_sha256(part) == known.sha256:
            return ""
        part.unlink()  # the beginning came from another version of the file: start again
        problem = "the file on the server has changed"
    return problem


def check_hash(path: Path, known: RemoteFile, url: str) -> None:
    """Remove ``path`` and raise :class:`UserError` if it is not the known file."""
    found = file_sha256(path)
    if found != known.sha256:
        size = path.stat().st_size
        path.unlink()
        raise UserError(
            f"{url}: sha256 {found} ({size} bytes) is not the published {known.sha256} ({known.bytes} bytes): repeat the "
            "command; if the file was really updated, give --accept-other-hashes"
        )
