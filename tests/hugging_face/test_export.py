"""``amos export``: its files, the tokenizer in them, the content of the card, and errors."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
import yaml
from failures import error_line, full_disk
from hugging_face_folders import LINES, write_tokenizer
from safetensors.torch import load_file, save_file
from saved_models import UPDATES, small_tokenizer, write_run
from small_models import DEBERTA_PAIR, MODERN
from tokenizer_text import ALPHABETS, HOSTILE, learn, random_texts, word_level_directory
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from amos_fairseq.checkpoints.read import dictionary_of, load_checkpoint, origin_of
from amos_fairseq.cli.main import main
from amos_fairseq.errors import UserError
from amos_fairseq.files import file_sha256
from amos_fairseq.hugging_face import export as export_module
from amos_fairseq.hugging_face.export import check_output_folder, export
from amos_fairseq.hugging_face.import_folder import read_folder_tokenizer
from amos_fairseq.hugging_face.parts import choose_part
from amos_fairseq.hugging_face.weights import Head
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.exported import exported_tokenizer, with_padding_at_1
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer, row_map, word_starts

FILES = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "amos")
    return root


def names_in(folder: Path) -> set[str]:
    """Names of the files, except one that only transformers 4 writes."""
    return {path.name for path in folder.iterdir()} - {"special_tokens_map.json"}


def card_of(run: Path, out: Path, *flags: str) -> str:
    """The card of an exported folder, which is not compared with the checkpoint."""
    assert main(["export", str(run), str(out), "--no-check", *flags]) == 0
    return (out / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_folder_is_complete_and_the_comparison_is_printed(runs, tmp_path, capsys):
    assert main(["export", str(runs / "amos"), str(tmp_path / "out")]) == 0
    assert names_in(tmp_path / "out") == FILES
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    printed = capsys.readouterr().out
    assert "MPNetModel, the encoder" in printed
    found = re.search(r"token ids equal on (\d+) texts; .* largest difference (\S+), of outputs up to (\S+)", printed)
    assert int(found.group(1)) > 600
    assert 0 < float(found.group(2)) < 3e-5 * float(found.group(3))


def test_card_states_what_is_in_the_checkpoint(runs, tmp_path):
    _, header, text = card_of(runs / "amos", tmp_path / "out").split("---\n", 2)
    data = yaml.safe_load(header)
    assert (data["license"], data["library_name"]) == ("unknown", "transformers")
    for fact in (
        f"| Updates | {UPDATES} |",
        "| Tokens masked | 15% |",
        "| Layers, width, FFN width, heads | 2, 16, 24, 2 |",
        # 62 tokens and 152 positions of 16, LayerNorm, 32 buckets of 2 heads; a layer: four 16x16, 16x24, 24x16, 2 LayerNorms;
        # the pooling layer.
        f"| Parameters | {62 * 16 + 152 * 16 + 32 + 64 + 2 * (4 * 272 + 16 * 24 + 24 + 24 * 16 + 16 + 64) + 272:,} |",
        f"| sha256 of the checkpoint | {file_sha256(runs / 'amos' / 'checkpoint_last.pt')} |",
        'AutoModel.from_pretrained("out")',
        "Its vocabulary is from the training text",
    ):
        assert fact in text, fact
    assert str(runs) not in text, "no path of this machine"


def test_card_of_a_fine_tuned_model(tmp_path, monkeypatch):
    """Scores of the exported checkpoint alone; names of a stranger as a web page of the Hub would show them."""
    task = {"_name": "x|<script>alert(1)</script>"}
    run = write_run(tmp_path / "task" / "trained" / "seed1", classes=2, names=["*a*", "b|c"], task=task)
    state = torch.load(run / "checkpoint_last.pt", weights_only=True)
    state["cfg"]["checkpoint"] = {"finetune_from_model": str(tmp_path / "before" / "checkpoint_last.pt")}
    torch.save(state, run / "checkpoint_last.pt")
    scores = {"accuracy": 71.25, "macro_f1": 70.0, "ece_before": 9.0, "temperature": 2.0}
    settings = {"data_sha256": "0a1b", "rows": 1234, "hyperparameters": {"lr": 3e-4}, "precision": "bf16"}
    result = SimpleNamespace(checkpoint="checkpoint_last.pt", scores=scores, settings=settings, epoch=3.0, seed=2)
    result.notes, result.trial = ["label: 2 classes, inferred: --kind gives another"], ""
    result.versions = {"amos_fairseq": "0.1.0"}
    elsewhere = SimpleNamespace(settings={"data_sha256": "other"})
    monkeypatch.setattr(export_module, "read_result", lambda folder: elsewhere if "other" in folder.parts else result)
    (run / "scores.test.json").write_text('{"accuracy": 69.0, "words": 12}')
    for folder in (run, tmp_path / "task" / "linear" / "seed1", tmp_path / "task" / "other" / "seed1"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").touch()
    card = card_of(run, tmp_path / "out")
    for row in (
        "| Scores on dev | accuracy 71.25, macro F1 70; one of 2 models that were compared on these data |",
        "| Scores on test | accuracy 69 |",
        "| sha256 of the data | 0a1b |",
        "| Training | 1,234 examples, 3 epochs, peak rate 0.0003, seed 2, bf16, amos_fairseq 0.1.0 |",
        "| Data | label: 2 classes, inferred |",
        "| Started from | before/checkpoint_last.pt |",
        r"| Labels | *a*, b\|c |",
        r"| Task | x\|&lt;script&gt;alert(1)&lt;/script&gt; |",
    ):
        assert row in card
    assert str(tmp_path) not in card
    result.trial = "linear"
    of_linear = card_of(run, tmp_path / "linear")
    assert "1,234 examples, a linear model of scikit-learn on the frozen states" in of_linear
    assert "| Updates |" not in of_linear
    result.checkpoint = "checkpoint_best.pt"  # not the one that is exported
    assert "Scores on dev" not in card_of(run / "checkpoint_last.pt", tmp_path / "other")


def test_origin_of_runs_that_began_with_each_other(tmp_path):
    first, second = (write_run(tmp_path / name) / "checkpoint_last.pt" for name in ("first", "second"))
    for run, parent in ((first, second), (second, first)):
        state = torch.load(run, weights_only=True)
        state["cfg"]["checkpoint"] = {"finetune_from_model": str(parent)}
        torch.save(state, run)
    assert origin_of(str(first)) == "second, 7 updates, then 7 updates (amos)"


def test_card_of_an_imported_model(tmp_path):
    task = {"data": "imported from bert-mini (<script>)", "_name": "text_pretraining"}
    card = card_of(write_run(tmp_path / "imported", task=task), tmp_path / "out")
    assert "# MPNetModel, 2 layers of width 16: the encoder" in card
    assert "the encoder of bert-mini (&lt;script&gt;), imported with amos_fairseq and not trained further" in card
    assert "and of bert-mini (&lt;script&gt;), from which the weights come: fill in" in card


def test_force_replaces_exported_folders_only(runs, tmp_path, monkeypatch, capsys):
    """Otherwise a wrong path could remove a home directory. "\\udcff" is how Python reads a byte 0xff of the command line."""
    monkeypatch.chdir(tmp_path)
    for name, file in (("thesis", "chapter.tex"), ("out", "config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("words")
    messages = {"thesis": "holds no exported model", ".": "no name of its own", "..": "no name of its own"}
    messages |= {"x" * 300: "cannot be a folder", "\udcff": "is not UTF-8"}
    for name, message in messages.items():
        with pytest.raises(UserError, match=message):
            check_output_folder(Path(name), replace=True)
    assert "out exists" in error_line(capsys, main, "export", runs / "amos", "out", reports_progress=True)
    assert main(["export", str(runs / "amos"), "out", "--no-check", "--force"]) == 0
    assert names_in(tmp_path / "out") == FILES
    assert {path.name for path in tmp_path.iterdir()} == {"out", "thesis"}
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "words"


@pytest.mark.parametrize("limit", [1_000, 20_000])
def test_a_full_disk_leaves_nothing(runs, tmp_path, monkeypatch, limit):
    """At the tokenizer and at the weights: each library hides the system's error in its own way."""
    loaded = load_checkpoint(runs / "amos")
    monkeypatch.setattr(export_module, "load_model", lambda *arguments: loaded)
    said = r"out cannot be written \(File too large\): make room"
    with full_disk(limit), pytest.raises(UserError, match=said):
        export(runs / "amos", tmp_path / "out", check=False)
    assert list(tmp_path.iterdir()) == []


