"""One file over the network: tried again, taken up where it broke off, checked when it is whole."""

import http.client
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from time import sleep
from typing import Callable, Optional

from amos_fairseq.data.fingerprint import file_sha256
from amos_fairseq.errors import UserError
from preprocess.glue.remote_files import RemoteFile

TRIES = 5
_TIMEOUT_SECONDS = 60
_READ_BYTES = 1 << 18
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_RANGE_NOT_SATISFIABLE = 416
_PARTIAL_CONTENT = 206


_ADVICE = "give the address of a mirror with --base-url, or lay the files out by hand (preprocess/glue/README.md)"


class _BrokenOff(Exception):
    """The connection ended before the file did."""


# Not OSError as a whole: a full disk is no reason to try again.
_PROBLEMS_OF_THE_NETWORK = (
    urllib.error.URLError,
    TimeoutError,
    ConnectionError,
    ssl.SSLError,
    http.client.HTTPException,
    _BrokenOff,
)


def fetch(
    url: str,
    target: Path,
    known: Optional[RemoteFile],
    on_size: Callable[[int], object] = lambda size: None,
) -> None:
    """``url`` to ``target``. Its unfinished part stays as ``target.part``, also for a later run.

    ``known``: what the file must be; None where only its form is checked, by whoever opens it. ``on_size`` is told how
    many bytes are there. Between tries it waits 1, 2, 4, ... seconds.

    Raises:
        UserError: the server refuses, cannot be reached, or gives another file than ``known``.
    """
    part = target.with_name(target.name + ".part")
    problem: Exception = _BrokenOff()
    for number in range(TRIES):
        if number:
            sleep(2.0 ** (number - 1))
        try:
            is_fresh = _continue(url, part, on_size)
        except urllib.error.HTTPError as error:
            if error.code == _RANGE_NOT_SATISFIABLE:  # the part is no part of what lies there now
                part.unlink(missing_ok=True)
            elif error.code not in _PASSING:
                raise UserError(f"{url}: the server answers {error.code} ({error.reason}): {_ADVICE}") from error
            problem = error
        except _PROBLEMS_OF_THE_NETWORK as error:
            problem = error
        else:
            if known is None or is_fresh or file_sha256(part) == known.sha256:
                break
            part.unlink()  # the beginning came from another version of the file: once more from the start
            problem = _BrokenOff("the file on the server has changed")
    else:
        reason = getattr(problem, "reason", None) or str(problem) or type(problem).__name__
        raise UserError(
            f"{url} could not be fetched in {TRIES} tries ({reason}): check the connection and repeat the command, it "
            f"goes on where it stopped; or {_ADVICE}"
        ) from problem
    if known is not None:
        check_hash(part, known, url)
    part.rename(target)


def check_hash(path: Path, known: RemoteFile, url: str) -> None:
    """:class:`UserError`, and ``path`` is removed, where it is not the known file."""
    found = file_sha256(path)
    if found != known.sha256:
        size = path.stat().st_size
        path.unlink()
        raise UserError(
            f"{url}: sha256 {found} ({size} bytes) is not the published {known.sha256} ({known.bytes} bytes): repeat the "
            "command; if the file was really renewed, give --accept-other-hashes"
        )


def _continue(url: str, part: Path, on_size: Callable[[int], object]) -> bool:
    """Whether all of ``part`` comes from this answer; False where the answer was put behind what was there."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
        if answer.status != _PARTIAL_CONTENT:
            have = 0  # the server sends all of it
        length = answer.headers.get("Content-Length")
        with open(part, "ab" if have else "wb") as stream:
            size = have
            on_size(size)
            while chunk := answer.read(_READ_BYTES):
                stream.write(chunk)
                size += len(chunk)
                on_size(size)
    if length is not None and size - have < int(length):
        raise _BrokenOff(f"the connection ended after {size} bytes")
    return have == 0
