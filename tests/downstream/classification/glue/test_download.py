"""amos prepare glue-download against a local server of synthetic archives: complete, cut short, changed, malicious."""

import contextlib
import hashlib
import http.server
import io
import stat
import struct
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from failures import error_line
from huggingface_hub import constants, file_download
from preparing import prepare
from synthetic_glue import FILES, MRPC_HEADER

from amos_fairseq.downstream.classification.glue import download as glue_download
from amos_fairseq.downstream.classification.glue.download import REMOTE_FILES, RemoteFile
from amos_fairseq.downstream.classification.glue.tasks import TASKS
from amos_fairseq.downstream.classification.glue.unpacking import build_mrpc
from amos_fairseq.errors import UserError

RTE = {f"RTE/{name}": FILES[f"RTE/{name}"] for name in ("train.tsv", "dev.tsv")}
RTE = {**RTE, "RTE/test.tsv": "index\tsentence1\tsentence2\n0\tRain\tSnow\n", "RTE/readme.txt": "licence"}
MRPC_TRAIN = f'\ufeff{MRPC_HEADER}\r\n1\t11\t12\tA\tB\r\n0\t21\t22\tC "\tD\r\n1\t31\n0\t41\t42\tE\tF\r\n'
MRPC_TEST = f"\ufeff{MRPC_HEADER}\n1\t51\t52\tG\tH\n0\t61\t62\tI\tJ\n"
RTE_PATH = f"/{REMOTE_FILES['RTE'][0].path}"


def make_archive(entries: dict[str, str]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in entries.items():
            archive.writestr(name, text.encode("utf-8"))
    return stream.getvalue()


def rte_with(entries: dict[str, str]) -> bytes:
    return make_archive(RTE | entries)


def rte_without(name: str) -> bytes:
    return make_archive({other: text for other, text in RTE.items() if other != name})


class Server:
    """``files`` by path; ``failures``: what happens to the first requests (a status, or "cut": half of the content).

    ``requests``: path and ``Range`` header of each request so far. Ranges are honoured unless ``ranges`` is false.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.failures: list[object] = []
        self.requests: list[tuple[str, str | None]] = []
        self.ranges = True
        self.url = ""

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        wanted = handler.headers.get("Range")
        self.requests.append((handler.path, wanted))
        failure = self.failures.pop(0) if self.failures else None
        content = self.files.get(handler.path)
        if isinstance(failure, int) or content is None:
            handler.send_error(failure if isinstance(failure, int) else 404)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if start and start >= len(content):
            handler.send_error(416)
            return
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(content) - start))
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.end_headers()
        body = content[start:]
        handler.wfile.write(body[: len(body) // 2] if failure == "cut" else body)


@contextlib.contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Server]:
    server = Server(files)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server.url = f"http://127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """Record the seconds between tries instead of waiting; no proxy for the local server; small parts of its files."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    seconds = []
    monkeypatch.setattr(glue_download, "sleep", seconds.append)
    monkeypatch.setattr(file_download.time, "sleep", seconds.append)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1)
    return seconds


@pytest.fixture
def server(monkeypatch):
    """A server of all tasks, and a table of published files with their sizes and sums."""
    contents = {}
    for name, task in TASKS.items():
        if name in ("MRPC", "AX"):
            continue
        entries = {places[0]: FILES.get(places[0], "index\tsentence\n0\tA\n") for places in task.files.values()}
        contents[REMOTE_FILES[name][0].path] = make_archive({**entries, f"{name}/original/large.jsonl": "{}"})
    contents[REMOTE_FILES["RTE"][0].path] = make_archive(RTE)
    contents[REMOTE_FILES["AX"][0].path] = FILES["diagnostic/diagnostic.tsv"].encode("utf-8")
    contents[glue_download.MRPC_TRAIN.path] = MRPC_TRAIN.encode("utf-8")
    contents[glue_download.MRPC_TEST.path] = MRPC_TEST.encode("utf-8")
    contents[glue_download.MRPC_DEV_IDS.path] = b"41\t42\n"
    publish(monkeypatch, contents)
    with serve({f"/{path}": content for path, content in contents.items()}) as running:
        yield running


def publish(monkeypatch, contents):
    """Make sizes and sums of the table those of ``contents``."""
    for name, files in REMOTE_FILES.items():
        known = [RemoteFile(f.path, len(contents[f.path]), hashlib.sha256(contents[f.path]).hexdigest()) for f in files]
        monkeypatch.setitem(REMOTE_FILES, name, tuple(known))
    monkeypatch.setattr(glue_download, "MRPC_DEV_IDS", REMOTE_FILES["MRPC"][2])


def run(server, out: Path, *arguments: str) -> None:
    prepare("glue-download")([out, "--base-url", f"{server.url}/", *arguments])


def refused(capsys, server, out: Path, *arguments: object) -> str:
    return error_line(capsys, lambda given: run(server, out, *given), *arguments, reports_progress=True)


