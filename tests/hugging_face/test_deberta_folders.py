"""DeBERTaV3's pair as its authors save it: import, export, transformers, and what is refused.

``release_tiny`` and the values of the authors' code are in ``../shared/data/deberta_v3`` beside the checkout, or in
``DEBERTA_V3_REFERENCE``; the other tests write such a folder themselves.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from failures import error_line
from safetensors.torch import load_file, save_file
from saved_models import change_checkpoint, write_run
from small_models import DEBERTA_PAIR
from torch import Tensor
from transformers import DebertaV2Model

from amos_fairseq.checkpoints.read import LoadedCheckpoint, load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.hugging_face.import_folder import read_folder_tokenizer
from amos_fairseq.text.tokenization.fast_tokenizer import row_map

REFERENCE = Path(os.environ.get("DEBERTA_V3_REFERENCE", Path(__file__).parents[3] / "shared/data/deberta_v3"))
RELEASE, BASE_KEYS = REFERENCE / "release_tiny", REFERENCE / "release_tiny_base_keys"
with_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the authors' values are not here")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Hydra
DISCRIMINATOR, GENERATOR = "pytorch_model.bin", "pytorch_model.generator.bin"
TABLE = "deberta.embeddings.word_embeddings"


def imported(source: Path, out: Path, *flags: str) -> LoadedCheckpoint:
    assert main(["import", str(source), str(out / "model.pt"), *flags]) == 0
    return load_checkpoint(out / "model.pt")


def weights(folder: Path, file: str = DISCRIMINATOR) -> dict[str, Tensor]:
    return torch.load(folder / file, weights_only=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the authors' form, from a pair with random weights."""
    root = tmp_path_factory.mktemp("pair")
    settings = DEBERTA_PAIR | {"relative_position_buckets": 16, "relative_position_max_distance": 150}
    run = write_run(root / "run", "electra", encoder_layers=4, **settings)
    state = torch.load(run / "checkpoint_last.pt", weights_only=True)["model"]
    state["disentangled_embedding.delta.weight"].normal_(0, 0.3)
    change_checkpoint(run, model=state)
    assert main(["export", str(run), str(root / "out"), "--part", "pair"]) == 0
    return root / "out"


def test_import_and_export_of_a_pair_are_the_same_bits(pair: Path, tmp_path: Path) -> None:
    assert imported(pair, tmp_path).is_new == frozenset()
    assert main(["export", str(tmp_path / "model.pt"), str(tmp_path / "again"), "--part", "pair"]) == 0
    for file in (DISCRIMINATOR, GENERATOR):
        before, after = weights(pair, file), weights(tmp_path / "again", file)
        assert before.keys() == after.keys()
        assert all(tensor.dtype == torch.float16 for tensor in after.values())
        assert all(torch.equal(before[name], after[name]) for name in before)
    for name in ("config.json", "generator_config.json"):
        assert json.loads((pair / name).read_text()) == json.loads((tmp_path / "again" / name).read_text())
    whole = weights(pair, GENERATOR)[f"{TABLE}.weight"] + weights(pair)[f"{TABLE}._weight"]
    assert torch.equal(whole, weights(pair)[f"{TABLE}.weight"])


