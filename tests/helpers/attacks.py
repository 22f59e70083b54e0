"""Attacks on training runs: kills, wrong settings, damaged files and files of a stranger. ``run.sh`` executes them.

Every attack has a seed, which is printed when it succeeds. An attack succeeds if a bit or a record of a run is lost, if a
command ends in a traceback or leaves an unfinished file, or if code of a file is executed.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from forked_command import ForkedProcess, fork_server
from interrupted_run import RUN, BackgroundRun, assert_same_run, checkpoint, flags_command
from saved_models import write_run
from synthetic_tagging import prepare_tagging
from tiny_runs import ROOT

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.data.tagging import TaggedSentences
from amos_fairseq.errors import UserError
from amos_fairseq.probing.features import encode_split, parts_of, stored_features
from amos_fairseq.probing.targets import Example

# 1: refused; 2: wrong flags; 76: diverged. Hydra ends with 1 as well.
EXIT_CODES = {0, 1, 2, 76}


class Attack(NamedTuple):
    """One attack: its kind, what was done, and what it achieved ("" if nothing)."""

    kind: str
    what: str
    harm: str


class Place(NamedTuple):
    """Where the attacks happen: the undisturbed corpus and runs, and a folder for copies."""

    folder: Path
    corpus: Path
    references: dict[str, Path]


PRECISIONS = {"float32": [], "bf16": ["--bf16"]}


def prepare(folder: Path) -> Place:
    """Write a corpus with ``corpus.json``, and train one undisturbed run in each precision."""
    from amos_fairseq.preprocess.pretraining import prepare as prepare_corpus

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 7))) for _ in range(200)]
    text = folder / "text.txt"
    text.write_text("\n\n".join(" ".join(draw.choices(words, k=40)) for _ in range(240)) + "\n", encoding="utf-8")
    corpus = folder / "corpus"
    prepare_corpus.main([str(text), "--out", str(corpus), "--vocab-size", "200", "--workers", "1"])
    references = {}
    for precision, flags in PRECISIONS.items():
        references[precision] = folder / precision
        run = BackgroundRun(flags_command(corpus, folder / precision, *FLAGS, *flags), folder / f"{precision}.log")
        assert run.exit_code(300) == 0, run.text()[-3000:]
    return Place(folder, corpus, references)


# Records of several updates, so that one of them is interrupted; two checkpoints beside the last one.
FLAGS = ["--log-interval", "3", "--keep-interval-updates", "2"]


def command_harm(code: int, text: str, save_dir: Path | None = None) -> str:
    """Return what is wrong with the end of a command."""
    if "Traceback" in text:
        return "traceback: " + text[text.rindex("Traceback") :].strip().splitlines()[-1]
    if code not in EXIT_CODES:
        return f"exit code {code}"
    if code == 1 and "error" not in text.lower():
        return "exit code 1 without a line"
    left = list(save_dir.rglob("*.unfinished*")) if save_dir is not None else []
    return f"left {left[0].name}" if left else ""


def run_command(module: str, arguments: list[str], cwd: Path = ROOT) -> tuple[int, str]:
    done = fork_server().run(module, arguments, cwd, {"CUDA_VISIBLE_DEVICES": ""}, timeout=300)
    return done.returncode, done.stdout + done.stderr


def kill(process: ForkedProcess, save_dir: Path, draw: random.Random, at_write: bool) -> bool:
    """Kill a run after a random time, or while it writes a checkpoint; return False if it ended before."""
    end = time.monotonic() + draw.uniform(0.5, 5.0)
    while process.process.poll() is None:
        is_writing = at_write and any(save_dir.glob("checkpoint*.unfinished.*"))
        if is_writing or (not at_write and time.monotonic() > end):
            time.sleep(draw.uniform(0, 0.01))
            if process.process.poll() is None:
                process.kill()
                return True
        time.sleep(0.0005)
    return False


def kills(place: Place, tries: int, seed: int) -> Iterator[Attack]:
    """Kill each run up to three times, every other time at a checkpoint's write; it must end as the undisturbed run."""
    draw = random.Random(seed)
    number, run_number = 0, 0
    while number < tries:
        precision = list(PRECISIONS)[run_number % 2]
        save_dir = place.folder / f"killed{run_number}"
        command = flags_command(place.corpus, save_dir, *FLAGS, *PRECISIONS[precision])
        times, ended = [], False
        while not ended and number < tries and len(times) < 3:
            run = BackgroundRun(command, place.folder / "killed.log")
            at_write = number % 2 == 0
            if kill(run, save_dir, draw, at_write):
                number += 1
                times.append("write" if at_write else "any time")
            else:
                ended = True
        code, text = run_command(command[2], command[3:])
        harm = command_harm(code, text, save_dir)
        if not harm:
            try:
                assert_same_run(save_dir, place.references[precision])
            except AssertionError as error:
                harm = f"another result: {str(error).splitlines()[0]}"
        for time_of_kill in times:
            yield Attack(f"kill, {precision}", f"run {run_number}, {time_of_kill}", harm)
        shutil.rmtree(save_dir, ignore_errors=True)
        run_number += 1


