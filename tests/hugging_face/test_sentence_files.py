"""What a folder has besides the encoder comes back after import, further training and export: BERT's pooler, and the files with
which sentence-transformers makes a vector of a text."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from failures import error_line
from hugging_face_folders import export, write_model

from amos_fairseq.checkpoints.read import load_checkpoint, read_state
from amos_fairseq.cli.main import main

FLAGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
FILES = {
    "1_Pooling/config.json": {"word_embedding_dimension": 16}
    | {f"pooling_mode_{flag}": flag == "mean_tokens" for flag in FLAGS},
    "sentence_bert_config.json": {"max_seq_length": 24, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {"query": "query: "}, "similarity_fn_name": "dot"},
}
VERSION_5 = {"embedding_dimension": 16, "pooling_mode": ["cls", "max"], "include_prompt": True}


def modules(*kinds: str, package: str = "sentence_transformers.models") -> list[dict]:
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1))]
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
    write_files(folder, FILES | {"modules.json": modules("Transformer", "Pooling", "Normalize")})
    return folder


@pytest.mark.parametrize("arch", ["mlm_tiny", "amos_tiny"])
def test_pooler_and_sentence_files_come_back_after_further_training(arch, original, tmp_path, capsys):
    """Bit for bit, of the bare class and of the masked language model, from which AutoModel reads the pooler too."""
    main(["import", str(original), str(tmp_path / "in" / "model.pt"), "--arch", arch])
    said = capsys.readouterr().out
    assert "sentence-transformers: mean_tokens, Normalize; amos export writes it again" in said
    assert "the pooler is kept" in said
    assert "pooler.dense" not in said
    out = tmp_path / "out"
    export(trained_further(tmp_path / "in" / "model.pt", tmp_path / "run"), out)
    before, after = (transformers.BertModel.from_pretrained(folder).state_dict() for folder in (original, out))
    changed = {name.partition(".")[0] for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {"embeddings", "encoder"}
    for name in ("modules.json", *FILES):
        assert json.loads((out / name).read_text()) == json.loads((original / name).read_text())
    card = (out / "README.md").read_text()
    assert "Further pretraining changes what similarities mean" in card
    assert 'SentenceTransformer("out").encode(' in card
    assert "; sentence-transformers cuts texts at 24," in card
    # The class of the card, counted by the library: an MLM has no pooler, and its output embedding is that of the input.
    auto = transformers.AutoModelForMaskedLM if arch.startswith("mlm") else transformers.AutoModel
    theirs = sum(parameter.numel() for parameter in auto.from_pretrained(out).parameters())
    assert f"| Parameters | {theirs:,}" in card
    assert ("reports as unexpected" in card) is arch.startswith("mlm")


def test_encoder_in_a_folder_of_its_own_and_settings_of_version_5(original, tmp_path, capsys):
    root = tmp_path / "old"
    root.mkdir()
    (root / "0_Transformer").symlink_to(original)
    files = {
        "1_Pooling/config.json": VERSION_5,
        "modules.json": modules("Transformer", "Pooling", package="sentence_transformers"),
    }
    files["modules.json"][0]["path"] = "0_Transformer"
    write_files(root, files)
    main(["import", str(root), str(tmp_path / "in" / "model.pt"), "--arch", "mlm_tiny"])
    assert "sentence-transformers: cls, max; amos" in capsys.readouterr().out
    export(tmp_path / "in" / "model.pt", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text()) == VERSION_5
    assert json.loads((tmp_path / "out" / "modules.json").read_text())[0]["path"] == ""
    settings = json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
    assert settings == FILES["sentence_bert_config.json"]


@pytest.mark.parametrize(
    ("kinds", "named"),
    [(("Pooling", "Dense"), "Pooling, Dense"), (("Pooling", "Dense", "Normalize"), "Dense"), ((), "no pooling")],
)
def test_modules_with_another_function_are_named(kinds, named, original, tmp_path, capsys):
    (tmp_path / "in").symlink_to(original)
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in original.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "modules.json").unlink()
    write_files(folder, {"modules.json": modules("Transformer", *kinds)})
    main(["import", str(folder), str(tmp_path / "a" / "model.pt"), "--arch", "amos_tiny"])
    assert re.search(rf"sentence-transformers: left out \(.*{named}", capsys.readouterr().out)
    export(tmp_path / "a" / "model.pt", tmp_path / "out")
    assert not (tmp_path / "out" / "modules.json").exists()


@pytest.mark.parametrize("content", ["[", "[1]", '{"../evil.py": 1}', '{"1_Pooling/../../config.json": 1}', "\udcff"])
def test_a_checkpoint_with_damaged_files(content, original, tmp_path, capsys):
    """A checkpoint may come from a stranger: no file is written outside of the folder."""
    main(["import", str(original), str(tmp_path / "in" / "model.pt"), "--arch", "amos_tiny"])
    state = read_state(tmp_path / "in" / "model.pt")
    data = list(content.encode("utf-8", "surrogateescape"))
    torch.save(state | {"model": {**state["model"], "sentence_files": torch.tensor(data)}}, tmp_path / "in" / "bad.pt")
    line = error_line(capsys, main, "export", tmp_path / "in" / "bad.pt", tmp_path / "out", reports_progress=True)
    assert "sentence-transformers files are damaged" in line
    assert not (tmp_path / "out").exists()
