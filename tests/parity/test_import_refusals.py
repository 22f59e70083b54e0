"""Inputs that ``amos import`` refuses, in one line and with nothing written; and incomplete inputs that it accepts."""

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from failures import error_line, full_disk
from hugging_face_folders import write_electra, write_model, write_tokenizer
from safetensors.torch import load_file, save_file

from amos_fairseq.cli.main import main
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.fast_tokenizer import ABSENT, row_map

TINY = ("--arch", "amos_tiny")


def run_import(*arguments: str | Path) -> int:
    return main(["import", *map(str, arguments)])


def refused(capsys, *arguments: str | Path, reports_progress: bool = False) -> str:
    return error_line(capsys, main, "import", *arguments, reports_progress=reports_progress)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    classes = {"mpnet": "MPNet", "bert": "Bert", "roberta": "Roberta", "modernbert": "ModernBert"}
    for family, name in ((family, f"{name}Model") for family, name in classes.items()):
        write_model(root / family, family, name)
    write_electra(root)
    (root / "discriminator").rename(root / "electra")
    return root


def changed(folder: Path, copy: Path, **settings) -> Path:
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | settings))
    return copy


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("bert", {"model_type": "deberta-v2"}, "'deberta-v2' cannot be imported (it has disentangled attention, anot"),
        ("bert", {"model_type": "modernbert"}, "is not a configuration of a modernbert model"),
        ("modernbert", {"hidden_activation": "relu"}, "hidden_activation is 'relu', not the exact 'gelu'"),
        ("modernbert", {"classifier_activation": "silu"}, "classifier_activation is 'silu'"),
        ("modernbert", {"attention_bias": True}, "attention_bias is True, not false"),
        ("modernbert", {"norm_bias": True}, "norm_bias is True, not false"),
        ("modernbert", {"local_attention": 7}, "local_attention is 7, not an even number"),
        ("modernbert", {"sliding_window": -5}, "local_attention is -10, not an even number from 2 on"),
        ("modernbert", {"decoder_bias": False}, "decoder_bias is false, not true"),
        ("modernbert", {"layer_types": ["sliding_attention"] * 2}, "layer_types do not repeat"),
        ("modernbert", {"intermediate_size": 23}, "do not fit their configuration"),
        (
            "modernbert",
            {"num_hidden_layers": 3, "layer_types": None},
            "do not fit their configuration: they have 2 layers",
        ),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
            "rope_parameters of full_attention are",
        ),
        (
            "modernbert",
            {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 0.0}}},
            "rope_theta of sliding_attention is 0.0",
        ),
        ("bert", {"model_type": "gpt2"}, "'gpt2' cannot be imported, only mpnet, electra, bert, roberta, distilbert, "),
        ("bert", {"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "decoder"),
        ("bert", {"num_hidden_layers": 3}, "do not fit their configuration: they have 2 layers, the configuration say"),
        ("bert", {"num_hidden_layers": 1}, "do not fit their configuration"),
        ("bert", {"intermediate_size": 20}, "do not fit their configuration"),
        ("bert", {"hidden_size": "wide"}, "hidden_size is 'wide', which is not valid"),
        ("bert", {"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ("electra", {"embedding_size": 8.0}, "embedding_size is 8.0"),
        ("bert", {"hidden_dropout_prob": None}, "hidden_dropout_prob is None"),
        ("bert", {"id2label": ["a"]}, "is not a configuration of a bert model"),
        ("bert", {"hidden_size": 32}, "take both files from the same model"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets is 64"),
        ("roberta", {"pad_token_id": 0}, "pad_token_id is 0"),
    ],
)
def test_unsupported_models_are_refused(family, settings, message, folders, tmp_path, capsys):
    folder = changed(folders / family, tmp_path / "in", **settings)
    assert message in refused(capsys, folder, tmp_path / "out" / "model.pt", *TINY)
    assert not (tmp_path / "out").exists()


LARGE = 10**9  # building it would take terabytes, or days
SIZES = "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings", "type_vocab_size"


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *(("bert", {name: size}) for size in (LARGE, 10**30) for name in SIZES),
        ("bert", {"num_attention_heads": LARGE}),
        ("electra", {"embedding_size": LARGE}),
        ("mpnet", {"relative_attention_num_buckets": LARGE}),
        *(("modernbert", {name: LARGE}) for name in ("num_hidden_layers", "intermediate_size")),
        *(("modernbert", {"layer_types": value}) for value in (5, [5, 5], ["x"] * 2, [["full_attention"]] * 2, [])),
        *(("modernbert", {"rope_parameters": value}) for value in (5, [], {"full_attention": 5})),
        *(("modernbert", {"norm_eps": value}) for value in (-1, math.nan)),
        ("modernbert", {"global_attn_every_n_layers": 0, "layer_types": None}),
        ("bert", {"num_labels": LARGE}),
        ("bert", {"attribute_map": {"hidden_size": "width"}, "width": LARGE, "hidden_size": 32}),
        *(("bert", {"architectures": value}) for value in (5, [5], [None], [["a"]], ["x" * 5000], ["a\0"], ["\ud800"])),
        *(("bert", {"hidden_dropout_prob": value}) for value in (-1, 1e300, math.nan, math.inf, int("9" * 400), True)),
        ("bert", {"model_type": "x" * 5000}),
        ("bert", {"hidden_act": "x" * 5000}),
        ("bert", {"model_type": ["bert"]}),
        ("bert", {"dtype": "__class__"}),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_sizes_and_names_of_a_stranger_are_refused(family, settings, folders, tmp_path, capsys):
    """At once, and in a line that does not repeat 5,000 characters; larger sizes than the weights' are never built."""
    folder = changed(folders / family, tmp_path / "in", **settings)
    start = time.process_time()
    line = refused(capsys, folder, tmp_path / "model.pt", *TINY)
    assert time.process_time() - start < 5
    assert "config.json" in line or "do not fit their configuration" in line or "attention heads" in line, line
    assert len(line) - len(str(tmp_path)) < 500


JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
DEEP = "[" * 100_000 + "]" * 100_000
TEXTS = {
    "null": "null",
    "a number": "5",
    "a list": "[]",
    "text": '"x"',
    "cut": "{",
    "not UTF-8": b"\xff",
    "deep": DEEP,
    "500 levels": '{"a":' * 500 + "1" + "}" * 500,
    "5,000 digits": '{"a": %s}' % ("9" * 5000),
    "infinite": '{"a": 1e999}',
}


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("what", ["folder", "circle", "pipe", "broken link", *TEXTS])
def test_what_is_no_json_is_refused(name, what, folders, tmp_path, capsys):
    if name == "tokenizer.json" and what in ("500 levels", "5,000 digits", "infinite"):
        return  # the library itself reads this file
    folder = tmp_path / "in"
    shutil.copytree(folders / "bert", folder)
    file = folder / name
    file.unlink(missing_ok=True)
    if what in TEXTS:
        file.write_bytes(TEXTS[what] if isinstance(TEXTS[what], bytes) else TEXTS[what].encode())
    else:
        make = {"folder": file.mkdir, "pipe": lambda: os.mkfifo(file), "broken link": lambda: file.symlink_to("absent")}
        make.get(what, lambda: file.symlink_to(name))()
    assert str(file) in refused(capsys, folder, tmp_path / "model.pt", *TINY)


@pytest.mark.parametrize("token", [5, True, [], {"content": 5}])
def test_special_tokens_that_are_no_strings_are_refused(token, folders, tmp_path, capsys):
    shutil.copytree(folders / "bert", tmp_path / "in")
    (tmp_path / "in" / "tokenizer_config.json").write_text(json.dumps({"cls_token": token}))
    assert "cls_token is" in refused(capsys, tmp_path / "in", tmp_path / "a.pt", *TINY)


OTHER_TOKENIZERS = [f"{name}Tokenizer" for name in ("Rag", "Marian", "Flaubert", "XLM", "Speech2Text")]


@pytest.mark.parametrize("name", [*OTHER_TOKENIZERS, "5", 5, ["a"], "x" * 5000], ids=lambda value: repr(value)[:20])
def test_tokenizers_that_cannot_be_built_are_refused(name, folders, tmp_path, capsys):
    """Each of these classes raises something else, or is no tokenizer."""
    shutil.copytree(folders / "bert", tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").unlink()
    (tmp_path / "in" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    (tmp_path / "in" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    line = refused(capsys, tmp_path / "in", tmp_path / "a.pt", *TINY, reports_progress=True)
    assert "its tokenizer cannot be read" in line or "cannot be converted" in line
    assert len(line) - len(str(tmp_path)) < 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights | {"x" * 5000: torch.ones(1)}, "the name of a weight"),
        (lambda weights: weights | {"a\x1b[31m": torch.ones(1)}, "the name of a weight"),
        (lambda weights: weights | {"encoder.layer.%s.x" % ("9" * 900): torch.ones(1)}, "is missing"),
        (lambda weights: weights | {WORDS: torch.tensor(1.0)}, "have the shapes"),
        (lambda weights: weights | {QUERY: torch.ones(3, 5)}, "have the shapes"),
        (lambda weights: weights | {WORDS: torch.ones(0, 16)}, "0 rows of vocabulary"),
        (lambda weights: weights | {POSITIONS: torch.ones(40)}, "do not fit their configuration"),
    ],
)
@pytest.mark.parametrize("pickled", [False, True])
def test_weights_of_a_stranger_are_refused(change, message, pickled, folders, tmp_path, capsys):
    assert message in refused(capsys, with_weights(folders, tmp_path, change, pickled), tmp_path / "a.pt", *TINY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights | {5: torch.ones(1)}, "the name of a weight: 5 is not a string"),
        (lambda weights: weights | {"half": torch.ones(1).half().expand(2**40)}, "more values than it stores"),
        (lambda weights: weights | {QUERY: weights[QUERY].to("meta")}, "no plain numbers"),
        (lambda weights: weights | {QUERY: weights[QUERY].to_sparse()}, "no plain numbers"),
        (lambda weights: weights | {QUERY: weights[QUERY].to(torch.complex64)}, "no plain numbers"),
    ],
)
def test_pickled_weights_of_other_kinds_are_refused(change, message, folders, tmp_path, capsys):
    assert message in refused(capsys, with_weights(folders, tmp_path, change, True), tmp_path / "a.pt", *TINY)


WORDS, POSITIONS = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
QUERY = "encoder.layer.0.attention.self.query.weight"


def with_weights(folders: Path, tmp_path: Path, change: Callable[[dict], dict], pickled: bool) -> Path:
    shutil.copytree(folders / "bert", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    weights = change(load_file(file))
    file.unlink()
    if pickled:
        torch.save(weights, file.with_name("pytorch_model.bin"))
    else:
        save_file(weights, file, metadata={"format": "pt"})
    return tmp_path / "in"


def test_weights_in_several_files(folders, tmp_path, capsys):
    """As save_pretrained splits them; then with a file, an entry or the index damaged."""
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    shutil.copytree(folders / "bert", pieces)
    (pieces / "model.safetensors").unlink()
    model = transformers.AutoModel.from_pretrained(folders / "bert")
    model.save_pretrained(pieces, max_shard_size="10KB")
    index = pieces / "model.safetensors.index.json"
    shards = sorted(pieces.glob("model-*.safetensors"))
    assert len(shards) > 2
    run_import(folders / "bert", whole / "model.pt", *TINY)
    run_import(pieces, tmp_path / "out" / "model.pt", *TINY)
    states = [torch.load(path / "model.pt", weights_only=True)["model"] for path in (whole, tmp_path / "out")]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    content = json.loads(index.read_text())
    capsys.readouterr()
    refused_out = tmp_path / "refused" / "model.pt"
    index.write_text(json.dumps({"weight_map": content["weight_map"] | {"another.weight": shards[0].name}}))
    assert "the weight another.weight is in none of its files" in refused(capsys, pieces, refused_out)
    for broken in ('{"weight_map": 5}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": "%s"}}' % ("x" * 5000)):
        index.write_text(broken)
        assert "is not an index of weights" in refused(capsys, pieces, refused_out)
    for broken in ("[]", DEEP):
        index.write_text(broken)
        assert f"{index} " in refused(capsys, pieces, refused_out)
    index.write_text('{"weight_map": {"a": "%s"}}' % ("x" * 500))
    assert "is missing" in refused(capsys, pieces, refused_out)
    index.write_text(json.dumps(content))
    shards[1].unlink()
    missing = f"{shards[1].name} is missing, which model.safetensors.index.json names"
    assert missing in refused(capsys, pieces, refused_out)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError("Cannot allocate memory")])
