"""``amos prepare text``: convert raw text to a binarized corpus for ``fairseq-train``.

OUT/.prepare/made_of                hash of settings and inputs: the same command continues here
             text/                  the inputs in one pass: files of documents, validation text, sample for the vocabulary
             tokenizer/             learned from the sample, or the user's
             text/NNNNN.npz         a file of documents, encoded by one of the processes; its text is removed
             corpus/                all of them, joined by one writer; moved into OUT, corpus.json last

A folder has its name once it is complete, so an interrupted run repeats only what was not finished.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.files import (
    CORPUS_FILE,
    DICTIONARY_FILE,
    TOKENIZER_DIRECTORY,
    file_sha256,
    joined_sha256,
    json_text,
    take_lock,
    whole_folder,
    write_text,
)
from amos_fairseq.inputs.documents import DocumentFile
from amos_fairseq.inputs.files import files_of
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.process import version_of
from amos_fairseq.text import DEFAULT_VOCAB_SIZE
from amos_fairseq.text.encoding import (
    LARGEST_SHARE,
    NUM_FAIRSEQ_SYMBOLS,
    KilledWorkerError,
    available_processors,
    describe_unknown,
    encode_file,
    encoded_file,
    in_own_process,
    join_encoded,
    process_pool,
    start_encoding_process,
    unknown_pieces,
    use_threads,
)
from amos_fairseq.text.prepared_data import check_paths
from amos_fairseq.text.split import SAMPLE, VALID, CorpusSettings, Split, group_into_shards, split_corpus, text_file
from amos_fairseq.text.tokenization import load_tokenizer, read_tokenizer
from amos_fairseq.text.tokenization.conversion import check_on_text
from amos_fairseq.text.tokenization.exported import export_obstacle
from amos_fairseq.text.tokenization.tokenizer import SPACE, SPECIAL_SYMBOLS, Tokenizer
from amos_fairseq.text.vocabulary import learn_tokenizer
from amos_fairseq.untrusted import is_unicode, read_json

UNFINISHED, _MADE_OF = ".prepare", "made_of"
_MEGABYTE = 1_000_000
# Where many pieces are unknown, with a given tokenizer and with one that was learned.
ADVICE = (
    "this tokenizer does not fit the text: give another one, or none, so that one is learned",
    "give a larger --vocab-size or --sample-megabytes",
)
_LIBRARIES = ("fairseq-fixed", "sentencepiece", "tokenizers")
# What docs/start.md recommends: for texts of up to so many tokens a recipe, and the tokens that it reads.
RECOMMENDED = (
    (15e6, "mlm_modern_mini optimization.max_update=4000", 16_384_000),
    (3e8, "mlm_modern_mini", 65_536_000),
    (4e9, "electra_small", 16_384_000_000),
    (math.inf, "amos_base", 131_072_000_000),
)
TRIED_LINES = 500  # of each input, by a given tokenizer
RARE_CHARACTER = "\U0001242b"  # a numeral in cuneiform, which no vocabulary has but as bytes


def run(arguments: argparse.Namespace) -> None:
    # What can be checked is checked before any work.
    paths, out = arguments.text, arguments.out
    check_paths(paths, out)
    if ":" in str(out):
        raise UserError(
            f"--out {out} has a colon, by which fairseq separates shards: give another folder, or a relative path"
        )
    settings, workers = _settings(arguments), arguments.workers or available_processors()
    for path in paths:
        DocumentFile(path, settings.text_column, settings.document).print_first()
    inputs = _describe_inputs(paths)
    described = json_text({"settings": settings.describe(), "inputs": [facts["sha256"] for facts in inputs]})
    made_of = hashlib.sha256(described.encode()).hexdigest()
    if _is_finished(out, made_of):
        say(f"{out} is finished already, with these inputs and settings: nothing to do")
        return
    with _unfinished_corpus(out, made_of) as root:
        split = _read_inputs(root / "text", paths, settings, arguments.protect)
        tokenizer = _make_tokenizer(root, settings, workers)
        if tokenizer.protected:
            say(
                f"never masked, sampled or predicted: {shorten(' '.join(tokenizer.protected), 200, placeholder=' ...')}"
            )
        shards = shards_of(split, settings.shard_bytes)
        _encode(root, shards, workers)
        manifest = {"made_of": made_of} | _join(root, out, inputs, split, shards, settings, tokenizer)
        (root / "corpus" / CORPUS_FILE).write_text(json_text(manifest), encoding="utf-8")
        _publish(root / "corpus", out)
    say(describe_unknown(manifest["train"], ADVICE[settings.tokenizer is None], LARGEST_SHARE))
    counts = f"{manifest['train']['tokens']:,} tokens to train on, {manifest['valid']['tokens']:,} to validate"
    if getattr(arguments, "for_adapt", False):  # which has a recipe of its own
        say(counts)
    else:
        say(f"{counts}; {describe_recommended(manifest['train']['tokens'])}")
        data = shlex.quote(f"task.data={manifest['task_data']}")
        say(f"done: train with {data} (fairseq-train DATA); counts and hashes in {out}/{CORPUS_FILE}")


def describe_recommended(num_tokens: int) -> str:
    """Return how often the recipe that docs/start.md recommends reads a text of ``num_tokens``."""
    recipe, num_read = next((recipe, read) for most, recipe, read in RECOMMENDED if num_tokens <= most)
    times = num_read / max(1, num_tokens)
    return f"amos train {recipe} reads them {f'{times:,.0f}' if times >= 10 else f'{times:.2g}'} times"


def _describe_inputs(paths: list[Path]) -> list[dict[str, Any]]:
    sizes = [sum(file.stat().st_size for file in files_of(path)) for path in paths]
    with progress_bar(sum(sizes), "hash", "B", delay=2) as bar:
        hashes = [joined_sha256(files_of(path), bar.update) for path in paths]
    facts = zip(paths, sizes, hashes, strict=True)
    return [{"name": path.name, "bytes": size, "sha256": sha256} for path, size, sha256 in facts]


def _is_finished(out: Path, made_of: str) -> bool:
    """Return whether ``out`` has the corpus of these inputs and settings; refuse a folder that has anything else."""
    manifest = read_json(out / CORPUS_FILE, "give another --out", optional=True)
    begun = out / UNFINISHED / _MADE_OF
    if manifest is not None or begun.is_file():
        is_other = made_of != (begun.read_text() if manifest is None else manifest.get("made_of"))
    else:
        is_other = out.exists() and (not out.is_dir() or any(path.name != UNFINISHED for path in out.iterdir()))
    if is_other:
        raise UserError(f"--out {out} is not empty, and was not made of these inputs and settings: give another folder")
    return manifest is not None


@contextlib.contextmanager
def _unfinished_corpus(out: Path, made_of: str) -> Iterator[Path]:
    """Lock ``OUT/.prepare`` and yield it. Remove it after the body, unless the same command can continue it."""
    root, is_new = out / UNFINISHED, not out.exists()
    root.mkdir(parents=True, exist_ok=True)
    lock = take_lock(root / "lock", f"another amos prepare is writing {out}", "wait for it, or give another --out")
    try:
        write_text(root / _MADE_OF, made_of)
        yield root
    except BaseException as error:
        # After a killed process the same command may succeed with fewer workers; other errors need other arguments.
        is_killed = isinstance(error, KilledWorkerError)
        part = root / (TOKENIZER_DIRECTORY if is_killed else "text")
        if not part.is_dir() or (isinstance(error, UserError) and not is_killed):
            shutil.rmtree(root)
        raise
    else:
        shutil.rmtree(root)
    finally:
        if is_new and not any(out.iterdir()):
            out.rmdir()
        lock.release()


def _read_inputs(text: Path, paths: list[Path], settings: CorpusSettings, markers: list[str]) -> Split:
    record = text / "split.json"
    if not text.is_dir():
        size = sum(file.stat().st_size for path in paths for file in files_of(path))
        with whole_folder(text) as directory, progress_bar(size, "read", "B") as bar:
            split = split_corpus(paths, directory, settings, bar.update, markers)
            (directory / record.name).write_text(json_text(dataclasses.asdict(split)), encoding="utf-8")
    return Split(**read_json(record, "what is unfinished was removed, repeat the command"))


def _make_tokenizer(root: Path, settings: CorpusSettings, workers: int) -> Tokenizer:
    place, sample = root / TOKENIZER_DIRECTORY, root / "text" / SAMPLE
    if not place.is_dir():
        with whole_folder(place) as directory:
            if settings.tokenizer is not None:
                settings.tokenizer.save(directory)
            else:
                size = f"{sample.stat().st_size / 1e6:.1f} MB of text"
                say(f"learn {settings.vocab_size} pieces from {size}")
                in_own_process(functools.partial(_learn, sample, settings, workers), directory)
    return load_tokenizer(place)


def _learn(sample: Path, settings: CorpusSettings, workers: int, directory: Path) -> None:
    use_threads(workers)
    learn_tokenizer(sample, settings.vocab_size, settings.cased, settings.protected).save(directory)


def shards_of(split: Split, shard_bytes: int) -> dict[str, list[str]]:
    """Return the names of the files of text by shard, the validation text with the first."""
    groups, numbers = group_into_shards([sum(group) for group in split.train], shard_bytes), itertools.count()
    shards = {}
    for number, shard in enumerate(groups):
        files = [text_file(next(numbers)) for group in shard for _ in split.train[group]]
        shards["." if len(groups) == 1 else f"shard{number}"] = [VALID, *files] if number == 0 else files
    return shards


def _encode(root: Path, shards: dict[str, list[str]], workers: int) -> None:
    files = [root / "text" / name for name in itertools.chain.from_iterable(shards.values())]
    waiting = [file for file in files if not encoded_file(file).exists()]
    with (
        progress_bar(sum(file.stat().st_size for file in waiting), "encode", "B") as bar,
        process_pool(workers, start_encoding_process, root / TOKENIZER_DIRECTORY) as map_in_order,
    ):
        for size in map_in_order(encode_file, waiting):
            bar.update(size)


def _join(
    root: Path,
    out: Path,
    inputs: list[dict[str, Any]],
    split: Split,
    shards: dict[str, list[str]],
    settings: CorpusSettings,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Write the shards and the tokenizer to ``.prepare/corpus``; return the content of ``corpus.json``."""
    corpus = root / "corpus"
    shutil.rmtree(corpus, ignore_errors=True)
    tokenizer.save(corpus / TOKENIZER_DIRECTORY)
    records: list[dict[str, Any]] = []
    for name, files in shards.items():
        texts = {"train": [encoded_file(root / "text" / file) for file in files if file != VALID]}
        if VALID in files:
            texts["valid"] = [encoded_file(root / "text" / VALID)]
        records.append({"directory": name, **_write_shard(corpus / name, texts, tokenizer)})
        shutil.copyfile(corpus / TOKENIZER_DIRECTORY / DICTIONARY_FILE, corpus / name / DICTIONARY_FILE)
    train_counts = [record["train"] for record in records]
    return {
        "task_data": ":".join(str(out / name) for name in shards),
        "settings": settings.describe(),
        "versions": {library: version_of(library) for library in _LIBRARIES},
        "tokenizer": {**tokenizer.settings(), "pieces": len(tokenizer), "sha256": tokenizer.sha256},
        "vocabulary_sample": split.sample,
        "inputs": [facts | counts for facts, counts in zip(inputs, split.inputs, strict=True)],
        "train": _with_shares({name: sum(counts[name] for counts in train_counts) for name in train_counts[0]}),
        "valid": records[0].get("valid"),
        "shards": records,
    }


