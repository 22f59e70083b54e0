"""download.sh's program against a local server with made-up archives: whole, cut short, renewed, hostile."""

import hashlib
import io
import stat
import zipfile
from pathlib import Path

import pytest
from glue_files import FILES, MRPC_HEADER
from glue_server import make_archive, serve

from preprocess.glue import download, official_files
from preprocess.glue.official_files import REMOTE_FILES, RemoteFile
from preprocess.glue.tasks import TASKS
from preprocess.glue.unpacking import build_mrpc

RTE = {f"RTE/{name}": FILES[f"RTE/{name}"] for name in ("train.tsv", "dev.tsv")}
RTE = {**RTE, "RTE/test.tsv": "index\tsentence1\tsentence2\n0\tRain\tSnow\n", "RTE/readme.txt": "licence"}
MRPC_TRAIN = f'\ufeff{MRPC_HEADER}\r\n1\t11\t12\tA\tB\r\n0\t21\t22\tC "\tD\r\n1\t31\n0\t41\t42\tE\tF\r\n'
MRPC_TEST = f"\ufeff{MRPC_HEADER}\n1\t51\t52\tG\tH\n0\t61\t62\tI\tJ\n"
RTE_PATH = f"/{REMOTE_FILES['RTE'][0].path}"


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """Seconds that would have been waited between tries; and no proxy between here and this machine."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    seconds = []
    monkeypatch.setattr(official_files, "sleep", seconds.append)
    return seconds


@pytest.fixture
def server(monkeypatch):
    """All tasks, with the table of published files made to fit what is served."""
    contents = {}
    for name, task in TASKS.items():
        if name in ("MRPC", "AX"):
            continue
        entries = {places[0]: FILES.get(places[0], "index\tsentence\n0\tA\n") for places in task.files.values()}
        contents[REMOTE_FILES[name][0].path] = make_archive({**entries, f"{name}/original/large.jsonl": "{}"})
    contents[REMOTE_FILES["RTE"][0].path] = make_archive(RTE)
    contents[REMOTE_FILES["AX"][0].path] = FILES["diagnostic/diagnostic.tsv"].encode("utf-8")
    contents[official_files.MRPC_TRAIN.path] = MRPC_TRAIN.encode("utf-8")
    contents[official_files.MRPC_TEST.path] = MRPC_TEST.encode("utf-8")
    contents[official_files.MRPC_DEV_IDS.path] = b"41\t42\n"
    publish(monkeypatch, contents)
    with serve({f"/{path}": content for path, content in contents.items()}) as running:
        yield running


def publish(monkeypatch, contents):
    """Make sizes and sums of the table those of ``contents``."""
    for name, files in REMOTE_FILES.items():
        known = [RemoteFile(f.path, len(contents[f.path]), hashlib.sha256(contents[f.path]).hexdigest()) for f in files]
        monkeypatch.setitem(REMOTE_FILES, name, tuple(known))
    monkeypatch.setattr(download, "MRPC_DEV_IDS", REMOTE_FILES["MRPC"][2])


def run(server, out: Path, *arguments: str) -> None:
    download.main([str(out), "--base-url", f"{server.url}/", *map(str, arguments)])


def refused(capsys, server, out: Path, *arguments: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(server, out, *arguments)
    assert stop.value.code == 1
    line = capsys.readouterr().err.rstrip("\n").split("\n")[-1]
    assert line.startswith("amos_fairseq: error: ")
    return line


def test_all_tasks_are_laid_out(server, tmp_path, capsys):
    out = tmp_path / "glue"
    run(server, out)
    expected = {places[0] for task in TASKS.values() for places in task.files.values()} | {"RTE/readme.txt"}
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == expected
    assert (out / "MNLI" / "train.tsv").read_text(encoding="utf-8") == FILES["MNLI/train.tsv"]
    assert not (out / ".download").exists()
    asked = len(server.requests)
    run(server, out)
    assert len(server.requests) == asked
    assert "MNLI is already there" in capsys.readouterr().err


def test_published_table_is_complete():
    assert REMOTE_FILES.keys() == TASKS.keys()
    files = [file for group in REMOTE_FILES.values() for file in group]
    assert len({file.sha256 for file in files}) == len(files) == 12
    assert all(len(file.sha256) == 64 and int(file.sha256, 16) for file in files)


def test_mrpc_is_split_by_the_list(server, tmp_path):
    """The pair of the list is the development set; broken lines stay, for prepare.sh to count; no byte-order mark."""
    run(server, tmp_path / "glue", "MRPC")
    read = {name: (tmp_path / "glue" / "MRPC" / f"{name}.tsv").read_text() for name in ("train", "dev", "test")}
    assert read == {
        "train": f'{MRPC_HEADER}\n1\t11\t12\tA\tB\n0\t21\t22\tC "\tD\n1\t31\n',
        "dev": f"{MRPC_HEADER}\n0\t41\t42\tE\tF\n",
        "test": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t51\t52\tG\tH\n1\t61\t62\tI\tJ\n",
    }


def test_own_list_of_mrpc(server, tmp_path, capsys):
    del server.files[f"/{official_files.MRPC_DEV_IDS.path}"]
    line = refused(capsys, server, tmp_path / "glue", "MRPC")
    assert "the server answers 404" in line
    (tmp_path / "ids.tsv").write_text("11\t12\n")
    run(server, tmp_path / "glue", "MRPC", "--mrpc-dev-ids", tmp_path / "ids.tsv")
    assert (tmp_path / "glue" / "MRPC" / "dev.tsv").read_text() == f"{MRPC_HEADER}\n1\t11\t12\tA\tB\n"
    (tmp_path / "ids.tsv").write_text("11\t12\n98\t99\n")
    other = tmp_path / "other"
    assert "1 of its 2 pairs" in refused(capsys, server, other, "MRPC", "--mrpc-dev-ids", tmp_path / "ids.tsv")


def test_mrpc_refuses_another_file(tmp_path):
    for name in ("train", "test", "ids"):
        (tmp_path / name).write_text("a\tb\n")
    with pytest.raises(download.UserError, match="it is not MRPC's file"):
        build_mrpc(tmp_path / "train", tmp_path / "test", tmp_path / "ids", tmp_path)


def test_connection_that_breaks_is_taken_up_again(server, tmp_path, waits):
    content = server.files[RTE_PATH]
    server.failures = [503, "cut", "cut", 429]
    run(server, tmp_path / "glue", "RTE")
    half = len(content) // 2
    quarter = half + (len(content) - half) // 2
    ranges = [None, None, f"bytes={half}-", f"bytes={quarter}-", f"bytes={quarter}-"]
    assert server.requests == [(RTE_PATH, wanted) for wanted in ranges]
    assert waits == [1, 2, 4, 8]
    assert (tmp_path / "glue" / "RTE" / "readme.txt").read_text() == "licence"


def test_server_without_ranges_sends_all_again(server, tmp_path):
    server.failures, server.ranges = ["cut"], False
    run(server, tmp_path / "glue", "RTE")
    assert (tmp_path / "glue" / "RTE" / "train.tsv").is_file()
    assert len(server.requests) == 2


def test_part_of_an_older_version_is_dropped(server, tmp_path):
    """Also where it is longer than the file that lies there now."""
    for size in (10, 10**6):
        room = tmp_path / str(size) / ".download"
        room.mkdir(parents=True)
        (room / "RTE.zip.part").write_bytes(b"x" * size)
        run(server, room.parent, "RTE")
        assert {path.name for path in room.parent.iterdir()} == {"RTE"}


def test_server_that_stays_away(server, tmp_path, capsys):
    server.failures = [503] * 5
    line = refused(capsys, server, tmp_path / "glue", "RTE")
    assert "could not be downloaded in 5 tries (Service Unavailable)" in line
    assert not (tmp_path / "glue").exists()
    server.failures = ["cut"] * 5
    refused(capsys, server, tmp_path / "glue", "RTE")
    assert (tmp_path / "glue" / ".download" / "RTE.zip.part").stat().st_size > len(server.files[RTE_PATH]) * 0.9
    server.requests.clear()
    run(server, tmp_path / "glue", "RTE")  # a later run goes on
    assert server.requests[0][1].startswith("bytes=")
    assert {path.name for path in (tmp_path / "glue").iterdir()} == {"RTE"}


def test_nobody_listens(tmp_path, capsys):
    with serve({}) as gone:
        pass
    assert "Connection refused" in refused(capsys, gone, tmp_path / "glue", "RTE")


def test_other_content_is_refused_unless_accepted(server, tmp_path, capsys):
    server.files[RTE_PATH] = make_archive({**RTE, "RTE/readme.txt": "renewed"})
    line = refused(capsys, server, tmp_path / "glue", "RTE")
    assert f"is not the published {REMOTE_FILES['RTE'][0].sha256}" in line
    assert "--accept-other-hashes" in line
    assert not (tmp_path / "glue").exists()
    run(server, tmp_path / "glue", "RTE", "--accept-other-hashes")
    assert (tmp_path / "glue" / "RTE" / "readme.txt").read_text() == "renewed"


def linked() -> bytes:
    """An archive whose licence is a symbolic link to a file of the system."""
    stream = io.BytesIO(make_archive({name: text for name, text in RTE.items() if name != "RTE/readme.txt"}))
    with zipfile.ZipFile(stream, "a") as archive:
        entry = zipfile.ZipInfo("RTE/readme.txt")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc/hostname")
    return stream.getvalue()


def damaged() -> bytes:
    """One byte of a compressed text is another: the sum of the archive's own directory is wrong."""
    content = bytearray(make_archive({**RTE, "RTE/train.tsv": RTE["RTE/train.tsv"] + "x" * 1000}))
    content[60] ^= 0xFF
    return bytes(content)


