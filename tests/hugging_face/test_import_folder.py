"""Folders that ``amos import`` refuses, in one line and with nothing written; incomplete folders that it accepts."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from failures import error_line, full_disk
from hugging_face_folders import export, write_electra, write_model, write_tokenizer
from safetensors.torch import load_file, save_file

from amos_fairseq.checkpoints.read import load_checkpoint, read_state
from amos_fairseq.cli.main import main
from amos_fairseq.hugging_face.import_folder import read_folder
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.fast_tokenizer import ABSENT, row_map

TINY = ("--arch", "amos_tiny")
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    classes = {"mpnet": "MPNet", "bert": "Bert", "modernbert": "ModernBert"}
    for family, name in classes.items():
        write_model(root / family, family, f"{name}Model")
    write_electra(root)
    (root / "discriminator").rename(root / "electra")
    return root


def config(**settings) -> Change:
    """Change settings of ``config.json``."""

    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | settings))

    return change


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def modules(kind: str, path: str = "") -> Change:
    """The ``modules.json`` of sentence-transformers."""
    return text("modules.json", json.dumps([{"type": f"sentence_transformers.models.{kind}", "path": path}]))


def weights(change: Callable[[dict], dict], pickled: bool = False) -> Change:
    def write(folder: Path) -> None:
        file = folder / "model.safetensors"
        content = change(load_file(file))
        file.unlink()
        if pickled:
            torch.save(content, folder / "pytorch_model.bin")
        else:
            save_file(content, file, metadata={"format": "pt"})

    return write


def slow_tokenizer(folder: Path) -> None:
    """A tokenizer class that cannot be converted, and would be built from ``vocab.txt``."""
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))


def no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)  # transformers 5 writes no special_tokens_map.json


def pipe(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def only(*names: str, content: str = "{}") -> Change:
    """A folder with these files alone."""

    def change(folder: Path) -> None:
        shutil.rmtree(folder)
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)

    return change


def code_as_tokenizer(folder: Path) -> None:
    slow_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_x.X", null]}}')
    (folder / "tokenization_x.py").write_text("raise SystemExit")


LARGE = 10**9  # building it would take terabytes, or days
DEEP = "[" * 100_000 + "]" * 100_000
WORDS, QUERY = "embeddings.word_embeddings.weight", "encoder.layer.0.attention.self.query.weight"
ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 0.0}}
OF_DEBERTA_V3 = {"model_type": "deberta-v2", "relative_attention": True, "position_biased_input": False}
OF_DEBERTA_V3 |= {"norm_rel_ebd": "layer_norm", "type_vocab_size": 0}
OF_DEBERTA_V3 |= {"share_att_key": True, "pos_att_type": "p2c|c2p"}
UNFIT = "do not fit their configuration"
# Change of a folder, what the line names, and the family if it is not BERT.
REFUSED: dict[str, tuple] = {
    "deberta, version 1": (config(model_type="deberta"), "its model_type 'deberta' is none that"),
    "deberta, version 2": (
        config(conv_kernel_size=3, **OF_DEBERTA_V3),
        "conv_kernel_size is 3, not 0, which this package does not compute",
    ),
    "deberta, projections": (config(**OF_DEBERTA_V3 | {"share_att_key": False}), "share_att_key is False, not True"),
    "deberta, positions": (
        config(**OF_DEBERTA_V3 | {"pos_att_type": "c2p"}),
        "pos_att_type is ['c2p'], not c2p and p2c",
    ),
    "modules: images": (modules("CLIPModel"), "begin with a text encoder ('sentence_transformers.models.CLIP"),
    "modules: outside": (modules("Transformer", "1_a/../.."), "Transformer 1_a/../..'"),
    "modules: no list": (text("modules.json", "{}"), "modules.json"),
    "other class": (config(model_type="modernbert"), "is no configuration of a modernbert model"),
    "activation": (config(hidden_act="gelu_new"), "hidden_act is 'gelu_new'"),
    "no number": (config(hidden_size="wide"), "hidden_size is 'wide', which is not valid"),
    "nan": (config(hidden_dropout_prob=math.nan), "config.json"),
    "many layers": (config(num_hidden_layers=LARGE), "num_hidden_layers is 1000000000, which is not valid"),
    "renamed settings": (config(attribute_map={"hidden_size": "w"}, w=LARGE, hidden_size=32), UNFIT),
    "modern window": (config(local_attention=7), "local_attention is 7", "modernbert"),
    "modern layers": (config(layer_types=["sliding_attention"] * 2), "layer_types do not repeat", "modernbert"),
    "modern positions": (config(rope_parameters=ROPE), "rope_theta of sliding_attention is 0.0", "modernbert"),
    "config: deep": (text("config.json", DEEP), "config.json is not JSON that"),
    "tokenizer: pipe": (pipe, "tokenizer.json is a pipe"),
    "tokenizer settings: cut": (text("tokenizer_config.json", "{"), "tokenizer_config.json is not JSON"),
    "tokenizer class": (slow_tokenizer, "its tokenizer cannot be read"),
    "no tokenizer": (no_tokenizer, "holds no tokenizer", "mpnet"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors", "mpnet"),
    "weights: cut": (cut, "not the whole state of a model (Error while", "mpnet"),
    "weights: layer": (weights(lambda w: w | {f"encoder.layer.{'9' * 900}.x": torch.ones(1)}), "is missing"),
    "weights: shape": (weights(lambda w: w | {QUERY: torch.ones(3, 5)}), "have the shapes"),
    "weights: integers": (weights(lambda w: w | {QUERY: w[QUERY].long()}), f"{QUERY} has integers"),
    "weights: nan": (weights(lambda w: w | {QUERY: w[QUERY] / 0}), f"{QUERY} has numbers that are not finite"),
    "weights: no rows": (weights(lambda w: w | {WORDS: torch.ones(0, 16)}), "0 rows of vocabulary"),
    "adapter": (only("adapter_config.json", "adapter_model.safetensors"), "is an adapter (LoRA): merge it"),
    "tensorflow": (only("config.json", "tf_model.h5"), "weights of TensorFlow alone: take model.safetensors"),
    "google": (only("bert_config.json", "bert_model.ckpt.index"), "has weights of TensorFlow alone"),
    "trainer": (only(*(f"checkpoint-{n}/config.json" for n in (500, 1000))), "newest model, {}/checkpoint-1000"),
    "hub cache": (only("refs/main", "snapshots/0a1b/config.json"), "newest revision, {}/snapshots/0a1b"),
    "git-lfs": (text("model.safetensors", "version https://git-lfs.github.com/spec/v1"), "run `git lfs pull`"),
    "tokenizer: code": (code_as_tokenizer, "no tokenizer.json, only a tokenizer that is code"),
    "pickle: key": (weights(lambda w: w | {5: torch.ones(1)}, True), "5 is not a printable string"),
    "pickle: view": (weights(lambda w: w | {"a": torch.ones(1).half().expand(2**40)}, True), "than it stores"),
    "pickle: sparse": (weights(lambda w: w | {QUERY: w[QUERY].to_sparse()}, True), "no plain numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_folders_that_are_refused(name, folders, tmp_path, capsys):
    """At once, and in a line that does not repeat 5,000 characters; larger sizes than the weights' are never built."""
    change, named, *family = REFUSED[name]
    shutil.copytree(folders.joinpath(*family or ["bert"]), tmp_path / "in")
    change(tmp_path / "in")
    start = time.process_time()
    command = ("import", tmp_path / "in", tmp_path / "out" / "model.pt", *TINY)
    line = error_line(capsys, main, *command, reports_progress=True)
    assert named.format(tmp_path / "in") in line
    assert time.process_time() - start < 5
    assert len(line) - len(str(tmp_path)) < 500
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("prefix", "pickled"), [("module.", True), ("module._orig_mod.", False)])
def test_the_printed_command_removes_the_prefix_of_all_names(prefix, pickled, folders, tmp_path, capsys):
    """Of DataParallel and torch.compile; the folder is then the one without it."""
    folder, out = tmp_path / "a folder", tmp_path / "out" / "model.pt"
    shutil.copytree(folders / "bert", folder)
    weights(lambda w: {f"{prefix}{name}": tensor for name, tensor in w.items()}, pickled)(folder)
    line = error_line(capsys, main, "import", folder, out, *TINY)
    assert f"all names begin with {prefix}, of DataParallel or torch.compile): remove that: python -c " in line
    subprocess.run(line.partition("remove that: ")[2].replace("python", sys.executable, 1), shell=True, check=True)
    before, after = (read_folder(path).weights for path in (folders / "bert", folder))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_arguments_that_are_refused(folders, tmp_path, capsys):
    """The last folder has a generator of another model; the second command finds another tokenizer beside OUT."""
    (tmp_path / "old.pt").touch()
    write_tokenizer(tmp_path / "tokenizer", "roberta")
    shutil.copytree(folders / "generator", tmp_path / "other")
    weights(lambda w: w | {"electra.embeddings.position_embeddings.weight": torch.ones(40, 8)})(tmp_path / "other")
    write_model(tmp_path / "short", "bert", "BertModel", padded_rows=-2)
    bert, electra, out = folders / "bert", folders / "electra", tmp_path / "new" / "a.pt"
    generator = ["--arch", "electra_tiny", "--generator"]
    for arguments, named in (
        ((bert, tmp_path / "old.pt"), "old.pt exists"),
        (
            (bert, tmp_path / "model.pt", *TINY),
            "is the tokenizer of another model: give model.pt a directory of its own",
        ),
        ((bert, out, "--arch", "bert_base"), "is not an architecture of this package"),
        # A generator of a third of the width, which is 16 here.
        ((electra, out, "--arch", "electra_base"), "with --arch electra_base for what it lacks"),
        ((electra, out, *TINY, "--generator", folders / "generator"), "--arch amos_tiny is not an electra_*"),
        ((electra, out, *generator, bert), "only two ELECTRA models"),
        ((electra, out, *generator, tmp_path / "other"), "encoder.embed_positions.weight differ"),
        ((tmp_path / "short", out, *TINY), "rows of vocabulary"),
    ):
        assert named in error_line(capsys, main, "import", *arguments, reports_progress=True)
    assert not out.parent.exists()