def _write_shard(directory: Path, texts: dict[str, list[Path]], tokenizer: Tokenizer) -> dict[str, Any]:
    """Join the encoded files of each text; return the counts and hashes for ``corpus.json``."""
    directory.mkdir(exist_ok=True)
    record = {}
    for name, files in texts.items():
        record[name] = _with_shares(join_encoded(files, directory / name, len(tokenizer) + NUM_FAIRSEQ_SYMBOLS))
    paths = [path for path in sorted(directory.iterdir()) if path.suffix in (".bin", ".idx")]
    return record | {"sha256": {path.name: file_sha256(path) for path in paths}}


def _with_shares(counts: dict[str, Any]) -> dict[str, Any]:
    return counts | {
        **unknown_pieces(counts["unknown"], counts["pieces"]),
        "pieces_per_word": counts["pieces"] / max(1, counts["words"]),
    }


def _publish(corpus: Path, out: Path) -> None:
    """Move all files into ``out``, ``corpus.json`` last. After an interruption they are written and moved again."""
    for path in sorted(corpus.rglob("*"), key=lambda path: (path.name == CORPUS_FILE, path)):
        target = out / path.relative_to(corpus)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            os.replace(path, target)


def _settings(arguments: argparse.Namespace) -> CorpusSettings:
    protected = list(dict.fromkeys(arguments.protect))
    for token in protected:
        if token in SPECIAL_SYMBOLS or not is_unicode(token) or re.search(rf"[\s{SPACE}]|^$", token):
            raise UserError(f"--protect {token!a}: give a token without spaces, other than {' '.join(SPECIAL_SYMBOLS)}")
    tokenizer = size = None
    if arguments.tokenizer is not None:
        tokenizer, protected = _read_tokenizer(arguments, protected), []
        cased = tokenizer.cased
    else:
        cased = arguments.cased is not False
        size = DEFAULT_VOCAB_SIZE if arguments.vocab_size is None else arguments.vocab_size
    sizes = {
        f"{name}_bytes": max(1, round(getattr(arguments, f"{name}_megabytes") * _MEGABYTE))
        for name in ("shard", "valid", "sample")
    }
    return CorpusSettings(
        vocab_size=size,
        tokenizer=tokenizer,
        cased=cased,
        seed=arguments.seed,
        valid_share=arguments.valid_share,
        **sizes,
        text_column=arguments.text_column,
        document=arguments.document,
        protected=protected,
    )


