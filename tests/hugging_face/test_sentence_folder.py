"""Folders of sentence-transformers: the encoder is imported, and BERT's pooler with it."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from hugging_face_folders import export, write_model

from amos_fairseq.checkpoints.read import load_checkpoint, read_state
from amos_fairseq.cli.main import main


def modules(*kinds: str, package: str = "sentence_transformers.models", first: str = "") -> list[dict]:
    paths = [first, *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1))]
    numbered = enumerate(zip(kinds, paths, strict=True))
    return [{"idx": n, "name": str(n), "path": path, "type": f"{package}.{kind}"} for n, (kind, path) in numbered]


def write_files(folder: Path, files: dict) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))


def trained_further(imported: Path, run: Path) -> Path:
    """A checkpoint of a run that started from ``imported``: fairseq loads it, every parameter moves, fairseq saves it."""
    state, model = read_state(imported), load_checkpoint(imported).model
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    state["cfg"]["task"]["data"] = "corpus"
    run.mkdir()
    (run / "tokenizer").symlink_to(imported.parent / "tokenizer")
    torch.save(state | {"model": model.state_dict()}, run / "checkpoint_last.pt")
    return run


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "model"
    write_model(folder, "bert", "BertForPreTraining")
    write_files(folder, {"modules.json": modules("Transformer", "Pooling", "Normalize")})
    return folder


@pytest.mark.parametrize("arch", ["mlm_tiny", "amos_tiny"])
def test_the_pooler_comes_back_after_further_training(arch, original, tmp_path, capsys):
    """Bit for bit, of the bare class and of the masked language model, from which AutoModel reads the pooler too."""
    main(["import", str(original), str(tmp_path / "in" / "model.pt"), "--arch", arch])
    said = capsys.readouterr().out
    assert "sentence-transformers: pooling and what else follows the encoder are not kept" in said
    assert "the pooler is kept" in said
    assert "pooler.dense" not in said
    out = tmp_path / "out"
    export(trained_further(tmp_path / "in" / "model.pt", tmp_path / "run"), out)
    before, after = (transformers.BertModel.from_pretrained(folder).state_dict() for folder in (original, out))
    changed = {name.partition(".")[0] for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {"embeddings", "encoder"}
    card = (out / "README.md").read_text()
    # The class of the card, counted by the library: an MLM has no pooler, and its output embedding is that of the input.
    auto = transformers.AutoModelForMaskedLM if arch.startswith("mlm") else transformers.AutoModel
    theirs = sum(parameter.numel() for parameter in auto.from_pretrained(out).parameters())
    assert f"| Parameters | {theirs:,}" in card
    assert ("reports as unexpected" in card) is arch.startswith("mlm")


def test_an_encoder_in_a_folder_of_its_own(original, tmp_path, capsys):
    """With the package of version 5."""
    (tmp_path / "0_Transformer").symlink_to(original)
    content = modules("Transformer", "Pooling", package="sentence_transformers", first="0_Transformer")
    write_files(tmp_path, {"modules.json": content})
    main(["import", str(tmp_path), str(tmp_path / "a" / "model.pt"), "--arch", "mlm_tiny"])
    assert "are not kept" in capsys.readouterr().out
