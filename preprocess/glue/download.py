"""GLUE's official files from their servers; see ``download.sh --help``.

for each task: fetch -> check -> unpack beside -> rename
"""

import argparse
import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, List, Optional

from amos_fairseq.errors import UserError, report_user_errors
from preprocess.common.command import ending_in_one_line, progress_bar, say
from preprocess.common.locking import take_lock
from preprocess.glue.archives import extract_tables
from preprocess.glue.fetching import check_hash, fetch
from preprocess.glue.mrpc import build_mrpc
from preprocess.glue.remote_files import BASE_URL, MRPC_DEV_IDS, REMOTE_FILES, RemoteFile
from preprocess.glue.tasks import TASKS, GlueTask, parse_tasks

COMMAND = "download"
BASE_URL_VARIABLE = "GLUE_BASE_URL"
_HIDDEN = ".download"
_DESCRIPTION = f"""Fetch GLUE's official files, laid out as prepare.sh takes them.

Tasks: {", ".join(TASKS)}; all of them if none is named. Everything is checked against published sha256 sums. A task that
is there already is left alone, and a download that broke off is taken up again. MRPC is put together from the files of
its authors. The data has licences of its own: examples/glue/DATA.md."""


@dataclass(frozen=True)
class Source:
    """Where from, and how strictly. ``mrpc_dev_ids``: a list that the user has; None: it is fetched too."""

    base_url: str
    check_hashes: bool
    mrpc_dev_ids: Optional[Path]


def download(out: Path, tasks: List[GlueTask], source: Source) -> None:
    """Lay out the files of ``tasks`` in ``out``.

    Raises:
        UserError: a file cannot be had, or is not what it should be; tasks that were finished before stay.
    """
    with _room(out) as room:
        for task in tasks:
            target = out / _folder(task)
            if _is_there(target, task):
                say(f"{task.name} is there already: left alone", COMMAND)
            elif target.exists():
                raise UserError(
                    f"{target} exists, but lacks official files of {task.name}: remove it or give another OUT"
                )
            else:
                _download_task(task, target, room, source)
                say(f"{task.name}: {', '.join(sorted(path.name for path in target.iterdir()))}", COMMAND)


@contextlib.contextmanager
def _room(out: Path) -> Iterator[Path]:
    """The hidden directory of one run; what was fetched of an unfinished file stays in it for the next."""
    if out.exists() and not out.is_dir():
        raise UserError(f"OUT {out} is not a directory")
    room = out / _HIDDEN
    room.mkdir(parents=True, exist_ok=True)
    lock = take_lock(room / "lock", f"another download.sh is writing {out}: wait for it, or give another OUT")
    try:
        yield room
    finally:
        for path in room.glob("*.unfinished"):
            shutil.rmtree(path)
        if {path.name for path in room.iterdir()} == {"lock"}:
            shutil.rmtree(room)
            if not any(out.iterdir()):
                out.rmdir()
        os.close(lock)


def _download_task(task: GlueTask, target: Path, room: Path, source: Source) -> None:
    fetched = [_fetch(file, room, source) for file in _needed(task, source)]
    unfinished = room / f"{task.name}.unfinished"
    unfinished.mkdir()
    _unpack(task, fetched, unfinished, source)
    unfinished.rename(target)
    for path in fetched:
        path.unlink()


def _needed(task: GlueTask, source: Source) -> List[RemoteFile]:
    own_list = task.name == "MRPC" and source.mrpc_dev_ids is not None
    return [file for file in REMOTE_FILES[task.name] if not (own_list and file is MRPC_DEV_IDS)]


def _fetch(file: RemoteFile, room: Path, source: Source) -> Path:
    target, url = room / file.name, f"{source.base_url}/{file.path}"
    known = file if source.check_hashes else None
    if target.exists():  # a run was ended between fetching and unpacking
        if known is not None:
            check_hash(target, known, url)
        return target
    with progress_bar(file.bytes, file.name, "B") as bar:
        fetch(url, target, known, lambda size: bar.update(size - bar.n))
    return target


def _unpack(task: GlueTask, fetched: List[Path], directory: Path, source: Source) -> None:
    try:
        if task.name == "MRPC":
            train, test, *dev_ids = fetched
            build_mrpc(train, test, dev_ids[0] if dev_ids else source.mrpc_dev_ids, directory)
        elif task.name == "AX":
            shutil.copyfile(fetched[0], directory / _names(task)[0])
        else:
            extract_tables(fetched[0], task.name, _names(task), directory)
    except UserError:
        for path in fetched:  # so that the next run fetches it again
            path.unlink()
        raise


def _folder(task: GlueTask) -> str:
    """As the official download names it: ``diagnostic`` for AX."""
    return next(iter(task.files.values()))[0].split("/")[0]


def _names(task: GlueTask) -> List[str]:
    return [places[0].split("/")[1] for places in task.files.values()]


def _is_there(directory: Path, task: GlueTask) -> bool:
    return all((directory / name).is_file() for name in _names(task))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "download.sh", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="directory of the result, prepare.sh's GLUE_DIR")
    add("tasks", nargs="*", metavar="TASK", help="tasks to fetch (default: all)")
    default = os.environ.get(BASE_URL_VARIABLE, BASE_URL)
    add("--base-url", default=default, help=f"a mirror; also by {BASE_URL_VARIABLE} (default: %(default)s)")
    add("--mrpc-dev-ids", type=Path, metavar="FILE", help="MRPC's list of development pairs, instead of fetching it")
    add("--accept-other-hashes", action="store_true", help="check only the form of what is fetched")
    return parser


@report_user_errors()
def main(arguments: Optional[List[str]] = None) -> None:
    """The command. Exit status 1 and one line on a user's mistake, 130 after Ctrl-C."""
    with ending_in_one_line("it goes on where it stopped", COMMAND):
        given = build_parser().parse_intermixed_args(arguments)  # OUT --flag X TASK
        tasks = parse_tasks(",".join(given.tasks) or "ALL")
        if not given.base_url.startswith(("https://", "http://")):
            raise UserError(f"--base-url {given.base_url}: expected an address that begins with https://")
        if given.mrpc_dev_ids is not None and not given.mrpc_dev_ids.is_file():
            raise UserError(f"--mrpc-dev-ids {given.mrpc_dev_ids}: no such file")
        source = Source(given.base_url.rstrip("/"), not given.accept_other_hashes, given.mrpc_dev_ids)
        download(given.out, tasks, source)


if __name__ == "__main__":
    main()
