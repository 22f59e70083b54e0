"""Download GLUE's official files; see ``download.sh --help``.

For each task: download -> check -> unpack into a temporary directory -> rename.
"""

import argparse
import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, List, Optional

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.preprocess.common.command import ending_in_one_line, progress_bar, say
from amos_fairseq.preprocess.common.processes import take_lock
from amos_fairseq.preprocess.glue.official_files import (
    BASE_URL,
    MRPC_DEV_IDS,
    REMOTE_FILES,
    RemoteFile,
    check_hash,
    fetch,
)
from amos_fairseq.preprocess.glue.tasks import TASKS, GlueTask, parse_tasks
from amos_fairseq.preprocess.glue.unpacking import build_mrpc, extract_tables

COMMAND = "download"
BASE_URL_VARIABLE = "GLUE_BASE_URL"
_HIDDEN = ".download"
_DESCRIPTION = f"""Download GLUE's official files, in the layout that prepare.sh expects.

Tasks: {", ".join(TASKS)}; all of them if none is given. Every file is checked against its published sha256. A task that
is already there is skipped, and an interrupted download is continued. MRPC is built from the files of
its authors. The data has its own licenses: docs/glue_data.md."""


@dataclass(frozen=True)
class Source:
    """The address to download from, and the checks. ``mrpc_dev_ids``: the user's list; None to download it."""

    base_url: str
    check_hashes: bool
    mrpc_dev_ids: Optional[Path]


def download(out: Path, tasks: List[GlueTask], source: Source) -> None:
    """Download the files of ``tasks`` into ``out``.

    Raises:
        UserError: a file cannot be downloaded, or is not the expected one; tasks that are finished stay.
    """
    with _work_directory(out) as work:
        for task in tasks:
            target = out / _folder(task)
            if _is_there(target, task):
                say(f"{task.name} is already there: skipped", COMMAND)
            elif target.exists():
                raise UserError(
                    f"{target} exists, but lacks official files of {task.name}: remove it or give another OUT"
                )
            else:
                _download_task(task, target, work, source)
                say(f"{task.name}: {', '.join(sorted(path.name for path in target.iterdir()))}", COMMAND)


@contextlib.contextmanager
def _work_directory(out: Path) -> Iterator[Path]:
    """Yield the hidden directory of one run; partial downloads stay in it for the next run."""
    if out.exists() and not out.is_dir():
        raise UserError(f"OUT {out} is not a directory")
    work = out / _HIDDEN
    work.mkdir(parents=True, exist_ok=True)
    lock = take_lock(work / "lock", f"another download.sh is writing {out}: wait for it, or give another OUT")
    try:
        yield work
    finally:
        for path in work.glob("*.unfinished"):
            shutil.rmtree(path)
        if {path.name for path in work.iterdir()} == {"lock"}:
            shutil.rmtree(work)
            if not any(out.iterdir()):
                out.rmdir()
        os.close(lock)


def _download_task(task: GlueTask, target: Path, work: Path, source: Source) -> None:
    fetched = [_fetch(file, work, source) for file in _needed(task, source)]
    unfinished = work / f"{task.name}.unfinished"
    unfinished.mkdir()
    _unpack(task, fetched, unfinished, source)
    unfinished.rename(target)
    for path in fetched:
        path.unlink()


def _needed(task: GlueTask, source: Source) -> List[RemoteFile]:
    own_list = task.name == "MRPC" and source.mrpc_dev_ids is not None
    return [file for file in REMOTE_FILES[task.name] if not (own_list and file is MRPC_DEV_IDS)]


def _fetch(file: RemoteFile, work: Path, source: Source) -> Path:
    target, url = work / file.name, f"{source.base_url}/{file.path}"
    known = file if source.check_hashes else None
    if target.exists():  # a run was interrupted between download and unpacking
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
        for path in fetched:  # so that the next run downloads it again
            path.unlink()
        raise


def _folder(task: GlueTask) -> str:
    """Return the folder's name in the official download: ``diagnostic`` for AX."""
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
    add("out", type=Path, metavar="OUT", help="output directory, prepare.sh's GLUE_DIR")
    add("tasks", nargs="*", metavar="TASK", help="tasks to download (default: all)")
    default = os.environ.get(BASE_URL_VARIABLE, BASE_URL)
    add("--base-url", default=default, help=f"a mirror; {BASE_URL_VARIABLE} sets it too (default: %(default)s)")
    add("--mrpc-dev-ids", type=Path, metavar="FILE", help="MRPC's list of development pairs, instead of downloading it")
    add("--accept-other-hashes", action="store_true", help="check only the format of the files")
    return parser


@report_user_errors()
def main(arguments: Optional[List[str]] = None) -> None:
    """Run the command. Exit with code 1 and one line on a user's mistake, with code 130 after Ctrl-C."""
    with ending_in_one_line("it continues where it stopped", COMMAND):
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
