"""``amos adapt``: the recipes that it writes, its signals, and a run of all steps."""

import hashlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from failures import error_line
from forked_command import run_main
from hugging_face_folders import LINES, write_model
from interrupted_run import records
from safetensors.torch import load_file, save_file
from saved_models import write_run
from transformers import AutoModel, AutoTokenizer

import amos_fairseq
from amos_fairseq.adaptation import adapt as steps
from amos_fairseq.checkpoints.read import read_state
from amos_fairseq.cli.main import build_parser, main
from amos_fairseq.experiments.benchmark import read_pretrained_checkpoint

TWO = "--generator BERT --generator BERT"
TRAINED, NEW = (5e-5, 1.0), (5e-4, 0.1)  # peak rate, and the encoder's share of it


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a BERT with and without an MLM head, an ELECTRA and an MPNet; an AMOS with a random generator; a text."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "bert", "bert", "BertForMaskedLM")
    write_model(folder / "headless", "bert", "BertModel")
    sizes = {"embedding_size": 8, "hidden_size": 24, "num_attention_heads": 3}  # a third of them is whole
    write_model(folder / "discriminator", "electra", "ElectraForPreTraining", **sizes)
    write_model(folder / "mpnet", "mpnet", "MPNetForMaskedLM")
    main(["import", str(folder / "bert"), str(folder / "fresh" / "amos.pt"), "--arch", "amos_tiny"])
    write_run(folder / "tagger", classes=2)
    (folder / "text.txt").write_text("\n\n".join(LINES * 4), encoding="utf-8")
    return folder


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipes that would be trained, by name."""
    names: list[str] = []
    monkeypatch.setattr(steps, "train", lambda recipe: names.append(recipe.name))
    monkeypatch.setattr(steps, "describe_result", lambda *_: [])
    return names


def adapt(models: Path, out: Path, model: str, *flags: str) -> dict[str, Any]:
    assert main(["adapt", str(models / model), str(models / "text.txt"), "--out", str(out), *flags]) == 0
    return yaml.safe_load((out / "adapt.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("model", "flags", "base", "rates", "generator"),
    [
        ("bert", "", "mlm", TRAINED, None),
        ("headless", "", "mlm", NEW, None),
        ("discriminator", "--objective mlm", "mlm", NEW, None),
        ("bert", "--objective electra --generator self", "electra", NEW, "model/model.pt"),
        ("headless", "--objective electra --minutes 90", "electra", NEW, "generator/checkpoint_last.pt"),
        ("discriminator", "--objective electra --generator BERT", "electra", TRAINED, "generator_model1/model.pt"),
        ("headless", f"--objective amos {TWO}", "amos", NEW, "generator_model1/model.pt:generator_model2/model.pt"),
    ],
)
def test_recipes(model, flags, base, rates, generator, models, trained, tmp_path, capsys) -> None:
    words = [str(models / "bert") if word == "BERT" else word for word in flags.split()]
    recipe = adapt(models, tmp_path / "out", model, *words, "--updates", "40")
    assert recipe["defaults"] == ["/fairseq/defaults@_global_", f"/{base}_base", "_self_"]
    assert (recipe["optimization"]["lr"], recipe["model"]["encoder_lr_scale"]) == ([rates[0]], pytest.approx(rates[1]))
    minutes = {"minutes": 90.0} if "--minutes" in flags else {}
    assert recipe["lr_scheduler"] == {"warmup_updates": 4} | minutes
    assert not minutes or recipe["task"]["save_interval_minutes"] == 9  # what a kill loses at most
    assert recipe["task"]["tokens_per_sample"] == 40  # the positions of the folder, fewer than --length
    assert "adapt: blocks of 40 tokens instead of 128: MODEL takes no longer ones" in capsys.readouterr().err
    found = recipe["model"].get("generator_checkpoint")
    assert found == (generator and ":".join(str(tmp_path / "out" / file) for file in generator.split(":")))
    is_new = generator is not None and generator.startswith("generator/")
    assert trained == [*(["generator.yaml"] if is_new else []), "adapt.yaml"]
    if is_new:
        own = yaml.safe_load((tmp_path / "out" / "generator.yaml").read_text(encoding="utf-8"))
        assert own["defaults"][1] == "/mlm_modern_mini"
        assert own["checkpoint"]["save_dir"] == str(tmp_path / "out" / "generator")
        assert own["model"] == {"max_positions": 40}
        assert own["lr_scheduler"] == {"warmup_updates": 4}


@pytest.mark.parametrize(
    ("model", "flags", "line"),
    [
        ("bert", "--generator self", "--generator is for the objectives that detect replaced tokens"),
        ("bert", "--objective electra --generator HEADLESS", "has no trained MLM head and cannot be a generator"),
        ("bert", "--out a:b", "fairseq cannot read paths with a colon"),
        ("bert", "--objective amos --generator self --generator self", "a mixture needs MLM heads at several depths"),
        ("fresh/amos.pt", "", "a mixture needs MLM heads at several depths"),
        ("bert", "--objective electra --generator self --generator new", "for the mixture of --objective amos alone"),
        ("bert", "--set model.discriminator_lr_scale=0.5", "has no setting model.discriminator_lr_scale"),
        ("bert", "--set optimization.lr=[-1]", "optimization.lr (--lr) -1.0 must be above 0"),
        ("", "", "checkpoint_last.pt is missing: give"),
        ("tagger", "", "checkpoint_last.pt is fine-tuned on labels: give the pretrained model"),
    ],
)
def test_refusals(model, flags, line, models, trained, tmp_path, capsys) -> None:
    words = [models / "headless" if word == "HEADLESS" else word for word in flags.split()]
    arguments = ("adapt", models / model, models / "text.txt", "--out", tmp_path / "out", *words)
    assert line in error_line(capsys, main, *arguments, reports_progress=True)
    assert trained == []
    assert not (tmp_path / "out" / "data").exists()


def test_a_generator_that_knows_frequencies_alone_is_named() -> None:
    """By its last validation; the best of its heads counts."""
    valid = {"split": "valid", "update": 9, "unigram_entropy": 5.0, "mlm_loss_1": 4.7, "mlm_loss_2": 4.6}
    assert "is 4.60 nats, that of token frequencies alone 5.00" in steps.why_useless(
        [valid, {"split": "train", "update": 10}]
    )
    assert steps.why_useless([valid, valid | {"mlm_loss_2": 4.5}]) == steps.why_useless([]) == ""


def test_another_command_replaces_one_that_never_trained(models, trained, tmp_path, capsys) -> None:
    """An equal text is not encoded again."""
    out = tmp_path / "out"
    manifest = out / "data" / "corpus.json"
    words = ("adapt", models / "headless", models / "text.txt", "--out", out, "--batch-size", "4000")
    line = error_line(capsys, main, *words, reports_progress=True)
    assert re.search(r"TEXT has [\d,]+ tokens to train on, an update reads 156,000: give a smaller --batch-size", line)
    adapt(models, out, "headless", "--objective", "electra")
    encoded = manifest.stat().st_mtime_ns
    recipe = adapt(models, out, "headless", "--updates", "3")
    assert recipe["optimization"]["max_update"] == 3
    assert not (out / "generator.yaml").exists()
    assert manifest.stat().st_mtime_ns == encoded
    adapt(models, out, "mpnet", "--updates", "3")  # with another tokenizer
    adapt(models, out, "headless", "--document", "line")
    assert json.loads(manifest.read_text(encoding="utf-8"))["settings"]["document"] == "line"
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"body": line}) for line in LINES * 4))
    rows, table = (str(tmp_path / name) for name in ("rows", "rows.jsonl"))
    assert main(["adapt", str(models / "headless"), table, "--out", rows, "--text-column", "body"]) == 0
    (out / "run").mkdir()
    (out / "run" / "checkpoint_last.pt").touch()
    files = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    line = error_line(capsys, main, *words[:5], "--document", "line", "--updates", "3")
    assert "was trained by another command, or from other weights (different: updates): give another --out; " in line
    assert f"{tmp_path / 'out' / 'run'} as MODEL goes on from there" in line
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == files


def test_other_weights_under_the_same_path_begin_again_and_do_not_continue(models, trained, tmp_path, capsys) -> None:
    """Before the first checkpoint they are read; after it they are refused, and a checkpoint of another run always."""
    out, model, last = tmp_path / "out", tmp_path / "bert", tmp_path / "out" / "run" / "checkpoint_last.pt"
    shutil.copytree(models / "bert", model)
    words = ("adapt", model, models / "text.txt", "--out", out, "--updates", "3")
    found, file = [], model / "model.safetensors"
    for factor in (1.0, 2.0):
        save_file({name: factor * weight for name, weight in load_file(file).items()}, file, {"format": "pt"})
        assert main([str(word) for word in words]) == 0
        recipe, settings = (
            (out / "adapt.yaml").read_text(encoding="utf-8"),
            json.loads((out / "settings.json").read_text()),
        )
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        assert sha256 == settings["model_sha256"] == yaml.safe_load(recipe)["task"]["started_from"]
        found.append(read_state(out / "model" / "model.pt")["model"]["transformer.layers.0.ffn_in.weight"])
    assert torch.equal(found[1], 2 * found[0])
    last.parent.mkdir()
    state = read_state(out / "model" / "model.pt")
    task = {"started_from": sha256}
    torch.save(state | {"optimizer_history": [{"num_updates": 3}], "cfg": state["cfg"] | {"task": task}}, last)
    shutil.copytree(models / "bert", model, dirs_exist_ok=True)
    assert "or from other weights (different: model_sha256): give another --out" in error_line(capsys, main, *words)
    shutil.rmtree(model)  # what the training began with is in OUT
    assert main([str(word) for word in words]) == 0
    assert f"nothing to do: {last.parent} is finished" in capsys.readouterr().err
    torch.save(torch.load(last, weights_only=True) | {"cfg": {"task": {}}}, last)
    line = error_line(capsys, main, *words, reports_progress=True)
    assert f"{last} is of another run, which did not begin with MODEL: move it away, or give another --out" in line


def test_a_text_that_is_encoded_may_be_removed(models, trained, tmp_path, capsys) -> None:
    """A changed one is refused."""
    text = shutil.copy(models / "text.txt", tmp_path / "text.txt")
    arguments = ["adapt", models / "bert", text, "--out", tmp_path / "out"]
    assert main([str(word) for word in arguments]) == 0
    before = text.read_text(encoding="utf-8")
    text.write_text(f"{before}\n\nmore", encoding="utf-8")
    line = error_line(capsys, main, *arguments, reports_progress=True)
    assert "was not made of these inputs and settings" in line
    text.unlink()
    assert main([str(word) for word in arguments]) == 0
    assert trained == ["adapt.yaml"] * 2


def test_a_fifth_of_the_text_is_held_out_up_to_a_quarter_of_a_megabyte(models, trained, tmp_path) -> None:
    """20,000 tokens or more, where a fifth has them."""
    lines = [f"{line} {number}" for number in range(1000) for line in LINES]
    for count, tokens in ((40_000, (20_000, math.inf)), (400, (0, 20_000))):
        text = tmp_path / f"{count}.txt"
        text.write_text("\n\n".join(lines[:count]), encoding="utf-8")
        out = tmp_path / f"out{count}"
        assert main(["adapt", str(models / "bert"), str(text), "--out", str(out)]) == 0
        corpus = json.loads((out / "data" / "corpus.json").read_text())
        share = min(0.2, 250_000 / text.stat().st_size)
        assert corpus["valid"]["bytes"] / text.stat().st_size == pytest.approx(share, rel=0.06)
        assert tokens[0] <= corpus["valid"]["tokens"] < tokens[1]


@pytest.mark.slow
def test_model_and_result_are_compared(models: Path, tmp_path: Path) -> None:
    """With a rate of nearly 0 the result is MODEL: the loss before the first update is that of the trainer's last validation.
    The cosine is that of transformers' states, in a naive loop; the commands take both checkpoints."""
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("\n\n".join("\n".join(LINES[i : i + 3]) for i in range(0, 39, 3)), encoding="utf-8")
    words = ["--updates", "2", "--batch-size", "4", "--set", "task.precision=float32", "optimization.lr=[1e-12]"]
    done = run_main(main, "adapt", models / "bert", text, "--out", out, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    first, *_, last = [record for record in records(out / "run") if record["split"] == "valid"]
    assert (first["update"], last["update"]) == (0, 2)
    assert first["mlm_loss_2"] == pytest.approx(last["mlm_loss_2"], abs=1e-3)
    loss = f"{first['mlm_loss_2']:.2f} nats"
    held_out = f"on held-out text, mlm_loss_2 was {loss} with MODEL and is {loss} at update 2 "
    assert re.search(re.escape(held_out) + r"\(unigram entropy: [2-9]\.\d\d\)\n", done.stderr)

    found = re.search(r"cosine of (\d+) unrelated lines.* MODEL (\S+), the result (\S+)\n", done.stderr)
    count, cosine, of_result = found.groups()
    dictionary = amos_fairseq.load(out / "run").loaded.dictionary
    lines = [[dictionary[i] for i in line[1:-1]] for line in steps.unrelated_lines(str(out / "data"))]
    places = [int(re.search(r"number([\d#]+)", "".join(line)).group(1).replace("#", "")) for line in lines]
    assert len(lines) == int(count) > 1
    assert all(abs(one - other) > 1 for one, other in itertools.combinations(places, 2))
    model = AutoModel.from_pretrained(models / "bert").eval()
    tokenizer = AutoTokenizer.from_pretrained(models / "bert")
    with torch.no_grad():
        encoded = [tokenizer(f"[CLS] {LINES[place]} [SEP]", return_tensors="pt") for place in places]
        vectors = [model(**each).last_hidden_state[0].mean(0) for each in encoded]
    cosines = [torch.cosine_similarity(*pair, dim=0).item() for pair in itertools.combinations(vectors, 2)]
    assert float(cosine) == pytest.approx(sum(cosines) / len(cosines), abs=6e-4)
    assert of_result == cosine
    commands = [line.removeprefix("adapt: ") for line in done.stderr.splitlines() if line.startswith("adapt: amos ")]
    for command, num_updates in zip(commands, (0, 2), strict=True):
        given = build_parser().parse_args(shlex.split(command)[1:])
        assert read_pretrained_checkpoint(given.checkpoint).num_updates == num_updates


def test_all_gpus_share_the_batch(monkeypatch, tmp_path) -> None:
    recipe = tmp_path / "adapt.yaml"
    recipe.write_text("dataset: {batch_size: 32}", encoding="utf-8")
    for num_gpus, expected in ((0, []), (1, []), (4, ["dataset.batch_size=8"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=num_gpus: number)
        assert steps.divide_batch(recipe) == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(steps.UserError, match="a batch of 32 blocks cannot be divided among 3 GPUs"):
        steps.divide_batch(recipe)
    recipe.write_text("{common: {cpu: true}, dataset: {batch_size: 32}}", encoding="utf-8")
    assert steps.divide_batch(recipe) == []


def test_signals_reach_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The training ends with the code 75 at SIGTERM, and this command with it."""
    program = (
        "import signal, sys, pathlib, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(60)"
    )
    monkeypatch.setattr(steps, "training_command", lambda *_, **__: ([sys.executable, "-c", program], dict(os.environ)))

    def stop() -> None:
        while not (tmp_path / "ready").exists():
            threading.Event().wait(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    (tmp_path / "adapt.yaml").write_text("dataset: {batch_size: 32}", encoding="utf-8")
    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(SystemExit) as ended:
        steps.train(tmp_path / "adapt.yaml")
    assert ended.value.code == 75
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_all_steps_and_the_same_command_again(models: Path, tmp_path: Path) -> None:
    """A BERT is its own generator; two updates at a tenth of 5e-4 move its weights a little, and the new head more."""
    out = tmp_path / "out"
    words = "--objective electra --generator self --updates 2 --batch-size 4 --set task.precision=float32"
    command = ["adapt", models / "bert", models / "text.txt", "--out", out, *words.split()]
    done = run_main(main, *command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    last = out / "run" / "checkpoint_last.pt"
    trained, imported = (read_state(file)["model"] for file in (last, out / "model" / "model.pt"))
    name = "layers.0.ffn_in.weight"
    change = (trained[f"discriminator.{name}"] - imported[f"transformer.{name}"]).abs().max()
    assert 0 < change < 1.1e-4
    assert not any(name.startswith(("generator", "mlm_head")) for name in trained)
    num_tokens = json.loads((out / "data" / "corpus.json").read_text())["train"]["tokens"]
    length = yaml.safe_load((out / "adapt.yaml").read_text())["task"]["tokens_per_sample"]
    expected = f"2 updates, which read the text {2 * 4 * (length - 1) / num_tokens:.2g} times; "
    assert f"adapt: {expected}peak of the learning rate 5e-05, of the new head 0.0005" in done.stderr
    assert "recipe" not in done.stderr.partition(expected)[0]
    held_out = r"rtd_auc was 0\.\d\d with MODEL and a new head \(so .*\) and is 0\.\d\d at update 2 \(chance: 0\.50;"
    assert re.search(held_out, done.stderr)
    assert "train longer" not in done.stderr  # the loss of masked tokens is that of a generator that does not train
    updates = [record["update"] for record in records(out / "run") if record["split"] == "train"]
    assert updates == [1, 2]  # at least ten, of more updates
    before = last.read_bytes()
    again = run_main(main, *command)
    assert again.returncode == 0, again.stderr[-2000:]
    assert f"adapt: nothing to do: {out / 'run'} is finished" in again.stderr
    assert again.stderr.splitlines()[-4:] == done.stderr.splitlines()[-4:]  # what compares MODEL and the result
    assert last.read_bytes() == before
    # In minutes; the validation of MODEL before the first update once ended the run after one.
    timed = ["--out", tmp_path / "timed", "--minutes", "0.2", "--batch-size", "4"]
    _, again = (run_main(main, *command[:3], *timed) for _ in range(2))
    log = (tmp_path / "timed" / "run" / "hydra_train.log").read_text(encoding="utf-8")
    updates, minutes = re.search(r"([\d,]+) updates in (\S+) of 0\.2 minutes", log).groups()
    assert int(updates.replace(",", "")) > 5
    assert 0.05 < float(minutes) < 0.5  # on busy cores
    assert re.search(r"WARNING: the loss of masked tokens on held-out .* train longer, or on more text", again.stderr)
    assert f"adapt: nothing to do: {tmp_path / 'timed' / 'run'} is finished" in again.stderr