def test_weights_in_several_files(folders, tmp_path, capsys):
    """As save_pretrained splits them; then with a file, an entry or the index damaged."""
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    shutil.copytree(folders / "bert", pieces)
    (pieces / "model.safetensors").unlink()
    transformers.AutoModel.from_pretrained(folders / "bert").save_pretrained(pieces, max_shard_size="10KB")
    index = pieces / "model.safetensors.index.json"
    shards = sorted(pieces.glob("model-*.safetensors"))
    assert len(shards) > 2
    for source, out in ((folders / "bert", whole), (pieces, tmp_path / "out")):
        main(["import", str(source), str(out / "model.pt"), *TINY])
    states = [torch.load(path / "model.pt", weights_only=True)["model"] for path in (whole, tmp_path / "out")]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    shards[1].unlink()
    for text_of_index, named in (
        ('{"weight_map": {"a": 5}}', "is not an index of weights"),
        (DEEP, f"{index} "),
        (index.read_text(), "is missing: these are not the whole weights of a bert model"),
    ):
        index.write_text(text_of_index)
        assert named in error_line(capsys, main, "import", pieces, tmp_path / "refused" / "model.pt")


@pytest.mark.parametrize("limit", [100, 20_000])
def test_a_full_disk_leaves_nothing(limit, folders, tmp_path, capsys):
    """While the tokenizer is written, and while the checkpoint is written, whose tokenizer then stays."""
    (tmp_path / "out").mkdir()
    with full_disk(limit):
        line = error_line(capsys, main, "import", folders / "bert", tmp_path / "out" / "model.pt", *TINY)
    assert "model.pt cannot be written (File too large): make room" in line
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer"][: limit // 1000]


