"""A small synthetic corpus and tiny training runs that all tests share."""

import copy
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_command import run_command
from interrupted_run import flags_command, run_to_end
from tiny_runs import ROOT

import amos_fairseq

# Where Triton is installed and no GPU, this process runs its kernels on the CPU, in Triton's interpreter (tests/cuda); with a
# GPU they are compiled (tests/gpu). Triton decides when it is imported, which PyTorch does, too: so before any test is
# collected. Processes that tests start do not inherit it.
if find_spec("triton") is not None and not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("TRITON_INTERPRET", "1")
        for name in ("attention", "output_layer"):
            import_module(f"amos_fairseq.functional.cuda.{name}")
amos_fairseq.register()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Divide the tests into as many parts as there are processes, and put slow tests first in each part, those of whole files.

    Each process begins with a part, and an idle one takes over tests from the end of another's: they must be short ones there,
    or all wait for the last slow tests of one process.
    """
    if "AMOS_RELIABILITY" not in os.environ:
        for item in items:
            if item.get_closest_marker("by_hand") is not None:
                item.add_marker(pytest.mark.skip(reason="by hand: bash tests/reliability/run.sh"))
    slow, short = (
        [item for item in items if (item.get_closest_marker("slow") is None) is is_short] for is_short in (False, True)
    )
    files, parts = list(dict.fromkeys(item.path for item in slow)), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    arranged: list[pytest.Item] = []
    for part in range(parts):
        arranged += [item for item in slow if files.index(item.path) % parts == part]
        missing = len(items) * (part + 1) // parts - len(arranged)
        arranged, short = arranged + short[: max(0, missing)], short[max(0, missing) :]
    items[:] = arranged


@pytest.fixture(scope="module")
def modules_cache(tmp_path_factory) -> Iterator[Path]:
    """Make transformers copy the code of folders to this directory instead of the user's cache."""
    transformers = import_module("transformers")
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("modules")
        # A process may come to a file twice; the package of the first time looks for code in the first directory.
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            patch.delitem(sys.modules, name)
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
        patch.setenv("HF_MODULES_CACHE", str(cache))
        patch.setattr(sys, "path", [*sys.path])
        yield cache


@pytest.fixture(scope="session", autouse=True)
def recipes_composed_once() -> Iterator[None]:
    """Hydra composes a recipe of the package, with the same overrides, once for all tests of a process."""
    composition = import_module("amos_fairseq.recipes.composition")  # here, because of Triton
    compose, done = composition.compose_with_hydra, {}

    def compose_once(
        name: str, overrides: Sequence[str] = (), config_dir: Path = composition.RECIPES, **how: bool
    ) -> Any:
        if config_dir != composition.RECIPES:  # a test writes it
            return compose(name, overrides, config_dir, **how)
        key = name, tuple(overrides), *how.items()
        if key not in done:
            done[key] = compose(name, overrides, **how)
        return copy.deepcopy(done[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "compose_with_hydra", compose_once)
        yield


@pytest.fixture(scope="session")
def corpus_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of documents in which each of 200 words prefers four successors, so that there is something to learn."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 7))) for _ in range(200)]
    successors = {word: draw.sample(words, 4) for word in words}
    path = tmp_path_factory.mktemp("text") / "text.txt"
    with path.open("w", encoding="utf-8") as file:
        for _ in range(60):
            for _ in range(4):
                word = draw.choice(words)
                sentence = [word]
                for _ in range(draw.randint(10, 60)):
                    word = draw.choice(successors[word]) if draw.random() < 0.9 else draw.choice(words)
                    sentence.append(word)
                file.write(" ".join(sentence) + "\n")
            file.write("\n")
    return path


@pytest.fixture(scope="session")
def binarized_corpus(corpus_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text as stock fairseq-preprocess binarizes it by words: train, valid, dict.txt; no tokenizer."""
    lines = corpus_text.read_text(encoding="utf-8").splitlines(keepends=True)
    cut = len(lines) * 9 // 10
    source = tmp_path_factory.mktemp("split")
    (source / "train").write_text("".join(lines[:cut]), encoding="utf-8")
    (source / "valid").write_text("".join(lines[cut:]), encoding="utf-8")
    out = tmp_path_factory.mktemp("binarized")
    texts = ["--trainpref", str(source / "train"), "--validpref", str(source / "valid")]
    run_command("fairseq_cli.preprocess", ["--only-source", "--destdir", str(out), *texts])
    return out


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list:
    """How the batches of all encoders were packed in this test: each :class:`Packing`, or None."""
    encoder = import_module("amos_fairseq.modules.encoder")  # here, because of Triton
    pack_lengths, packings = encoder.pack_lengths, []
    monkeypatch.setattr(encoder, "pack_lengths", lambda *args: packings.append(pack_lengths(*args)) or packings[-1])
    return packings


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Compiled graphs of a test do not reach other tests, and are counted from 0."""
    counters = import_module("torch._dynamo.utils").counters
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    counters.clear()


@pytest.fixture
def restored_determinism(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``--deterministic`` changes the process: start without cuBLAS's variable, and undo the rest after the test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is also removed again
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def refused_training(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """``refused_training(*arguments)``: the one line with which fairseq-train, in this process, refuses its arguments."""

    def run(*arguments: object) -> str:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["fairseq-train", *map(str, arguments)])
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(SystemExit) as ended:
            import_module("fairseq_cli.train").cli_main()
        assert ended.value.code == 1
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "Warning" not in line and line[:1] != " "]
        assert line.startswith("amos_fairseq: error: ")
        return line.removeprefix("amos_fairseq: error: ")

    return run


@pytest.fixture(scope="session")
def uninterrupted(binarized_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``uninterrupted(*flags)``: SAVE_DIR of a run left alone; each is made once for all tests, which must not change it."""

    @cache
    def run(*flags: str) -> Path:
        save_dir = tmp_path_factory.mktemp("uninterrupted")
        run_to_end(flags_command(binarized_corpus, save_dir, *flags), save_dir.with_suffix(".log"))
        return save_dir

    return run