def test_all_tasks_are_written(server, tmp_path, capsys):
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
    """The pairs of the list are the development set; broken lines remain for amos prepare to count; no byte-order mark."""
    run(server, tmp_path / "glue", "MRPC")
    read = {name: (tmp_path / "glue" / "MRPC" / f"{name}.tsv").read_text() for name in ("train", "dev", "test")}
    assert read == {
        "train": f'{MRPC_HEADER}\n1\t11\t12\tA\tB\n0\t21\t22\tC "\tD\n1\t31\n',
        "dev": f"{MRPC_HEADER}\n0\t41\t42\tE\tF\n",
        "test": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t51\t52\tG\tH\n1\t61\t62\tI\tJ\n",
    }


def test_own_list_of_mrpc(server, tmp_path, capsys):
    del server.files[f"/{glue_download.MRPC_DEV_IDS.path}"]
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
    with pytest.raises(UserError, match="it is not MRPC's file"):
        build_mrpc(tmp_path / "train", tmp_path / "test", tmp_path / "ids", tmp_path)


def test_broken_connection_is_resumed(server, tmp_path, waits):
    content = server.files[RTE_PATH]
    server.failures = [503, "cut", "cut", 429]
    run(server, tmp_path / "glue", "RTE")
    half = len(content) // 2
    quarter = half + (len(content) - half) // 2
    ranges = [None, None, f"bytes={half}-", f"bytes={quarter}-", f"bytes={quarter}-"]
    assert server.requests == [(RTE_PATH, wanted) for wanted in ranges]
    assert waits == [1, 1, 1, 1]
    assert (tmp_path / "glue" / "RTE" / "readme.txt").read_text() == "licence"


def test_server_without_ranges_sends_the_whole_file_again(server, tmp_path):
    server.failures, server.ranges = ["cut"], False
    run(server, tmp_path / "glue", "RTE")
    assert (tmp_path / "glue" / "RTE" / "train.tsv").is_file()
    assert len(server.requests) == 2


def test_part_of_another_version_is_discarded(server, tmp_path):
    """Also where it is longer than the file on the server."""
    for size in (10, 10**6):
        folder = tmp_path / str(size) / ".download"
        folder.mkdir(parents=True)
        (folder / "RTE.zip.part").write_bytes(b"x" * size)
        run(server, folder.parent, "RTE")
        assert {path.name for path in folder.parent.iterdir()} == {"RTE"}


def test_unavailable_server(server, tmp_path, capsys, waits):
    server.failures = [503] * 5
    line = refused(capsys, server, tmp_path / "glue", "RTE")
    assert "could not be downloaded (Service Unavailable)" in line
    assert not (tmp_path / "glue").exists()
    assert waits == [1, 2, 4, 8]
    server.failures = ["cut"] * 100
    refused(capsys, server, tmp_path / "glue", "RTE")
    assert (tmp_path / "glue" / ".download" / "RTE.zip.part").stat().st_size > len(server.files[RTE_PATH]) * 0.9
    server.requests.clear()
    server.failures.clear()
    run(server, tmp_path / "glue", "RTE")  # a later run continues
    assert server.requests[0][1].startswith("bytes=")
    assert {path.name for path in (tmp_path / "glue").iterdir()} == {"RTE"}


def test_unknown_status(server, tmp_path, capsys):
    server.failures = [599]
    assert "the server answers 599 (status 599)" in refused(capsys, server, tmp_path / "glue", "RTE")


def test_refused_connection(tmp_path, capsys, caplog):
    with serve({}) as gone:
        pass
    assert "Connection refused" in refused(capsys, gone, tmp_path / "glue", "RTE")
    assert not [record for record in caplog.records if record.name.startswith("huggingface_hub")]


def test_an_error_of_ours_is_not_one_of_the_network(server, tmp_path, monkeypatch):
    monkeypatch.setattr(file_download, "http_get", lambda url: None)
    with pytest.raises(TypeError):
        run(server, tmp_path / "glue", "RTE")


def test_other_content_is_refused_unless_accepted(server, tmp_path, capsys):
    server.files[RTE_PATH] = rte_with({"RTE/readme.txt": "changed"})
    line = refused(capsys, server, tmp_path / "glue", "RTE")
    assert f"is not the published {REMOTE_FILES['RTE'][0].sha256}" in line
    assert "--accept-other-hashes" in line
    assert not (tmp_path / "glue").exists()
    run(server, tmp_path / "glue", "RTE", "--accept-other-hashes")
    assert (tmp_path / "glue" / "RTE" / "readme.txt").read_text() == "changed"


def linked() -> bytes:
    """An archive whose licence is a symbolic link to a file of the system."""
    stream = io.BytesIO(rte_without("RTE/readme.txt"))
    with zipfile.ZipFile(stream, "a") as archive:
        entry = zipfile.ZipInfo("RTE/readme.txt")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc/hostname")
    return stream.getvalue()


def compressed_by(method: int) -> bytes:
    """An archive whose licence is compressed by a method that zipfile decompresses in parts of any size."""
    stream = io.BytesIO(rte_without("RTE/readme.txt"))
    with zipfile.ZipFile(stream, "a", method) as archive:
        archive.writestr("RTE/readme.txt", bytes(10**6))
    return stream.getvalue()


