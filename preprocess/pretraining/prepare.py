"""Raw text to what ``fairseq-train`` takes; see ``prepare.sh --help``.

split (one pass over the inputs) -> vocabulary (from a sample) -> for each shard: encode, fairseq-preprocess -> publish
"""

from pathlib import Path
from typing import Any, Dict, List, Optional

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.tokenization import Tokenizer, load_tokenizer
from preprocess.common.command import ending_in_one_line, progress_bar, say
from preprocess.common.processes import end_children_with_this_process, in_own_process, process_pool, use_threads
from preprocess.pretraining import encoding, manifest
from preprocess.pretraining.arguments import Settings, build_parser, read_arguments
from preprocess.pretraining.splitting import Split, group_into_shards, split_corpus
from preprocess.pretraining.vocabulary import learn_tokenizer
from preprocess.pretraining.workspace import Workspace


def prepare(inputs: List[Path], out: Path, settings: Settings, workers: int, tokenizer: Optional[Tokenizer]) -> None:
    """Make the corpus ``out`` of ``inputs``, or go on with it. ``tokenizer`` None: learn one.

    Raises:
        UserError: bad input; ``out`` is then as it was.
        OSError: the disk is full and the like; finished parts stay for the next run.
    """
    description = settings.describe(tokenizer)
    if manifest.is_finished(out, description, inputs):
        say(f"{out} is finished already, with these inputs and settings: nothing to do")
        return
    with Workspace(out, {"settings": description, "inputs": [_identify(path) for path in inputs]}) as work:
        if not work.take_up_publishing():
            try:
                _run_stages(work, inputs, settings, description, workers, tokenizer)
            except UserError:
                work.discard()
                raise
    say(f"done: fairseq-train {_task_data(out)} --user-dir amos_fairseq ...; counts and hashes in {out}/corpus.json")


def _run_stages(
    work: Workspace,
    inputs: List[Path],
    settings: Settings,
    description: Dict[str, Any],
    workers: int,
    tokenizer: Optional[Tokenizer],
) -> None:
    split = work.load_split() or _split(work, inputs, settings)
    tokenizer = _vocabulary(work, settings, workers, tokenizer)
    shards = group_into_shards([piece.bytes for piece in split.pieces], settings.split.shard_bytes)
    with process_pool(workers, encoding.start_encoding_process, str(work.tokenizer)) as pool:
        counts = [
            work.load_counts(number) or _shard(work, split, shards, number, pool, workers)
            for number in range(len(shards))
        ]
    work.publish(len(shards), manifest.build_manifest(work.out, description, split, tokenizer, counts))


def _split(work: Workspace, inputs: List[Path], settings: Settings) -> Split:
    directory = work.unfinished(work.text)
    with progress_bar(sum(path.stat().st_size for path in inputs), "read", "B") as bar:
        split = split_corpus(inputs, directory, settings.split, bar.update)
    work.save_split(directory, split)
    work.finish(directory)
    return split


def _vocabulary(work: Workspace, settings: Settings, workers: int, tokenizer: Optional[Tokenizer]) -> Tokenizer:
    if not work.tokenizer.is_dir():
        directory = work.unfinished(work.tokenizer)
        if tokenizer is None:
            sample = work.text / "sample.txt"
            say(f"learn {settings.vocab_size} {settings.bpe} pieces from {sample.stat().st_size / 1e6:.1f} MB of text")
            in_own_process(_learn, sample, settings, workers, directory)
        else:
            tokenizer.save(directory)
        work.finish(directory)
    return load_tokenizer(work.tokenizer)


def _learn(sample: Path, settings: Settings, workers: int, directory: Path) -> None:
    use_threads(workers)
    learn_tokenizer(sample, settings.bpe, settings.vocab_size, settings.cased).save(directory)


def _shard(
    work: Workspace, split: Split, shards: List[List[int]], number: int, pool: Any, workers: int
) -> Dict[str, Any]:
    from preprocess.common.binarizing import check_binarized  # fairseq: seconds to import
    from preprocess.pretraining.binarizing import binarize_shard

    directory = work.unfinished(work.shard(number))
    pieces = [split.pieces[index] for index in shards[number]]
    files = {"train": [work.text / piece.name for piece in pieces]}
    if number == 0:
        files["valid"] = [work.text / split.valid.name]
    size = sum(path.stat().st_size for paths in files.values() for path in paths)
    encoded = {name: directory / f"{name}.pieces" for name in files}
    place = f" {number + 1}/{len(shards)}" if len(shards) > 1 else ""
    with progress_bar(size, f"encode{place}", "B") as bar:
        counts = {name: encoding.encode_files(files[name], encoded[name], pool, workers, bar.update) for name in files}
    _refuse_nothing(counts)
    with progress_bar(size, f"binarize{place}", "B") as bar:
        ids = sum(count.pieces + count.lines for count in counts.values())
        dictionary = work.tokenizer / "dict.txt"
        binarize_shard(
            encoded["train"],
            encoded.get("valid"),
            dictionary,
            directory,
            workers,
            ids,
            lambda share: bar.update(int(share * size) - bar.n),
        )
    for name, count in counts.items():
        check_binarized(directory / name, count.lines, count.pieces)
        encoded[name].unlink()
    record = {name: manifest.describe(count) for name, count in counts.items()}
    record["sha256"] = manifest.file_hashes(directory)
    work.save_counts(directory, record)
    work.finish(directory)
    for path in files["train"]:  # half of the disk space is free again
        path.unlink()
    return record


def _refuse_nothing(counts: Dict[str, encoding.Counts]) -> None:
    for name, count in counts.items():
        if not count.pieces:
            raise UserError(f"the tokenizer leaves nothing of the {name} text: is it made for this language?")


def _identify(path: Path) -> List[Any]:
    """Enough to see that an unfinished run reads the same file; a finished one is compared by content."""
    status = path.stat()
    return [str(path.absolute()), status.st_size, status.st_mtime_ns]


def _task_data(out: Path) -> str:
    return manifest.read_manifest(out)["task_data"]


@report_user_errors()
def main(arguments: Optional[List[str]] = None) -> None:
    """The command. Exit status 1 and one line on a user's mistake, 130 after Ctrl-C."""
    with ending_in_one_line("it goes on from the last finished part"):
        given = read_arguments(build_parser().parse_args(arguments))
        prepare(given.inputs, given.out, given.settings, given.workers, given.tokenizer)


if __name__ == "__main__":
    end_children_with_this_process()
    main()