def test_vocabulary_without_mask_or_padding(folders, tmp_path, capsys):
    """Without <mask> a row is newly initialized, which is reported; without a padding token no batch can be built."""
    for role in ("mask_token", "pad_token"):
        shutil.copytree(folders / "mpnet", tmp_path / role)
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            (tmp_path / role / name).unlink(missing_ok=True)
        path = tmp_path / role / "tokenizer.json"
        token = {"mask_token": "<mask>", "pad_token": "<pad>"}[role]
        path.write_text(path.read_text().replace(json.dumps(token), json.dumps("<other>")))
    main(["import", str(tmp_path / "mask_token"), str(tmp_path / "out" / "model.pt"), *TINY])
    assert "no <mask>: that row of the vocabulary is newly initialized" in capsys.readouterr().out
    assert row_map(load_tokenizer(tmp_path / "out" / "tokenizer"))[-1] == ABSENT
    line = error_line(capsys, main, "import", tmp_path / "pad_token", tmp_path / "b.pt")
    assert "no token in the role of <pad>" in line


@pytest.mark.parametrize("folder", ["", "0_Transformer"])
def test_the_pooler_in_a_folder_of_sentence_transformers_comes_back_after_further_training(folder, tmp_path, capsys):
    """Bit for bit, of the bare class and of the masked language model, from which AutoModel reads the pooler too."""
    write_model(tmp_path / "in" / folder, "bert", "BertForPreTraining")
    modules("Transformer", folder)(tmp_path / "in")
    main(["import", str(tmp_path / "in"), str(tmp_path / "out" / "model.pt"), "--arch", "mlm_tiny"])
    said = capsys.readouterr().out
    assert "what follows the encoder is not kept, but for the mean as pooling" in said
    assert "the pooler is kept" in said
    run, state = tmp_path / "run", read_state(tmp_path / "out" / "model.pt")
    model = load_checkpoint(tmp_path / "out" / "model.pt").model
    with torch.no_grad():
        for parameter in model.parameters():  # as a run that started from it would
            parameter.add_(torch.randn_like(parameter) * 0.01)
    state["cfg"]["task"]["data"] = "corpus"
    run.mkdir()
    (run / "tokenizer").symlink_to(tmp_path / "out" / "tokenizer")
    torch.save(state | {"model": model.state_dict()}, run / "checkpoint_last.pt")
    export(run, tmp_path / "after")
    before, after = (
        transformers.BertModel.from_pretrained(path).state_dict()
        for path in (tmp_path / "in" / folder, tmp_path / "after")
    )
    changed = {name.partition(".")[0] for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {"embeddings", "encoder"}
    # The class of the card, counted by the library: an MLM has no pooler, and its output embedding is that of the input.
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "after").parameters()
    assert (
        f"| Parameters | {sum(parameter.numel() for parameter in theirs):,}"
        in (tmp_path / "after/README.md").read_text()
    )