TWO_TOWER = {"electric_variant": "two_tower", "generator_size": 1, "generator_loss_tokens": "all"}
T5 = {"relative_position_scheme": "t5"}
NARROW_TANH = {"pooler_activation_fn": "tanh", "embedding_dim": 4}


def test_the_scored_checkpoint_of_a_fine_tuning_is_exported(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", classes=2)
    (run / "checkpoint_best.pt").write_bytes((run / "checkpoint_last.pt").read_bytes())
    scored = SimpleNamespace(checkpoint="checkpoint_best.pt")
    for result, file in ((None, run), (scored, run / "checkpoint_best.pt")):
        monkeypatch.setattr(export_module, "read_result", lambda folder, result=result: result)
        monkeypatch.setattr(export_module, "load_model", mock.Mock(side_effect=UserError("read")))
        with pytest.raises(UserError, match="read"):
            export(run, tmp_path / "out")
        assert export_module.load_model.call_args.args[0] == file


def test_random_heads_of_an_import_are_not_exported(tmp_path):
    mlm, amos = (load_checkpoint(write_run(tmp_path / name, name)) for name in ("mlm", "amos"))
    new = dataclasses.replace(mlm, is_new=frozenset({"mlm_head"}))
    assert (choose_part(mlm).head, choose_part(new).head) == (Head.MASKED_LM, Head.NONE)
    new_amos = dataclasses.replace(amos, is_new=frozenset({"detection_head", "generators", "mlm_heads"}))
    for loaded, part in ((new, "mlm"), (new_amos, "generator"), (new_amos, "discriminator")):
        choose_part(dataclasses.replace(loaded, is_new=frozenset()), part)
        with pytest.raises(UserError, match=r"was imported without \w+, which is random until .*: export the encoder"):
            choose_part(loaded, part)


def test_words_of_a_folder_that_is_read_again(tmp_path):
    """A lone word mark, which the export spells as a space, does not get the first character of its word."""
    tokenizer = small_tokenizer()
    run = write_run(tmp_path / "run", "mlm", tokenizer)
    assert main(["export", str(run), str(tmp_path / "out"), "--no-check"]) == 0
    again = read_folder_tokenizer(tmp_path / "out")
    texts = [*LINES, "zzz", "a z", "q"]
    assert any(start == end for text in texts for _, start, end in tokenizer.encode_with_offsets(text))
    for text in texts:
        before, after = (one.encode_with_offsets(text) for one in (tokenizer, again))
        assert [span[1:] for span in before] == [span[1:] for span in after]
    assert word_starts(again).sum() == word_starts(tokenizer).sum()


# Run, flags, what the line names.
REFUSED: list[tuple[dict, list[str], str]] = [
    ({}, ["--part", "mlm"], "has the parts encoder, generator, discriminator"),
    ({}, ["--head", "RTE"], "has no head of this name: it has none"),
    ({}, ["--tokenizer", "other"], "other is not the tokenizer that"),
    ({"relative_position_buckets": 16}, [], "which has 32 buckets and a maximum distance of 128"),
    ({"relative_position_max_distance": 64}, [], "has other t5 positions, token types or embeddings"),
    ({"token_types": 2}, [], "has other t5 positions, token types or embeddings"),
    ({"embedding_dim": 8}, [], "has other t5 positions, token types or embeddings"),
    ({"objective": "electra", "generator": "uniform"}, ["--part", "generator"], "has no generator with a network"),
    ({"objective": "electra", "main_objective": "replace_mlm"}, ["--part", "discriminator"], "has no detection head"),
    ({"objective": "electric"} | TWO_TOWER, [], "has no encoder to fine-tune or to load"),
    ({"objective": "electric"} | MODERN, ["--part", "discriminator"], "has energies of tokens or narrower embeddings"),
    ({"objective": "electric"} | T5, ["--part", "discriminator"], "two layers on relative positions"),
    ({"objective": "electra", "classes": 2} | NARROW_TANH, [], "has tanh in its classification head and narrower"),
    ({"objective": "electra"} | DEBERTA_PAIR, ["--part", "generator"], "no class with a mask decoder"),
    ({"objective": "electra"} | DEBERTA_PAIR, ["--part", "discriminator"], "the form of its authors (--part pair)"),
    ({"span_head": "joint"}, [], "was fine-tuned with a joint head for answers"),
]


@pytest.mark.parametrize(("settings", "flags", "named"), REFUSED)
def test_refusals_are_one_line_and_leave_nothing(settings, flags, named, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "runs")
    write_run(Path("run"), **settings)
    if "other" in flags:
        FastTokenizer(small_tokenizer().model, small_tokenizer().special_tokens).save("other")
    command = ("export", "run", tmp_path / "out", "--no-check", *flags)
    assert named in error_line(capsys, main, *command, reports_progress=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]


@pytest.mark.parametrize("objective", ["amos", "mlm"])
def test_a_tokenizer_of_words_is_exported(objective, tmp_path, capsys):
    """Its library finds special tokens in text, which is said."""
    words = load_tokenizer(word_level_directory(tmp_path / "words", [f"E{number:03}" for number in range(50)]))
    run = write_run(tmp_path / "run", objective, words)
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert re.search(
        r"token ids equal on \d+ texts \(a text that spells \[\w+\] is not text there, but this token\)", printed.out
    )
    assert "WARNING" not in printed.err
    assert "Its vocabulary is that of another model" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", [True, False])
def test_protected_tokens_are_special_there_and_when_they_come_back(words, tmp_path):
    """A text that spells one is that token in both; transformers neither masks nor decodes them."""
    tokenizer = small_tokenizer()
    if words:
        tokenizer = load_tokenizer(word_level_directory(tmp_path / "words", ["fox", "&", "the"]))
    library = Library.from_str(tokenizer.model.decode())
    library.add_special_tokens([AddedToken("&", normalized=False, special=True)])
    model = library.to_str().encode()
    tokenizer = FastTokenizer(model, tokenizer.special_tokens, tokenizer.kind, ["&"])
    run = write_run(tmp_path / "run", "mlm", tokenizer)
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = theirs("the & fox")["input_ids"]
    is_special = theirs.get_special_tokens_mask(ids, already_has_special_tokens=True)
    special = [token for token, flag in zip(theirs.convert_ids_to_tokens(ids), is_special, strict=True) if flag]
    assert special == [theirs.cls_token, "&", theirs.sep_token]
    assert theirs.decode(ids, skip_special_tokens=True).split() == ["the", "fox"]
    assert read_folder_tokenizer(tmp_path / "out").protected == ["&"]
    # transformers 4 ends in a traceback at the list of transformers 5.
    assert "extra_special_tokens" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


def test_a_wrong_weight_and_wrong_token_ids_are_found_and_nothing_is_written(runs, tmp_path, monkeypatch):
    """One weight of a LayerNorm, wrong by a thousandth; two pieces exchanged: the same rows, the same special tokens."""
    write_model = export_module.write_model

    def write_wrong_model(folder, *arguments):
        write_model(folder, *arguments)
        weights = load_file(folder / "model.safetensors")
        weights["encoder.layer.1.output.LayerNorm.weight"][3] += 1e-3
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(export_module, "write_model", write_wrong_model)
    with pytest.raises(UserError, match=r"differs from the checkpoint by .* nothing was written"):
        export(runs / "amos", tmp_path / "out")
    write = export_module.write_tokenizer

    def wrong_ids(*arguments):
        rows = write(*arguments)
        rows.ids[[20, 21]] = rows.ids[[21, 20]]
        return rows

    monkeypatch.setattr(export_module, "write_tokenizer", wrong_ids)
    with pytest.raises(UserError, match=r"has other token ids in the exported tokenizer: .* nothing was written"):
        export(runs / "amos", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_imported_tokenizers_keep_their_ids(family, tmp_path):
    """WordPiece and byte-level BPE keep their ids, which are also our models' input."""
    write_tokenizer(tmp_path / family, family)
    tokenizer = load_tokenizer(tmp_path / family)
    exported, ids = exported_tokenizer(tokenizer), row_map(tokenizer)
    exported.encode_special_tokens = True  # as on our side, spelled symbols are text
    dictionary = dictionary_of(tokenizer)
    texts = [text for alphabet in ALPHABETS.values() for text in random_texts(alphabet, 100)]
    for text, encoding in zip(texts, exported.encode_batch(texts), strict=True):
        rows = [dictionary.index(piece) for piece in tokenizer.encode(text)]
        assert encoding.ids == ids[[dictionary.bos(), *rows, dictionary.eos()]].tolist(), ascii(text)
    library = Library.from_file(str(tmp_path / family / "tokenizer.json"))
    text = "the quick brown fox"
    assert exported.encode(text).ids[1:-1] == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(("kind", "size"), [("wordpiece", 120), ("unigram", 90), ("bytes", 300)])
def test_padding_moves_to_id_1_and_nothing_else_changes(kind, size, tmp_path):
    """The vocabulary of unigrams is a list, in which the position is the id; bytes are exported with two post-processors."""
    library = learn(kind, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], size, LINES)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    before, ids = exported_tokenizer(tokenizer), row_map(tokenizer)
    after, moved = with_padding_at_1(before, "[PAD]", ids)
    assert (before.token_to_id("[PAD]"), after.token_to_id("[PAD]")) == (0, 1)
    exchanged = {0: 1, 1: 0}
    assert moved.tolist() == [exchanged.get(index, index) for index in ids.tolist()]
    for text in [*HOSTILE, "the \u4e2d fox"]:
        found = before.encode(text, "dogs").ids
        assert after.encode(text, "dogs").ids == [exchanged.get(index, index) for index in found]
    assert with_padding_at_1(after, "[PAD]", moved)[0] is after
