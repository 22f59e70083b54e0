"""What `amos import` writes goes into stock fairseq-train with the flags that it printed: a labelled task, and pretraining."""

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary
from forked_command import run_command
from hugging_face_folders import LINES, POSITIONS, write_electra, write_model
from interrupted_run import assert_same_bits
from synthetic_corpus import write_rows

import amos_fairseq
from amos_fairseq.checkpoints.read import load_checkpoint, origin_of, read_state
from amos_fairseq.cli.main import main
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.benchmark import read_pretrained_checkpoint
from amos_fairseq.hugging_face.import_folder import load_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    folders = tmp_path_factory.mktemp("hugging_face")
    write_electra(folders)
    return folders


def run_import(out: Path, capsys: pytest.CaptureFixture, *arguments: str | Path) -> list[str]:
    """Import; the flags of fairseq-train that were printed."""
    main(["import", *map(str, arguments), str(out), "--arch", "electra_tiny"])
    return re.search(r"flags of fairseq-train that build this model: (.*)", capsys.readouterr().out).group(1).split()


def write_data(directory: Path, dictionary: Dictionary, rows: list[torch.Tensor]) -> None:
    for split in ("train", "valid"):
        write_rows(directory, split, rows)
    dictionary.save(str(directory / "dict.txt"))


def train(data: Path, save_dir: Path, *flags: str) -> str:
    """One update; what was logged."""
    common = "--user-dir amos_fairseq --lr 0.001 --lr-scheduler fixed --batch-size 8 --max-update 1 --num-workers 0 "
    common += "--cpu --log-format simple --log-interval 1 --no-epoch-checkpoints"
    return run_command("fairseq_cli.train", [str(data), *common.split(), "--save-dir", str(save_dir), *flags])


