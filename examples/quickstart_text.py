"""Check the text file of the quickstart before anything is installed or written; print its sha256.

It uses only the standard library, to run before the installation; prepare.sh checks compressed files.
"""

import codecs
import hashlib
import sys
from pathlib import Path

COMPRESSED = {".gz", ".xz", ".zst"}
CHUNK_BYTES = 1 << 20


def check_text(path: Path) -> str:
    """Return the sha256 of a text file.

    Raises:
        ValueError: the file is missing, empty or not UTF-8, with a message for the user.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a text file, or no argument for the text of the documentation")
    decoder = codecs.getincrementaldecoder("utf-8")()
    digest = hashlib.sha256()
    has_text = False
    position = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            if path.suffix in COMPRESSED:
                has_text = True
                continue
            pending = len(decoder.getstate()[0])
            try:
                has_text = bool(decoder.decode(chunk).strip()) or has_text
            except UnicodeDecodeError as error:
                raise not_utf8(path, position - pending + error.start) from None
            position += len(chunk)
    if decoder.getstate()[0]:
        raise not_utf8(path, position - len(decoder.getstate()[0]))
    if not has_text:
        raise ValueError(f"{path}: this file contains no text; give one with some thousand sentences")
    return digest.hexdigest()


def not_utf8(path: Path, position: int) -> ValueError:
    """Return the error for a byte that is not UTF-8; positions count from 0."""
    return ValueError(f"{path}: not UTF-8 at byte {position}; convert it, for example: iconv -f latin1 -t utf-8")


if __name__ == "__main__":
    try:
        print(check_text(Path(sys.argv[1])))
    except (OSError, ValueError) as error:
        sys.exit(f"amos_fairseq: error: {error}")
