"""The official files of GLUE: their addresses, sizes and hashes, and how to download one of them.

Sizes and sha256 are those that others have published, in ``datasets/glue/dataset_infos.json`` of Hugging Face's ``datasets``
repository, whose ``glue.py`` downloads the same addresses; they were not verified here. For SST-2, and for MRPC's training
file and list of development pairs, the same hashes are also known from other copies.
"""

import http.client
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Callable, Dict, Optional, Tuple

from amos_fairseq.errors import UserError
from amos_fairseq.files import no_links
from amos_fairseq.fingerprint import file_sha256

BASE_URL = "https://dl.fbaipublicfiles.com"


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


def _archive(name: str, size: int, sha256: str) -> Tuple[RemoteFile, ...]:
    return (RemoteFile(f"glue/data/{name}", size, sha256),)


REMOTE_FILES: Dict[str, Tuple[RemoteFile, ...]] = {
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
_TIMEOUT_SECONDS = 60
_READ_BYTES = 1 << 18
_TEMPORARY_ERRORS = (408, 425, 429, 500, 502, 503, 504)
_RANGE_NOT_SATISFIABLE = 416
_PARTIAL_CONTENT = 206
_ADVICE = "give the address of a mirror with --base-url, or copy the files by hand (docs/glue_data.md)"


class _Incomplete(Exception):
    """The connection ended before the file did."""


# Not every OSError: another try does not help on a full disk.
_NETWORK_ERRORS = (
    urllib.error.URLError,
    TimeoutError,
    ConnectionError,
    ssl.SSLError,
    http.client.HTTPException,
    _Incomplete,
)


def fetch(
    url: str,
    target: Path,
    known: Optional[RemoteFile],
    on_size: Callable[[int], object] = lambda size: None,
) -> None:
    """Download ``url`` to ``target``, with several tries that wait 1, 2, 4, ... seconds.

    An unfinished download stays as ``target.part``, where a later try or run continues it.

    Args:
        known: the expected file; None if only its format is checked, by the code that opens it.
        on_size: called with the number of bytes on disk.

    Raises:
        UserError: the server refuses, cannot be reached, or sends another file than ``known``.
    """
    part = target.with_name(target.name + ".part")
    problem: Exception = _Incomplete()
    for number in range(TRIES):
        if number:
            sleep(2.0 ** (number - 1))
        try:
            is_from_start = _continue(url, part, on_size)
        except urllib.error.HTTPError as error:
            if error.code == _RANGE_NOT_SATISFIABLE:  # the partial file does not belong to the file on the server
                part.unlink(missing_ok=True)
            elif error.code not in _TEMPORARY_ERRORS:
                raise UserError(f"{url}: the server answers {error.code} ({error.reason}): {_ADVICE}") from error
            problem = error
        except _NETWORK_ERRORS as error:
            problem = error
        else:
            if known is None or is_from_start or file_sha256(part) == known.sha256:
                break
            part.unlink()  # the beginning came from another version of the file: start again
            problem = _Incomplete("the file on the server has changed")
    else:
        reason = getattr(problem, "reason", None) or str(problem) or type(problem).__name__
        raise UserError(
            f"{url} could not be downloaded in {TRIES} tries ({reason}): check the connection and repeat the command, it "
            f"continues where it stopped; or {_ADVICE}"
        ) from problem
    if known is not None:
        check_hash(part, known, url)
    part.rename(target)


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


def _continue(url: str, part: Path, on_size: Callable[[int], object]) -> bool:
    """Return True if all of ``part`` comes from this response, False if the response was appended to it."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
        if answer.status != _PARTIAL_CONTENT:
            have = 0  # the server sends the whole file
        length = answer.headers.get("Content-Length")
        with open(part, "ab" if have else "wb", opener=no_links) as stream:
            size = have
            on_size(size)
            while chunk := answer.read(_READ_BYTES):
                size += len(chunk)
                if size > LARGEST_BYTES:
                    break
                stream.write(chunk)
                on_size(size)
    if size > LARGEST_BYTES:
        part.unlink()
        raise UserError(f"{url} has more than {LARGEST_BYTES >> 20:,} MiB: this is not an official file; {_ADVICE}")
    if length is not None and size - have < int(length):
        raise _Incomplete(f"the connection ended after {size} bytes")
    return have == 0
