"""Blocks of a memory-mapped corpus against fairseq's; counts against naive ones; damage; the vocabulary beside checkpoints."""

import errno
import hashlib
import json
import pickle
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from failures import error_line
from fairseq.data import Dictionary, TokenBlockDataset
from fairseq.data.indexed_dataset import MMapIndexedDataset
from saved_models import small_tokenizer
from small_models import small_electra
from synthetic_corpus import make_task, write_corpus, write_split

from amos_fairseq.cli.main import main
from amos_fairseq.data import corpus as corpus_module
from amos_fairseq.data.corpus import MappedBlocks, check_prepared, read_blocks, verify_files
from amos_fairseq.errors import UserError
from amos_fairseq.files import directory_sha256, file_sha256
from amos_fairseq.tasks.text_pretraining import TextPretrainingTask


@pytest.mark.parametrize("break_mode", ["none", "complete", "complete_doc"])
@pytest.mark.parametrize("tokens_per_block", [16, 300])
def test_mapped_blocks_match_fairseqs_blocks(break_mode: str, tokens_per_block: int, binarized_corpus: Path) -> None:
    """Every block: within a paragraph, over several, empty lines of the text between documents included."""
    dictionary = Dictionary.load(str(binarized_corpus / "dict.txt"))
    found = read_blocks(str(binarized_corpus / "train"), dictionary, tokens_per_block, break_mode)
    assert isinstance(found, MappedBlocks)
    expected = found.blocks
    assert isinstance(expected, TokenBlockDataset)
    assert len(found) == len(expected) > 10
    sent = pickle.loads(pickle.dumps(found))  # to a loader process that is spawned
    for index in range(len(found)):
        assert found[index].dtype == torch.int64
        assert found[index].equal(expected[index]), index
        assert sent[index].equal(expected[index]), index


def test_several_files_are_read_by_paragraphs(binarized_corpus: Path, tmp_path: Path) -> None:
    """train and train1, which make one text in two files: blocks go over the border between them."""
    for name in ("train", "train1"):
        for suffix in (".bin", ".idx"):
            (tmp_path / f"{name}{suffix}").symlink_to(binarized_corpus / f"valid{suffix}")
    dictionary = Dictionary.load(str(binarized_corpus / "dict.txt"))
    blocks = read_blocks(str(tmp_path / "train"), dictionary, 32, "none", combine=True)
    assert isinstance(blocks, TokenBlockDataset)
    one = read_blocks(str(tmp_path / "train"), dictionary, 32, "none")
    joined, single = (torch.cat([given[index] for index in range(len(given))]) for given in (blocks, one))
    assert joined.equal(torch.cat([single, single]))


def naive_counts(*directories: Path) -> Counter:
    """From the bytes of the files: ``write_split`` stores 16-bit integers."""
    files = [file for directory in directories for file in directory.glob("train*.bin")]
    return Counter(number for file in files for number in memoryview(file.read_bytes()).cast("H"))