def assert_started_from(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """One Adam update of 0.001 moves no weight further: the run started from these values, not from others."""
    assert before.keys() <= after.keys()
    for name, value in before.items():
        moved = (after[name] - value).abs().max()
        assert moved < 0.0011, name
        assert moved > 0 or "positions" in name or "token_types" in name, name  # not all positions and types occur


@pytest.mark.slow
def test_fairseq_fine_tunes_an_imported_electra(folders, tmp_path, capsys):
    checkpoint = tmp_path / "imported" / "model.pt"
    flags = run_import(checkpoint, capsys, folders / "discriminator")
    dictionary, labels = Dictionary.load(str(checkpoint.parent / "tokenizer" / "dict.txt")), Dictionary()
    pretrained = load_checkpoint(checkpoint)
    for label in ("no", "yes"):
        labels.add_symbol(label)
    rows = [pretrained.tokens(line)[1:] for line in LINES[:8]]  # --init-token puts <s> in front
    write_data(tmp_path / "data" / "input0", dictionary, rows)
    write_data(tmp_path / "data" / "label", labels, [torch.tensor([4 + i % 2]) for i in range(len(rows))])
    task = "--task sentence_prediction --criterion sentence_prediction --num-classes 2 --init-token 0 --optimizer adam"
    start = ["--finetune-from-model", str(checkpoint)]
    said = train(tmp_path / "data", tmp_path / "run", *task.split(), *start, *flags)
    assert "fine-tuning uses the encoder of a pretraining checkpoint" in said
    before, after = read_state(checkpoint), read_state(tmp_path / "run" / "checkpoint_last.pt")
    assert after["optimizer_history"][-1]["num_updates"] == 1
    assert after["cfg"]["model"]["token_types"] == 2
    assert after["cfg"]["model"]["layer_norm_eps"] == before["cfg"]["model"]["layer_norm_eps"] == 1e-12
    kept = {name: tensor for name, tensor in before["model"].items() if name.startswith("discriminator.")}
    renamed = {name.replace("discriminator.", "encoder."): tensor for name, tensor in kept.items()}
    assert_started_from(renamed, after["model"])
    assert after["model"]["encoder.embed_positions.weight"].shape[0] == POSITIONS


@pytest.mark.slow
def test_fairseq_continues_the_pretraining_of_both_networks(folders, tmp_path, capsys):
    """As a checkpoint of ours: --restore-file alone, and nothing to reset."""
    checkpoint = tmp_path / "imported" / "model.pt"
    flags = run_import(checkpoint, capsys, folders / "discriminator", "--generator", folders / "generator")
    rows = [load_checkpoint(checkpoint).tokens(line)[1:] for line in LINES]
    write_data(tmp_path / "data", Dictionary.load(str(checkpoint.parent / "tokenizer" / "dict.txt")), rows)
    task = f"--task text_pretraining --criterion electra --tokens-per-sample {POSITIONS} --optimizer grouped_adam"
    said = train(tmp_path / "data", tmp_path / "run", *task.split(), "--restore-file", str(checkpoint), *flags)
    assert f"Loaded checkpoint {checkpoint} (epoch 1 @ 0 updates)" in said
    after = read_state(tmp_path / "run" / "checkpoint_last.pt")
    assert after["optimizer_history"][-1]["num_updates"] == 1
    assert_started_from(read_state(checkpoint)["model"], after["model"])


def test_a_folder_is_a_checkpoint_of_a_command(tmp_path, capsys):
    """As the file that ``amos import`` writes, bit for bit: what was trained from one is finished for the other."""
    folder, file, out = tmp_path / "bert", tmp_path / "own" / "bert.pt", tmp_path / "out"
    write_model(folder, "bert", "BertModel")
    rows = (f"{line}\t{['odd', 'even'][number % 2]}" for number, line in enumerate(LINES))
    (tmp_path / "rows.tsv").write_text("\n".join(["text\tlabel", *rows]), encoding="utf-8")
    main(["import", str(folder), str(file)])
    command = ["classify", "--train", str(tmp_path / "rows.tsv"), "--out", str(out), "--cpu", "--seeds", "1"]
    command += ["--epochs", "1", "--min-updates", "2", "--checkpoint"]
    main([*command, str(folder)])
    absent = "not in it, and only for pretraining: detection head, generators, mixture, mlm heads"
    assert re.search(rf"classify: bert \(bert, .*M\) is imported; {absent}\n", capsys.readouterr().err)
    for checkpoint in (folder, file):
        main([*command, str(checkpoint)])
        assert re.search(r"\b(\d) of \1 runs are already finished", capsys.readouterr().out)
    assert (out / "imported" / "model.pt").read_bytes() == file.read_bytes()
    assert origin_of(load_checkpoint(next(out.glob("runs/*/*/seed1/checkpoint_last.pt"))).parent).startswith(
        "bert (bert, "
    )
    ours, theirs = load_checkpoint(file), load_model(folder)
    assert_same_bits(ours.model.state_dict(), theirs.model.state_dict(), "model")
    for name in ("task", "criterion", "num_updates", "is_new", "heads", "parent"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (theirs.file, theirs.tokenizer.sha256) == (folder / "model.safetensors", ours.tokenizer.sha256)
    encoder = pickle.loads(pickle.dumps(amos_fairseq.load(folder)))
    assert torch.equal(encoder(LINES).states, amos_fairseq.load(file)(LINES).states)
    with pytest.raises(
        UserError,
        match=r"model\.safetensors has no head for labels \(it has none; that of a Hugging Face folder is not read",
    ):
        encoder.predict(LINES)


def test_a_folder_that_pools_states_by_their_mean_is_fine_tuned_so(tmp_path, capsys):
    """As MiniLM's folder says it, and as sentence-transformers writes it today; no other pooling, and no several ones."""
    folder, out = tmp_path / "bert", tmp_path / "out"
    write_model(folder, "bert", "BertModel")
    types = {"": "sentence_transformers.models.Transformer", "1_Pooling": "sentence_transformers.models.Pooling"}
    (folder / "modules.json").write_text(json.dumps([{"path": path, "type": kind} for path, kind in types.items()]))
    (folder / "1_Pooling").mkdir()
    cls, mean = "pooling_mode_cls_token", "pooling_mode_mean_tokens"
    for number, (content, pooling) in enumerate(
        [
            ({cls: True, mean: False}, "first"),
            ({cls: True, mean: True}, "first"),
            ({"pooling_mode": ["mean", "cls"]}, "first"),
            ({"pooling_mode": "mean"}, "mean"),
            ({cls: False, mean: True}, "mean"),
        ]
    ):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(content))
        main(["import", str(folder), str(tmp_path / str(number) / "bert.pt")])
        assert read_pretrained_checkpoint(tmp_path / str(number) / "bert.pt").pooling == pooling
        assert ("(--pooling mean)" in capsys.readouterr().out) == (pooling == "mean")
    (tmp_path / "rows.tsv").write_text("\n".join(["text\tlabel", *(f"{line}\t{len(line) % 2}" for line in LINES)]))
    command = ["classify", "--train", str(tmp_path / "rows.tsv"), "--out", str(out), "--cpu", "--epochs", "1"]
    command += ["--min-updates", "2", "--checkpoint", str(folder)]
    for pooling, said in (("mean", "pooling mean (the folder's)"), ("first", "pooling first")):
        main([*command, *(["--pooling", "first"] if pooling == "first" else [])])
        printed = capsys.readouterr().out
        recipe = next(line for line in printed.splitlines() if line.startswith("recipe own_labels"))
        assert said in re.split(r"(?:: |, )", recipe)
        runs = [read_state(file)["cfg"]["model"] for file in out.glob("runs/*/*/seed1/checkpoint_*.pt")]
        assert any(model["pooling"] == pooling and model["pooler_activation_fn"] == "tanh" for model in runs)