SETTINGS = (
    "task.tokens_per_sample", "task.mask_prob", "task.mask_treatment", "task.sample_break_mode", "task._name",
    "task.data", "task.divergence_factor", "model._name", "model.encoder_layers", "model.encoder_embed_dim",
    "model.encoder_attention_heads", "model.max_positions", "model.dropout", "model.layer_norm_eps", "model.kernels",
    "model.relative_position_scheme", "model.relative_position_buckets", "model.generator_depths", "model.mixture",
    "model.gumbel_temperature", "model.gumbel_entries", "criterion._name", "criterion.discriminator_loss_weight",
    "optimizer._name", "optimizer.adam_betas", "optimizer.adam_eps", "optimizer.weight_decay",
    "optimizer.bias_correction", "optimizer.layer_wise_lr_decay", "lr_scheduler._name", "lr_scheduler.warmup_updates",
    "lr_scheduler.total_num_update", "lr_scheduler.end_learning_rate", "lr_scheduler.power", "optimization.lr",
    "optimization.update_freq", "optimization.clip_norm", "dataset.batch_size", "dataset.num_workers",
    "common.log_interval", "common.seed", "common.bf16", "checkpoint.save_interval_updates",
    "checkpoint.best_checkpoint_metric", "checkpoint.keep_interval_updates",
)  # fmt: skip
VALUES = (
    "0",
    "-1",
    "1e-9",
    "2.5",
    "nan",
    "inf",
    "-inf",
    "null",
    "true",
    "x",
    "''",
    "[]",
    "[0]",
    "[1,2]",
    "{a:1}",
    "???",
)
TINY_RECIPE = ["--config-dir", str(ROOT / "examples/pretraining/config"), "--config-name", "amos_tiny"]
SMALL_RUN = (
    "task.tokens_per_sample=32", "model.max_positions=32", "model.encoder_embed_dim=32",
    "model.encoder_ffn_embed_dim=64", "dataset.batch_size=16", "dataset.num_workers=0", "optimization.max_update=2",
)  # fmt: skip