HOSTILE = {
    "above": (lambda: make_archive({**RTE, "../evil.txt": "evil"}), "'../evil.txt' leads out of the archive"),
    "inside above": (lambda: make_archive({**RTE, "RTE/../../evil.txt": "evil"}), "leads out of the archive"),
    "absolute": (lambda: make_archive({**RTE, "/evil.txt": "evil"}), "leads out of the archive"),
    "drive": (lambda: make_archive({**RTE, "C:evil.txt": "evil"}), "leads out of the archive"),
    "link": (linked, "leads out of the archive"),
    "no archive": (lambda: b"<html>not here</html>", "is not a complete ZIP archive"),
    "cut": (lambda: make_archive(RTE)[:-30], "is not a complete ZIP archive"),
    "damaged": (damaged, "is not a complete ZIP archive"),
    "another task": (lambda: make_archive({"CoLA/train.tsv": "x"}), "contains no RTE/train.tsv"),
    "without test": (
        lambda: make_archive({k: v for k, v in RTE.items() if "test" not in k}),
        "contains no RTE/test.tsv",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_and_broken_archives(server, tmp_path, capsys, name):
    """Nothing of them is left, neither in OUT nor beside it, and a later run fetches anew."""
    make, message = HOSTILE[name]
    good = server.files[RTE_PATH]
    server.files[RTE_PATH] = make()
    assert message in refused(capsys, server, tmp_path / "a" / "glue", "RTE", "--accept-other-hashes")
    assert list((tmp_path / "a").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
    server.files[RTE_PATH] = good
    run(server, tmp_path / "a" / "glue", "RTE")


def test_too_large_a_file(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("preprocess.glue.unpacking.LARGEST_FILE_BYTES", 20)
    assert "not an official file" in refused(capsys, server, tmp_path / "glue", "RTE")


def test_what_lies_in_out_is_kept(server, tmp_path, capsys):
    (tmp_path / "RTE").mkdir()
    (tmp_path / "RTE" / "train.tsv").write_text("mine")
    assert "lacks official files of RTE: remove it" in refused(capsys, server, tmp_path, "RTE")
    assert (tmp_path / "RTE" / "train.tsv").read_text() == "mine"


def test_wrong_arguments(server, tmp_path, capsys):
    assert "unknown task 'SST'" in refused(capsys, server, tmp_path / "glue", "SST")
    assert "no such file" in refused(capsys, server, tmp_path / "glue", "--mrpc-dev-ids", tmp_path / "absent")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        download.main([str(tmp_path / "glue"), "--base-url", "ftp://x"])
    assert "expected an address that begins with https://" in capsys.readouterr().err
    assert not (tmp_path / "glue").exists()