def test_all_parts_of_all_shards_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of 7 tokens, so that the last of a file is not full; ``</s>`` ends every line and is not counted."""
    monkeypatch.setattr(corpus_module, "TOKENS_AT_ONCE", 7)
    shards = [write_corpus(tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b"))]
    write_split(shards[1], "train1", 11, seed=9)
    counts = make_task(f"{shards[0]}:{shards[1]}").count_training_tokens()
    expected = naive_counts(*shards)
    assert expected[2] == 60 + 60 + 11
    assert counts.tolist() == [expected[token] if 4 <= token < 34 else 0 for token in range(35)]
    assert counts.dtype == torch.int64


def test_rare_tokens_have_larger_weights_in_training_alone(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    task = make_task(corpus, mask_rare_tokens=0.5)
    for split in ("train", "valid"):
        task.load_dataset(split)
    counts, weights = naive_counts(corpus), task.dataset("train").mask_weights
    assert weights.tolist() == pytest.approx([max(1, counts[token] if token > 3 else 0) ** -0.5 for token in range(35)])
    assert task.dataset("valid").mask_weights is None
    with pytest.raises(UserError, match="no meaning for the criterion electric"):
        make_task(corpus, mask_rare_tokens=0.5, objective="electric")
    uniform = make_task(corpus)
    uniform.load_dataset("train")
    assert uniform.dataset("train").mask_weights is None


def test_counts_of_ranks_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "TOKENS_AT_ONCE", 7)
    text, counts = MMapIndexedDataset(str(write_corpus(tmp_path / "a") / "train")), naive_counts(tmp_path / "a")
    parts = [corpus_module.count_tokens([text], 40, rank, num_ranks=3) for rank in range(3)]
    assert sum(parts).tolist() == [counts[token] for token in range(40)]
    assert all(part.any() for part in parts)


def test_task_counts_for_a_unigram_model_before_its_first_update(tmp_path: Path, monkeypatch) -> None:
    """A model that has its counts from a checkpoint, or needs none, is left alone."""
    corpus = write_corpus(tmp_path / "corpus")
    task = make_task(corpus, save_dir=str(tmp_path / "run"))
    models = [small_electra(num_tokens=30, generator="unigram"), small_electra(num_tokens=30)]
    counted = []
    counting = task.count_training_tokens
    monkeypatch.setattr(task, "count_training_tokens", lambda: counted.append(1) or counting())
    for epoch in (1, 2):
        for model in models:
            task.begin_epoch(epoch, model)
    assert counted == [1]
    counts = models[0].token_noise.counts
    assert counts[:35].tolist() == [naive_counts(corpus)[token] if 4 <= token < 34 else 0 for token in range(35)]
    assert counts[35:].eq(0).all()


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """One shard with the part of ``corpus.json`` that is read again."""
    directory = write_corpus(tmp_path / "corpus", tokenizer=False)
    tokenizer = small_tokenizer()
    tokenizer.save(directory / "tokenizer")
    shutil.copy(directory / "tokenizer" / "dict.txt", directory)
    hashes = {name: file_sha256(directory / name) for name in ("train.bin", "train.idx", "valid.bin", "valid.idx")}
    shard = {"directory": ".", "sha256": hashes}
    manifest = {"tokenizer": {"sha256": tokenizer.sha256}, "shards": [shard]}
    (directory / "corpus.json").write_text(json.dumps(manifest))
    return directory


def change(path: Path, offset: int, new: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(new)] = new
    path.write_bytes(content)


def cut(path: Path, by: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-by])


# What happens to DIR/train.bin or .idx.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "text empty": lambda d: (d / "train.bin").write_bytes(b""),
    "text longer": lambda d: (d / "train.bin").open("ab").write(b"xx"),
    "index cut": lambda d: cut(d / "train.idx"),
    "index missing": lambda d: (d / "train.idx").unlink(),
    "index of three bytes": lambda d: (d / "train.idx").write_bytes(b"MMI"),
    "another magic": lambda d: change(d / "train.idx", 0, b"X"),
    "another version": lambda d: change(d / "train.idx", 9, b"\7"),
    "another dtype": lambda d: change(d / "train.idx", 17, b"\4"),
    "no dtype": lambda d: change(d / "train.idx", 17, b"\x63"),
    "more lines": lambda d: change(d / "train.idx", 18, struct.pack("<Q", 2**62)),
    "no lines": lambda d: write_split(d, "train", 0, seed=7),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_noticed_before_training(prepared: Path, name: str) -> None:
    make_task(prepared).load_dataset("train")
    DAMAGE[name](prepared)
    with pytest.raises(UserError, match=r"train\.bin or .*train\.idx is missing, empty or damaged: give a directory"):
        make_task(prepared).load_dataset("train")


def test_a_cut_tokenizer_is_noticed_before_training(prepared: Path) -> None:
    (prepared / "tokenizer" / "notes.txt").write_text("mine")  # no part of the tokenizer
    make_task(prepared)
    files = [path for path in (prepared / "tokenizer").iterdir() if path.name not in ("dict.txt", "notes.txt")]
    cut(max(files, key=lambda path: path.stat().st_size), 200)
    with pytest.raises(UserError, match=r"tokenizer\.json is not a usable tokenizer\.json"):
        make_task(prepared)


@pytest.mark.parametrize("content", ["", '{"shards": 3, "tokenizer": {"sha256": ""}}', "\0"])
def test_a_damaged_manifest_is_one_line(prepared: Path, content: str) -> None:
    (prepared / "corpus.json").write_text(content)
    with pytest.raises(UserError, match=r"corpus\.json is not readable as the record of a corpus"):
        make_task(prepared)


def test_verify_reads_everything(prepared: Path, capsys: pytest.CaptureFixture) -> None:
    """A byte that training does not compare."""
    assert main(["verify", str(prepared)]) == 0
    size = sum(path.stat().st_size for path in prepared.glob("*.[bi]*"))
    assert f"the {size:,} bytes in 1 shard and the tokenizer are as amos prepare wrote them" in capsys.readouterr().out
    change(prepared / "valid.bin", 4, b"\x09")
    make_task(prepared).load_dataset("valid")
    with pytest.raises(SystemExit):
        main(["verify", str(prepared)])
    assert "valid.bin is missing, or not the file that amos prepare wrote" in capsys.readouterr().err
    (prepared / "corpus.json").unlink()
    with pytest.raises(UserError, match=r"has no corpus\.json: only a corpus of amos prepare can be verified"):
        verify_files([prepared])
    shutil.rmtree(prepared / "tokenizer")
    line = error_line(capsys, main, "verify", prepared)
    assert f"{prepared}: the corpus has no folder tokenizer: copy that folder again" in line


def test_prepared_files_are_all_there(tmp_path: Path) -> None:
    """A missing second text would turn a task on pairs into one on first texts; another split is not needed."""
    names = ("input0/train.bin", "input1/train.bin", "input1/valid.bin", "dict.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"0")
    (tmp_path / "task.json").write_text(json.dumps({"sha256": dict.fromkeys(names, "")}))
    (tmp_path / "input1/valid.bin").unlink()
    check_prepared(tmp_path, "task.json", "train")
    (tmp_path / "input1/train.bin").unlink()
    with pytest.raises(UserError, match=r"input1/train\.bin is missing"):
        check_prepared(tmp_path, "task.json", "train")


READY = SimpleNamespace(awaits_token_counts=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


def with_one_more_word(corpus: Path) -> Path:
    with (corpus / "dict.txt").open("a") as file:
        file.write("more 1\n")
    return corpus


def test_dictionaries_that_differ_are_refused(corpus: Path, tmp_path: Path) -> None:
    other = with_one_more_word(shutil.copytree(corpus, tmp_path / "other"))
    with pytest.raises(UserError, match=r"other/dict.txt is missing, or not the dictionary of .*corpus: give"):
        make_task(f"{corpus}:{other}")
    with pytest.raises(UserError, match=r"tokenizer/dict.txt is missing, or not the dictionary of .*other: give"):
        make_task(other)
    (other / "dict.txt").write_text("no counts here\n")
    shutil.rmtree(other / "tokenizer")
    with pytest.raises(UserError, match=r"other/dict.txt is not a fairseq dictionary"):
        make_task(other)


def test_vocabulary_is_copied_beside_the_checkpoints(corpus: Path, tmp_path: Path) -> None:
    task = make_task(corpus, save_dir=str(tmp_path / "run"))
    task.begin_epoch(1, READY)
    copy = tmp_path / "run" / "tokenizer"
    assert sorted(path.name for path in copy.iterdir()) == ["dict.txt", "tokenizer.json", "tokenizer.settings.json"]
    assert (copy / "dict.txt").read_bytes() == (corpus / "dict.txt").read_bytes()
    assert list((tmp_path / "run").iterdir()) == [copy]
    written = (copy / "dict.txt").stat().st_mtime_ns
    task.begin_epoch(2, READY)
    assert (copy / "dict.txt").stat().st_mtime_ns == written
    state = task.state_dict()
    assert state["dictionary_sha256"] == hashlib.sha256((corpus / "dict.txt").read_bytes()).hexdigest()
    assert state["tokenizer_sha256"] == directory_sha256(corpus / "tokenizer") == directory_sha256(copy)
    assert make_task(copy).state_dict()["dictionary_sha256"] == state["dictionary_sha256"]


def test_directory_hash_depends_on_names_and_contents(tmp_path: Path) -> None:
    def digest(files: dict[str, str]) -> str:
        directory = tmp_path / "hashed"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        for name, text in files.items():
            (directory / name).write_text(text)
        return directory_sha256(directory)

    same = {"a": "xy", "b": "z"}
    assert digest(same) == digest({"b": "z", "a": "xy", ".hidden": "left out"})
    others = [{"a": "x", "b": "yz"}, {"a": "z", "b": "xy"}, {"ab": "xyz"}, {"a": "xy", "c": "z"}, {"a": "xy"}]
    assert len({digest(files) for files in [same, *others]}) == 6


@pytest.fixture
def refused_by_both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``refused_by_both(task, match)``: this process is rank 0 of two, then rank 1, which receives the broadcasts of rank 0."""
    sent = []

    def broadcast(objects: list, src: int) -> None:
        if torch.distributed.get_rank() == src:
            sent.append(objects[0])
        else:
            objects[0] = sent.pop(0)

    def begin(task: TextPretrainingTask, match: str) -> None:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        with pytest.raises(UserError, match=match):
            task.begin_epoch(1, READY)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
        with pytest.raises(SystemExit) as ended:
            task.begin_epoch(1, READY)
        assert ended.value.code == 1

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    return begin