def test_weights_that_cannot_be_mapped_are_refused(error, folders, tmp_path, capsys, monkeypatch):
    """The library maps the whole file, for which a limit on memory may be too low."""

    def load_file(file):
        raise error

    monkeypatch.setattr("safetensors.torch.load_file", load_file)
    line = refused(capsys, folders / "bert", tmp_path / "a.pt", *TINY)
    assert f"model.safetensors cannot be read ({error})" in line


def test_broken_folders_are_refused(folders, tmp_path, capsys):
    out = tmp_path / "out" / "model.pt"
    assert "is not a directory" in refused(capsys, tmp_path / "nowhere", out)
    messages = {"config.json": "config.json is missing", "model.safetensors": "neither model.safetensors"}
    for missing, message in messages.items():
        shutil.copytree(folders / "mpnet", tmp_path / missing)
        (tmp_path / missing / missing).unlink()
        assert message in refused(capsys, tmp_path / missing, out)
    shutil.copytree(folders / "mpnet", tmp_path / "cut")
    content = (tmp_path / "cut" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert "not a whole safetensors file" in refused(capsys, tmp_path / "cut", out)
    shutil.copytree(folders / "mpnet", tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "bare" / name).unlink(missing_ok=True)  # transformers 5 writes no special_tokens_map.json
    assert "holds no tokenizer" in refused(capsys, tmp_path / "bare", out)
    assert not out.parent.exists()


@pytest.mark.slow
def test_existing_files_are_not_overwritten(folders, tmp_path, capsys):
    (tmp_path / "old.pt").touch()
    assert "old.pt exists" in refused(capsys, folders / "mpnet", tmp_path / "old.pt")
    write_tokenizer(tmp_path / "tokenizer", "roberta")
    assert "holds another tokenizer" in refused(capsys, folders / "bert", tmp_path / "model.pt", *TINY)
    assert "must end in .pt" in refused(capsys, folders / "bert", tmp_path / "model")
    out = tmp_path / "a.pt"
    # A generator of a third of the width, which is 16 here.
    line = refused(capsys, folders / "electra", out, "--arch", "electra_base")
    assert "with --arch electra_base for what it lacks" in line
    line = refused(capsys, folders / "bert", out, "--arch", "bert_base")
    assert "is not an architecture of this package" in line


@pytest.mark.parametrize("limit", [100, 20_000])
def test_a_full_disk_leaves_nothing(limit, folders, tmp_path, capsys):
    """While the tokenizer is written, and while the checkpoint is written."""
    (tmp_path / "out").mkdir()
    with full_disk(limit):
        line = refused(capsys, folders / "bert", tmp_path / "out" / "model.pt", *TINY)
    assert "model.pt cannot be written (File too large): make room" in line
    assert list((tmp_path / "out").iterdir()) == []


def test_a_generator_of_another_model_is_refused(folders, tmp_path, capsys):
    command, electra = [folders / "electra", tmp_path / "a.pt"], ["--arch", "electra_tiny", "--generator"]
    line = refused(capsys, *command, *TINY, "--generator", folders / "generator")
    assert "cannot be used with --arch amos_tiny" in line
    assert "only two ELECTRA models" in refused(capsys, *command, *electra, folders / "bert")
    shutil.copytree(folders / "generator", tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    weights["electra.embeddings.position_embeddings.weight"] += 1
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    line = refused(capsys, *command, *electra, tmp_path / "other")
    assert "encoder.embed_positions.weight differ from the discriminator's" in line


def test_vocabulary_without_mask_or_padding(folders, tmp_path, capsys):
    """Without <mask> a row is newly initialized, which is reported; without a padding token no batch can be built."""
    for role in ("mask_token", "pad_token"):
        shutil.copytree(folders / "mpnet", tmp_path / role)
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            (tmp_path / role / name).unlink(missing_ok=True)
        path = tmp_path / role / "tokenizer.json"
        token = {"mask_token": "<mask>", "pad_token": "<pad>"}[role]
        path.write_text(path.read_text().replace(json.dumps(token), json.dumps("<other>")))
    run_import(tmp_path / "mask_token", tmp_path / "out" / "model.pt", *TINY)
    assert "no <mask>: that row of the vocabulary is newly initialized" in capsys.readouterr().out
    assert row_map(load_tokenizer(tmp_path / "out" / "tokenizer"))[-1] == ABSENT
    assert "no token in the role of <pad>" in refused(capsys, tmp_path / "pad_token", tmp_path / "b.pt")


def test_tokens_without_a_row_in_the_model_are_refused(tmp_path, capsys):
    write_model(tmp_path / "in", "bert", "BertModel", padded_rows=-2)
    assert "rows of vocabulary" in refused(capsys, tmp_path / "in", tmp_path / "a.pt", *TINY)
