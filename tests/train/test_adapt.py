"""``amos adapt``: the recipes that it writes, the generator that it accepts, its signals, and a run of all steps."""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from failures import error_line
from hugging_face_folders import LINES, write_model
from tiny_runs import run_process

from amos_fairseq.adaptation import adapt as steps
from amos_fairseq.checkpoints.read import read_state
from amos_fairseq.cli.main import main
from amos_fairseq.run.metrics_file import FILE_NAME

TRAINED, NEW_HEAD = (5e-5, 1.0), (5e-4, 0.1)  # peak rate, and the encoder's share of it


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a BERT with and without an MLM head, and of an ELECTRA; a text."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "bert", "bert", "BertForMaskedLM")
    write_model(folder / "headless", "bert", "BertModel")
    sizes = {"embedding_size": 8, "hidden_size": 24, "num_attention_heads": 3}  # a third of them is whole
    write_model(folder / "discriminator", "electra", "ElectraForPreTraining", **sizes)
    (folder / "text.txt").write_text("\n\n".join(LINES * 4), encoding="utf-8")
    return folder


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipes that would be trained, by name; a generator is accepted."""
    names: list[str] = []
    monkeypatch.setattr(steps, "train", lambda recipe: names.append(recipe.name))
    monkeypatch.setattr(steps, "check_generator", lambda run: None)
    return names


def adapt(models: Path, out: Path, model: str, *flags: str) -> dict[str, Any]:
    assert main(["adapt", str(models / model), str(models / "text.txt"), "--out", str(out), *flags]) == 0
    return yaml.safe_load((out / "adapt.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("model", "flags", "base", "rates", "generator"),
    [
        ("bert", "", "mlm", TRAINED, None),
        ("headless", "", "mlm", NEW_HEAD, None),
        ("discriminator", "--objective mlm", "mlm", NEW_HEAD, None),
        ("bert", "--objective electra --generator self", "electra", NEW_HEAD, "model/model.pt"),
        ("headless", "--objective electra", "electra", NEW_HEAD, "generator/checkpoint_last.pt"),
        ("discriminator", "--objective electra --generator BERT", "electra", TRAINED, "generator_model/model.pt"),
    ],
)
def test_recipes(model, flags, base, rates, generator, models, trained, tmp_path) -> None:
    words = [str(models / "bert") if word == "BERT" else word for word in flags.split()]
    recipe = adapt(models, tmp_path / "out", model, *words, "--updates", "40")
    assert recipe["defaults"] == ["/fairseq/defaults@_global_", f"/{base}_base", "_self_"]
    assert (recipe["optimization"]["lr"], recipe["model"]["encoder_lr_scale"]) == ([rates[0]], pytest.approx(rates[1]))
    assert recipe["lr_scheduler"] == {"warmup_updates": 4}
    assert recipe["task"]["tokens_per_sample"] == 40  # the positions of the folder, fewer than --length
    found = recipe["model"].get("generator_checkpoint")
    assert found == (generator and str(tmp_path / "out" / generator))
    is_new = generator is not None and generator.startswith("generator/")
    assert trained == [*(["generator.yaml"] if is_new else []), "adapt.yaml"]
    if is_new:
        own = yaml.safe_load((tmp_path / "out" / "generator.yaml").read_text(encoding="utf-8"))
        assert own["defaults"][1] == "/mlm_modern_mini"
        assert own["checkpoint"]["save_dir"] == str(tmp_path / "out" / "generator")
        assert own["model"] == {"max_positions": 40}


@pytest.mark.parametrize(
    ("model", "flags", "line"),
    [
        ("bert", "--generator self", "--generator is for the objectives that detect replaced tokens"),
        ("bert", "--updates 0", "--updates 0 is too small"),
        ("headless", "--objective electra --generator self", "has no trained MLM head and cannot be a generator"),
        ("bert", "--objective electra --generator HEADLESS", "has no trained MLM head and cannot be a generator"),
        ("bert", "--out a:b", "fairseq cannot read paths with a colon"),
        ("bert", "--objective amos --generator self", "a mixture needs MLM heads at several depths"),
        ("absent", "", "absent"),
    ],
)
def test_refusals(model, flags, line, models, trained, tmp_path, capsys) -> None:
    words = [models / "headless" if word == "HEADLESS" else word for word in flags.split()]
    arguments = ("adapt", models / model, models / "text.txt", "--out", tmp_path / "out", *words)
    assert line in error_line(capsys, main, *arguments, reports_progress=True)
    assert trained == []


def test_another_command_does_not_continue(models, trained, tmp_path, capsys) -> None:
    adapt(models, tmp_path / "out", "bert")
    arguments = ("adapt", models / "bert", models / "text.txt", "--out", tmp_path / "out", "--updates", "3")
    line = error_line(capsys, main, *arguments)
    assert "was made by another command (updates: 2000 there, 3 here): give another --out" in line


@pytest.mark.parametrize(("loss", "is_refused"), [(5.4, False), (5.6, True), (7.1, True)])
def test_a_generator_that_only_knows_frequencies_is_refused(loss, is_refused, tmp_path) -> None:
    records = [
        {"split": "valid", "update": 1, "mlm_loss_6": 9.0, "unigram_entropy": 6.0},
        {"split": "valid", "update": 2, "mlm_loss_6": loss, "unigram_entropy": 6.0},
        {"split": "train", "update": 2, "mlm_loss_6": 1.0},
    ]
    (tmp_path / FILE_NAME).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    if not is_refused:
        steps.check_generator(tmp_path)
        return
    with pytest.raises(
        steps.UserError, match=rf"{loss:.2f} nats; that of token frequencies alone is 6.00: give another --out and more"
    ):
        steps.check_generator(tmp_path)


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
    arguments = ["adapt", models / "bert", models / "text.txt", "--out", out, *words.split()]
    command = [sys.executable, "-m", "amos_start", *arguments]
    done = run_process(command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    last = out / "run" / "checkpoint_last.pt"
    trained, imported = (read_state(file)["model"] for file in (last, out / "model" / "model.pt"))
    change = (
        (trained["discriminator.layers.0.ffn_in.weight"] - imported["transformer.layers.0.ffn_in.weight"]).abs().max()
    )
    assert 0 < change < 1.1e-4
    assert not any(name.startswith(("generator", "mlm_head")) for name in trained)
    before = last.read_bytes()
    again = run_process(command)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "nothing to do" in again.stdout + again.stderr
    assert last.read_bytes() == before
    assert torch.isfinite(trained["detection_head.output.weight"]).all()