def test_save_dir_of_another_vocabulary_is_refused_by_every_rank(corpus, tmp_path, refused_by_both) -> None:
    other = with_one_more_word(write_corpus(tmp_path / "other", tokenizer=False))
    make_task(other, save_dir=str(tmp_path / "run")).vocabulary.copy_into(str(tmp_path / "run"))
    task = make_task(corpus, save_dir=str(tmp_path / "run"))
    refused_by_both(task, r"run/tokenizer is damaged, or belongs to a run with another vocabulary")


def test_a_full_disk_ends_every_rank_and_leaves_nothing(corpus, tmp_path, refused_by_both, monkeypatch) -> None:
    def write_half(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", write_half)
    task = make_task(corpus, save_dir=str(tmp_path / "run"))
    refused_by_both(task, r"run/tokenizer cannot be written \(No space left on device\): make room")
    assert list((tmp_path / "run").iterdir()) == []


def test_checkpoint_of_another_vocabulary_is_refused(corpus: Path, tmp_path: Path) -> None:
    task = make_task(corpus)
    task.load_state_dict(make_task(corpus).state_dict())
    task.load_state_dict({})  # a checkpoint of stock fairseq
    for part in ("dictionary", "tokenizer"):
        with pytest.raises(UserError, match=rf"trained with another {part} than .*dict.txt"):
            task.load_state_dict({**task.state_dict(), f"{part}_sha256": "0" * 64})
    assert task.state_dict() == make_task(corpus).state_dict()