def _read_tokenizer(arguments: argparse.Namespace, protected: list[str]) -> Tokenizer:
    if arguments.vocab_size is not None or arguments.cased is not None:
        raise UserError("--tokenizer determines pieces and case: leave out --vocab-size, --cased and --uncased")
    lines = _first_lines(arguments)
    tokenizer = read_tokenizer(arguments.tokenizer, arguments.vocabulary, lines)
    if protected:
        tokenizer = tokenizer.with_protected(protected)
    check_on_text(tokenizer, lines)
    # What would otherwise show after hours: no piece for unknown characters, no export.
    if not any(start < end for _, start, end in tokenizer.encode_with_offsets(RARE_CHARACTER)):
        say(
            f"WARNING: {arguments.tokenizer} has no unknown token: it leaves out each character that its vocabulary lacks"
        )
    if obstacle := export_obstacle(tokenizer):
        say(f"WARNING: amos export will refuse models with {arguments.tokenizer}: {obstacle}")
    return tokenizer


def _first_lines(arguments: argparse.Namespace) -> list[str]:
    """Return the first ``TRIED_LINES`` lines of each input."""
    lines = []
    for path in arguments.text:
        documents = DocumentFile(path, arguments.text_column, arguments.document).read()
        of_file = (line for document in documents for line in document.decode("utf-8").rstrip("\n").split("\n"))
        lines += itertools.islice(of_file, TRIED_LINES)
    return lines