def test_delta_is_computed_where_the_folder_has_only_the_sum(pair: Path, tmp_path: Path) -> None:
    """As in deberta-v3-base; the generator may be in another folder, and the discriminator in safetensors."""
    shutil.copytree(pair, tmp_path / "in")
    state = {name: tensor for name, tensor in weights(pair).items() if "_weight" not in name}
    (tmp_path / "in" / DISCRIMINATOR).unlink()
    (tmp_path / "in" / GENERATOR).unlink()
    save_file(state, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    model = imported(tmp_path / "in", tmp_path, "--generator", str(pair)).model
    rows = row_map(read_folder_tokenizer(pair))
    ours = model.disentangled_embedding.weight[: len(rows)]
    torch.testing.assert_close(ours, state[f"{TABLE}.weight"].float()[rows], rtol=1e-6, atol=1e-7)
    assert model.disentangled_embedding.delta.weight.abs().max() > 0.1
    assert main(["export", str(tmp_path / "model.pt"), str(tmp_path / "again"), "--part", "pair"]) == 0
    again = weights(tmp_path / "again")[f"{TABLE}.weight"]
    torch.testing.assert_close(again, state[f"{TABLE}.weight"], rtol=2e-3, atol=1e-3)


def test_without_a_generator_it_is_new(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    shutil.copytree(pair, tmp_path / "in")
    (tmp_path / "in" / GENERATOR).unlink()
    loaded = imported(tmp_path / "in", tmp_path)
    assert (
        "no pytorch_model.generator.bin: the generator is new, and amos adapt trains it first"
        in capsys.readouterr().out
    )
    assert {"generator", "mlm_head"} <= loaded.is_new
    rows = row_map(read_folder_tokenizer(pair))
    table = loaded.model.encoder_embedding.weight[: len(rows)]
    assert torch.equal(table, weights(pair)[f"{TABLE}.weight"].float()[rows])


def of_generator(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        torch.save(change(weights(folder, GENERATOR)), folder / GENERATOR)

    return apply


def other_configuration(folder: Path) -> None:
    file = folder / "generator_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"position_buckets": 16}))


NAME = f"{TABLE}.weight"
REFUSED = {
    "other sum": (of_generator(lambda w: w | {NAME: w[NAME] * 1.5}), "_weight do not add up to the discriminator's"),
    "other rows": (of_generator(lambda w: w | {NAME: w[NAME][:-2]}), "table of tokens has another size"),
    "other buckets": (other_configuration, "relative_position_buckets is 32, and must be 16"),
    "no head": (
        of_generator(lambda w: {name: tensor for name, tensor in w.items() if "lm_head" not in name}),
        "lm_predictions.lm_head.dense.weight is missing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_generator_of_another_model_is_refused(
    name: str, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    change, named = REFUSED[name]
    shutil.copytree(pair, tmp_path / "in")
    change(tmp_path / "in")
    line = error_line(capsys, main, "import", tmp_path / "in", tmp_path / "out" / "model.pt", reports_progress=True)
    assert named in line
    assert f"the generator in {tmp_path / 'in'}" in line or "lm_head" in line
    assert not (tmp_path / "out").exists()


@with_reference
@torch.no_grad()
def test_a_released_pair_computes_what_the_authors_code_does(tmp_path: Path) -> None:
    """States and detection with their sum in float16; ours is in float32, as in training, and 5e-4 away in some rows."""
    loaded, texts = imported(RELEASE, tmp_path), json.loads((REFERENCE / "tokenizer_expected.json").read_text())
    theirs = texts["authors SPMTokenizer ([CLS] + pieces + [SEP])"]
    rows, expected = row_map(loaded.tokenizer), load_file(REFERENCE / "release_tiny_expected.safetensors")
    row_of_id = {int(index): row for row, index in enumerate(rows)}
    assert [*row_of_id] == [1, 0, 2, 3, *range(4, 200), *range(201, 208), 200]
    for number, text in enumerate(texts["texts"][:2]):  # the others spell special tokens
        ids = rows[torch.tensor(loaded.framed([loaded.tokenizer.ids_of(loaded.tokenizer.encode(text))], 64))]
        assert ids.tolist() == theirs[number]["ids"]
    model, half = loaded.model, weights(RELEASE)[f"{TABLE}.weight"].float()
    assert (model.encoder_embedding.weight[: len(rows)] - half[rows]).abs().max() < 6e-4
    delta = model.disentangled_embedding.delta.weight
    delta[: len(rows)] = half[rows] - model.embed_tokens.weight[: len(rows)]
    for number in range(4):
        ids = expected[f"text{number}.ids"].flatten().tolist()
        states = model.extract_features(torch.tensor([[row_of_id[index] for index in ids]]))
        torch.testing.assert_close(
            states[0], expected[f"text{number}.last_hidden"].view_as(states[0]), rtol=0, atol=1e-5
        )
        logits = model.detection_head(states)[0]
        torch.testing.assert_close(logits, expected[f"text{number}.rtd_logits"].view_as(logits), rtol=0, atol=3e-5)


@with_reference
@torch.no_grad()
def test_a_released_pair_is_exported_as_it_was(tmp_path: Path) -> None:
    """All bits, but for the positions that the discriminator has and never reads; transformers loads the encoder."""
    imported(RELEASE, tmp_path)
    for part in ("pair", "encoder"):
        assert main(["export", str(tmp_path / "model.pt"), str(tmp_path / part), "--part", part]) == 0
    for file in (DISCRIMINATOR, GENERATOR):
        before, after = weights(RELEASE, file), weights(tmp_path / "pair", file)
        differing = [name for name in before if not torch.equal(before[name], after[name])]
        assert before.keys() == after.keys()
        assert all(".position_embeddings." in name for name in differing)
    tokens = torch.arange(1, 61)[None]
    states = [
        DebertaV2Model.from_pretrained(folder, dtype=torch.float32).eval()(tokens).last_hidden_state
        for folder in (RELEASE, tmp_path / "pair", tmp_path / "encoder")
    ]
    assert torch.equal(states[0], states[1])
    assert (states[0] - states[2]).abs().max() < 5e-3  # the sum in float32


@with_reference
def test_the_keys_of_deberta_v3_base_are_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    loaded = imported(BASE_KEYS, tmp_path, "--tokenizer", str(RELEASE))
    assert "no pytorch_model.generator.bin" in capsys.readouterr().out
    assert not loaded.is_new & {"discriminator", "detection_head", "embed_tokens"}