def with_size(declared: int) -> bytes:
    """An archive that declares another size of its licence, of 7 bytes, in both of its headers."""
    content = make_archive(RTE)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entry = archive.getinfo("RTE/readme.txt")
    sizes = struct.pack("<II", entry.compress_size, entry.file_size)
    assert content.count(sizes) == 2
    return content.replace(sizes, struct.pack("<II", entry.compress_size, declared))


def damaged() -> bytes:
    """An archive with one wrong byte, which its own checksum shows."""
    content = bytearray(rte_with({"RTE/train.tsv": RTE["RTE/train.tsv"] + "x" * 1000}))
    content[60] ^= 0xFF
    return bytes(content)


MALICIOUS = {
    "above": (lambda: rte_with({"../evil.txt": "evil"}), "'../evil.txt' leads out of the archive"),
    "inside above": (lambda: rte_with({"RTE/../../evil.txt": "evil"}), "leads out of the archive"),
    "absolute": (lambda: rte_with({"/evil.txt": "evil"}), "leads out of the archive"),
    "drive": (lambda: rte_with({"C:evil.txt": "evil"}), "leads out of the archive"),
    "link": (linked, "leads out of the archive"),
    "bzip2": (lambda: compressed_by(zipfile.ZIP_BZIP2), "'RTE/readme.txt' is not compressed by deflate"),
    "lzma": (lambda: compressed_by(zipfile.ZIP_LZMA), "'RTE/readme.txt' is not compressed by deflate"),
    "larger than declared": (lambda: with_size(3), "is not a complete ZIP archive (Bad CRC-32"),
    "declared as 3 GiB": (lambda: with_size(3 << 30), "its files would take 3,072 MiB"),
    "many files": (lambda: rte_with({f"RTE/{i}.txt": "x" * 2**20 for i in range(1025)}), "would take 1,025 MiB"),
    "control characters": (lambda: rte_with({"RTE/a\x1b[2J.txt": "x"}), "a character that cannot be printed"),
    "long name": (lambda: rte_with({f"RTE/{'x' * 10**4}.txt": "x"}), "has 10,008 characters"),
    "no archive": (lambda: b"<html>not here</html>", "is not a complete ZIP archive"),
    "cut": (lambda: make_archive(RTE)[:-30], "is not a complete ZIP archive"),
    "damaged": (damaged, "is not a complete ZIP archive"),
    "another task": (lambda: make_archive({"CoLA/train.tsv": "x"}), "contains no RTE/train.tsv"),
    "without test": (lambda: rte_without("RTE/test.tsv"), "contains no RTE/test.tsv"),
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_malicious_and_broken_archives(server, tmp_path, capsys, name):
    """Nothing of them remains, neither in OUT nor beside it, and a later run downloads again."""
    make, message = MALICIOUS[name]
    good = server.files[RTE_PATH]
    server.files[RTE_PATH] = make()
    assert message in refused(capsys, server, tmp_path / "a" / "glue", "RTE", "--accept-other-hashes")
    assert list((tmp_path / "a").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
    server.files[RTE_PATH] = good
    run(server, tmp_path / "a" / "glue", "RTE")


def test_too_large_a_file(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("amos_fairseq.downstream.classification.glue.unpacking.LARGEST_BYTES", 20)
    assert "not an official file" in refused(capsys, server, tmp_path / "glue", "RTE")


def test_an_endless_download_ends(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(glue_download, "LARGEST_BYTES", 100)
    for flags in ([], ["--accept-other-hashes"]):
        line = refused(capsys, server, tmp_path / "glue", "RTE", *flags)
        assert "has more than 0 MiB: this is not an official file" in line
        assert not (tmp_path / "glue").exists()


def test_a_download_is_not_written_through_a_link(server, tmp_path, capsys):
    work = tmp_path / "glue" / ".download"
    work.mkdir(parents=True)
    (tmp_path / "precious").write_text("precious")
    (work / "RTE.zip.part").symlink_to(tmp_path / "precious")
    assert "RTE.zip.part is a link" in refused(capsys, server, tmp_path / "glue", "RTE")
    assert (tmp_path / "precious").read_text() == "precious"


def test_other_files_in_out_are_unchanged(server, tmp_path, capsys):
    (tmp_path / "RTE").mkdir()
    (tmp_path / "RTE" / "train.tsv").write_text("mine")
    assert "lacks official files of RTE: remove it" in refused(capsys, server, tmp_path, "RTE")
    assert (tmp_path / "RTE" / "train.tsv").read_text() == "mine"


def test_wrong_arguments(server, tmp_path, capsys):
    assert "unknown task 'SST'" in refused(capsys, server, tmp_path / "glue", "SST")
    assert "no such file" in refused(capsys, server, tmp_path / "glue", "--mrpc-dev-ids", tmp_path / "absent")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        prepare("glue-download")([tmp_path / "glue", "--base-url", "ftp://x"])
    assert "expected an address that begins with https://" in capsys.readouterr().err
    assert not (tmp_path / "glue").exists()