def settings(place: Place, tries: int, seed: int) -> Iterator[Attack]:
    """Give one setting a random value, through Hydra; the run trains, or is refused by one line."""
    draw = random.Random(seed)
    pairs = [(name, value) for name in SETTINGS for value in VALUES]
    draw.shuffle(pairs)
    for name, value in (pairs * (tries // len(pairs) + 1))[:tries]:
        save_dir = place.folder / "settings"
        overrides = [*SMALL_RUN, f"task.data={place.corpus}", f"checkpoint.save_dir={save_dir}", f"{name}={value}"]
        code, text = run_command("fairseq_cli.hydra_train", [*TINY_RECIPE, *overrides], ROOT)
        yield Attack("setting", f"{name}={value}", command_harm(code, text, save_dir if save_dir.exists() else None))
        shutil.rmtree(save_dir, ignore_errors=True)


def damage(path: Path, draw: random.Random) -> str:
    """Damage a file and return how."""
    content = bytearray(path.read_bytes())
    how = draw.choice(["a bit flipped", "cut", "a part of zeros", "empty", "other bytes"])
    start = draw.randrange(max(1, len(content)))
    if how == "a bit flipped" and content:
        content[start] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del content[start:]
    elif how == "a part of zeros":
        content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    elif how == "empty":
        content = bytearray()
    elif how == "other bytes":
        content[start : start + 64] = draw.randbytes(64)
    path.write_bytes(content)
    return how


def copy_of_interrupted_run(place: Place, run: Path) -> None:
    """Copy the undisturbed run as it was at its first checkpoint that is still there."""
    shutil.copytree(place.references["float32"], run)
    (run / "checkpoint_last.pt").unlink()
    middle = sorted(run.glob("checkpoint_*_*.pt"), key=lambda path: int(path.stem.split("_")[2]))[0]
    shutil.copy(middle, run / "checkpoint_last.pt")
    for path in {*run.glob("checkpoint_*.pt")} - {middle, run / "checkpoint_last.pt"}:
        path.unlink()


def damaged_files(place: Place, tries: int, seed: int) -> Iterator[Attack]:
    """Damage a file of a run or of its corpus, then continue the run: it ends as the undisturbed one, or is refused."""
    draw = random.Random(seed)
    for number in range(tries):
        folder = place.folder / "damaged"
        copy_of_interrupted_run(place, folder / "run")
        shutil.copytree(place.corpus, folder / "corpus")
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
        weights = [10 if path.suffix in (".pt", ".bin", ".idx") else 3 for path in paths]
        (path,) = draw.choices(paths, weights)
        how = damage(path, draw)
        command = flags_command(folder / "corpus", folder / "run", *FLAGS)
        code, text = run_command(command[2], command[3:])
        harm = command_harm(code, text, folder / "run")
        if not harm and code == 0 and path.name != "metrics.jsonl":
            try:
                assert_same_weights(folder / "run", place.references["float32"])
            except AssertionError:
                harm = "accepted, with another result"
        yield Attack("damaged file", f"{path.relative_to(folder)}, {how}, seed {seed}, number {number}", harm)
        shutil.rmtree(folder)


def links(place: Place, tries: int, seed: int) -> Iterator[Attack]:
    """Put a link to a file elsewhere into SAVE_DIR, then continue the run; the file elsewhere does not change."""
    draw = random.Random(seed)
    names = [".lock", "metrics.jsonl", "checkpoint_last.pt", "checkpoint_best.pt", "tokenizer", "tokenizer/dict.txt"]
    of_hydra = ["hydra_train.log", ".hydra", ".hydra/config.yaml"]
    for number in range(tries):
        folder = place.folder / "links"
        copy_of_interrupted_run(place, folder / "run")
        name = draw.choice([*names, *of_hydra])
        link, elsewhere = folder / "run" / name, folder / "elsewhere"
        elsewhere.write_text("precious\n")
        if link.is_dir():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(elsewhere)
        command = flags_command(place.corpus, folder / "run", *FLAGS)
        if name in of_hydra:
            overrides = [*SMALL_RUN, f"task.data={place.corpus}", f"checkpoint.save_dir={folder / 'run'}"]
            command[2:] = ["fairseq_cli.hydra_train", *TINY_RECIPE, *overrides]
        code, text = run_command(command[2], command[3:])
        changed = elsewhere.read_text() != "precious\n"
        harm = "changed a file elsewhere" if changed else command_harm(code, text, folder / "run")
        yield Attack("link in SAVE_DIR", f"{name}, seed {seed}, number {number}", harm)
        shutil.rmtree(folder)


def damaged_data(place: Place, tries: int, seed: int) -> Iterator[Attack]:
    """Damage prepared labels or stored features; the labels are refused, the features computed again."""
    draw = random.Random(seed)
    folder = place.folder / "data"
    labels = prepare_tagging(folder)
    loaded = load_checkpoint(write_run(folder / "run"))
    part, dictionary = parts_of(loaded.model)["generator"], Dictionary.load(str(labels / "dict.txt"))
    encoded = {"train": encode_split(loaded, [Example(["the", "quick", "brown", "fox"], [])] * 9)}

    def features() -> torch.Tensor:
        stored = stored_features(folder / "features", part, [1], encoded, loaded.dictionary.pad(), "cpu", "x")
        return stored["train"][1].clone()

    expected = features()
    for number in range(tries):
        in_labels = draw.random() < 0.5
        names = ("valid.*.bin", "valid.*.idx", "valid.*.jsonl") if in_labels else ("*",)
        root = labels if in_labels else folder / "features"
        path = draw.choice(sorted(path for name in names for path in root.glob(name)))
        content = path.read_bytes()
        how = damage(path, draw)
        harm = ""
        try:
            if in_labels:
                TaggedSentences(labels, "valid", dictionary, 3, 64)
                harm = "accepted" if path.read_bytes() != content else ""
            elif not torch.equal(features(), expected):
                harm = "other features"
        except UserError as error:
            harm = "" if in_labels else f"refused: {error}"
        except Exception as error:
            harm = f"traceback: {type(error).__name__}: {error}"
        yield Attack("damaged labels or features", f"{path.name}, {how}, seed {seed}, number {number}", harm)
        if in_labels:
            path.write_bytes(content)


def assert_same_weights(save_dir: Path, reference: Path) -> None:
    found, expected = checkpoint(save_dir)["model"], checkpoint(reference)["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Bomb:
    """An object whose loading creates a file."""

    def __init__(self, canary: Path, call: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = (call, arguments or (str(canary),))

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def hostile_states(canary: Path, draw: random.Random, state: dict[str, Any]) -> Any:
    """Return a checkpoint with an object or a setting that tries to run code."""
    import os
    import subprocess

    calls = [
        Bomb(canary, Path.touch, Path(canary)), Bomb(canary, os.system, f"touch {canary}"), Bomb(canary, os.mkdir),
        Bomb(canary, eval, f"__import__('os').mkdir({str(canary)!r})"), Bomb(canary, exec, f"open({str(canary)!r}, 'w')"),
        Bomb(canary, subprocess.call, ["touch", str(canary)]), Bomb(canary, open, str(canary), "w"),
    ]  # fmt: skip
    (canary.parent / "src").mkdir(exist_ok=True)
    (canary.parent / "src" / "__init__.py").write_text(f"open({str(canary)!r}, 'w')\n")
    source = str(canary.parent / "src")
    texts = [
        f"--user-dir={source}", f"--user-dir {source}", source, "${oc.env:HOME}", "__import__('os').abort()", "../../x",
        f"$(touch {canary})", f"tanh; touch {canary}", "{_target_: os.abort}", "!!python/object/apply:os.abort []",
    ]  # fmt: skip
    circle: list[Any] = []
    circle += [circle, circle]
    values = [
        10**400,
        -1,
        float("inf"),
        2**62,
        circle,
        argparse.Namespace(a=circle),
        "a\0b",
        "\ud800",
        "x" * 5000,
        None,
    ]
    place = draw.choice(["bomb", "setting", "setting", "key", "task state", "value", "value", "section"])
    if place == "bomb":
        state[draw.choice([*state, "more"])] = draw.choice(calls)
    elif place == "setting":
        section = draw.choice(["model", "model", "task", "criterion"])
        state["cfg"][section][draw.choice(sorted(state["cfg"][section]))] = draw.choice(texts)
    elif place == "value":
        section = draw.choice(["model", "task", "criterion", "checkpoint"])
        state["cfg"][section][draw.choice(sorted(state["cfg"][section]))] = draw.choice(values)
    elif place == "section":
        section = draw.choice(sorted(name for name, part in state["cfg"].items() if isinstance(part, dict)))
        state["cfg"][section] = draw.choice(
            [argparse.Namespace(**state["cfg"][section]), {"_name": "unknown"}, *values]
        )
    elif place == "key":
        state["cfg"]["model"][draw.choice(texts)] = draw.choice(texts)
    else:
        state["task_state"] = draw.choice([*texts, {"tokenizer_sha256": draw.choice(texts)}])
    return state


def hostile_files(place: Place, tries: int, seed: int) -> Iterator[Attack]:
    """Give a stranger's checkpoint to the commands that read one; nothing of it is executed."""
    draw = random.Random(seed)
    original = place.references["float32"]
    for number in range(tries):
        folder = place.folder / "hostile"
        (folder / "run").mkdir(parents=True)
        shutil.copytree(original / "tokenizer", folder / "run" / "tokenizer")
        canary = folder / "executed"
        state = hostile_states(canary, draw, checkpoint(original))
        torch.save(state, folder / "run" / "checkpoint_last.pt", _use_new_zipfile_serialization=draw.random() < 0.8)
        run, out = str(folder / "run"), str(folder / "out")
        name, arguments = draw.choice([
            ("export", ["amos_start", "export", run, out, "--no-check"]),
            ("inspect", ["amos_start", "inspect", run, "--text", "a text"]),
            ("flops", ["amos_start", "flops", run]),
            ("glue", ["amos_start", "glue", "--checkpoint", run, "--data", run, "--out", out]),
            ("train", ["fairseq_cli.train", str(place.corpus), *RUN, *FLAGS, "--save-dir", run]),
        ])  # fmt: skip
        code, text = run_command(arguments[0], arguments[1:])
        harm = "executed" if canary.exists() else command_harm(code, text, folder)
        yield Attack("hostile file", f"amos {name}, seed {seed}, number {number}", harm)
        shutil.rmtree(folder)


def attack(tries: int, seed: int, folder: Path) -> list[Attack]:
    """Run all attacks, print those that succeed, and return all."""
    place = prepare(folder)
    plan = {
        kills: tries,
        settings: 3 * tries,
        damaged_files: tries,
        damaged_data: 5 * tries,
        links: max(1, 2 * tries // 10),
        hostile_files: max(1, 6 * tries // 10),
    }
    attacks = []
    for make, number in plan.items():
        for result in make(place, number, seed):
            attacks.append(result)
            if result.harm:
                print(f"{result.kind}: {result.what}: {result.harm}", file=sys.stderr, flush=True)
    return attacks


def table(attacks: list[Attack]) -> str:
    counts, harms = Counter(each.kind for each in attacks), Counter(each.kind for each in attacks if each.harm)
    rows = [f"| {kind} | {count} | {harms[kind]} |" for kind, count in counts.items()]
    return "\n".join(["| attack | tries | succeeded |", "|---|---:|---:|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser("run.sh", description="attack runs, files and settings")
    parser.add_argument("--tries", type=int, default=100, help="number of kills and damaged files (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of all attacks (default: 1)")
    parser.add_argument("--table", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        attacks = attack(arguments.tries, arguments.seed, Path(folder))
    print(table(attacks))
    if arguments.table:
        arguments.table.write_text(table(attacks) + "\n", encoding="utf-8")
    sys.exit(any(each.harm for each in attacks))


if __name__ == "__main__":
    main()
