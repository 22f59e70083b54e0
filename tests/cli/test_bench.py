"""``amos bench`` from end to end in this process: its page, its JSON file, and errors."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from failures import error_line

from amos_fairseq.cli.main import main
from amos_fairseq.errors import UserError
from amos_fairseq.measure import measurement
from amos_fairseq.measure.contest import PEERS
from amos_fairseq.measure.fairseq_step import FairseqStep
from amos_fairseq.measure.flops import training_flops
from amos_fairseq.measure.step_profile import PARTS
from amos_fairseq.recipes.composition import compose_recipe
from amos_fairseq.run import kernels as compilation

SMALL = ["--vocabulary-size", "600", "--steps", "2", "--warmup", "1", "--set", "dataset.batch_size=2"]


@pytest.fixture(autouse=True)
def small_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "MATMUL_EDGES", {"cpu": (32, 64)})
    monkeypatch.setattr(measurement, "COPIED_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(measurement, "SECONDS", {"cpu": 0.0})


def bench(out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON and the page of one run."""
    main(["bench", "--precision", "float32", *arguments, *SMALL, "--device", "cpu", "--out", str(out)])
    (page,), (values,) = out.glob("*.md"), out.glob("*.json")
    assert page.stem == values.stem
    return json.loads(values.read_text()), page.read_text()


@pytest.mark.slow
def test_page_and_json_report_all_measurements(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    found, page = bench(tmp_path / "results", "electra_tiny", "--peer", "hf", "hf_naive", "reference")
    printed = capsys.readouterr().out
    assert printed.startswith(page)
    assert str(tmp_path / "results") in printed.removeprefix(page)
    sizes = {"sequences": 2, "tokens_per_sequence": 64, "masked_positions": 20, "vocabulary_rows": 640}
    assert found["work"] == {"objective": "electra", **sizes, "precision": "float32", "device": "cpu"}
    names = [contestant["name"] for contestant in found["contestants"]]
    assert names == ["ours", "hf", "hf_naive", "reference"]
    ours, *others = found["contestants"]
    cfg = compose_recipe("electra_tiny", ["distributed_training.distributed_world_size=1", "dataset.batch_size=2"])
    assert {c["flops_per_token"] for c in found["contestants"]} == {training_flops(cfg, 600, reference=True).per_token}
    for contestant in found["contestants"]:
        check_row(contestant, found["matmul_peak"])
    assert ours["ours_is_faster_by"] is None
    for other in others:
        ratios = sorted(theirs / our for our, theirs in zip(ours["seconds"], other["seconds"], strict=True))
        expected = {"min": ratios[0], "median": sum(ratios) / 2, "max": ratios[1]}
        assert other["ours_is_faster_by"] == pytest.approx(expected)
    assert list(found["parts"]) == list(PARTS)
    assert sum(found["parts"].values()) == pytest.approx(1)
    assert found["config"]["model"]["kernels"] == "fast"
    assert found["config"]["dataset"]["batch_size"] == 2
    assert found["versions"]["torch"] == torch.__version__
    assert (found["pieces"], found["not_compiled"], found["data"]["reads_corpus"]) == ([], {}, False)
    for shown in (*names, *PARTS, "matrix peak", "encoder_layers: 2", "reading the corpus not counted"):
        assert shown in page


def check_row(row: dict[str, Any], peak: float) -> None:
    """Two steps of 128 tokens; weights, gradients and two moments are four values of 4 bytes per parameter."""
    speed = row["tokens_per_second"]
    assert speed["min"] == pytest.approx(128 / max(row["seconds"]))
    assert speed["max"] == pytest.approx(128 / min(row["seconds"]))
    assert speed["median"] == pytest.approx((speed["min"] + speed["max"]) / 2)
    assert row["flops_per_second"] == pytest.approx(row["flops_per_token"] * speed["median"])
    assert row["fraction_of_peak"] == pytest.approx(row["flops_per_second"] / peak)
    assert 16 * row["parameters"] <= row["held_bytes"] <= 16 * row["parameters"] * 1.02
    assert row["peak_bytes"] > row["held_bytes"]


def test_bf16_keeps_float32_masters(tmp_path: Path) -> None:
    """Weights 2 bytes; masters, their gradients and two moments 4: 18 bytes per parameter; the model keeps no gradient."""
    found, _ = bench(tmp_path, "mlm_tiny", "--precision", "bf16")
    (row,) = found["contestants"]
    assert found["work"]["precision"] == "bf16"
    assert 18 * row["parameters"] <= row["held_bytes"] <= 18 * row["parameters"] * 1.02


@pytest.mark.slow
def test_loader_is_measured_on_a_given_corpus(binarized_corpus: Path, tmp_path: Path) -> None:
    """The time of reading is then included, and the page says so; one loader process is enough for a step of many layers."""
    settings = ["--steps", "1", "--warmup", "0", "--device", "cpu"]
    main(["bench", "mlm_tiny", *settings, "--out", str(tmp_path / "read"), "--set", f"task.data={binarized_corpus}"])
    (page,), (values,) = (list((tmp_path / "read").glob(f"*.{kind}")) for kind in ("md", "json"))
    data = json.loads(values.read_text())["data"]
    assert data["reads_corpus"]
    assert "one loader process reads and masks" in page.read_text()
    ours = json.loads(values.read_text())["contestants"][0]["tokens_per_second"]["median"]
    assert data["loader_processes"] == max(1, math.ceil(ours / data["tokens_per_second"]))


@pytest.mark.slow
def test_unequal_peer_and_models_that_cannot_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours fails when it is built, a peer when it is compiled, at its first step."""

    def refuse(device: torch.device) -> None:
        raise UserError("nothing compiles here")

    def compile_later(module: torch.nn.Module, **settings: Any) -> None:
        def refuse(*arguments: Any, **inputs: Any) -> None:
            raise RuntimeError("no compiler\nis found")

        module.forward = refuse

    monkeypatch.setattr(compilation, "require_compiler", refuse)
    monkeypatch.setattr(torch.nn.Module, "compile", compile_later)
    found, page = bench(tmp_path, "amos_tiny", "--compile", "--peer", "hf")
    ours, peer = found["contestants"]
    assert (ours["name"], peer["name"], ours["unequal_work"]) == ("ours", "hf", "")
    assert "ELECTRA instead of amos" in peer["unequal_work"]
    assert peer["unequal_work"] in page
    assert peer["flops_per_token"] < ours["flops_per_token"]
    assert found["not_compiled"] == {"ours, compiled": "nothing compiles here", "hf, compiled": "no compiler"}
    assert "`ours, compiled` is not in the contest: nothing compiles here" in page
    assert "`hf, compiled` is not in the contest: no compiler" in page


def test_errors_without_compilation_propagate(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: FairseqStep, batch: dict[str, Any]) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(FairseqStep, "step", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        main(["bench", "mlm_tiny", *SMALL])


def test_nothing_is_written_without_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["bench", "mlm_tiny", *SMALL])
    assert "tokens/s" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mlm_tiny", "--steps", "0"], "--steps 0 must be at least 1"),
        (["mlm_tiny", "--threads", "0"], "--threads 0 must be at least 1"),
        (["mlm_tiny", "--set", "optimization.update_freq=[2]"], "a step is one micro-batch"),
        (["mlm_tiny", "--set", "common.amp=true"], "give --precision float32, bf16 or fp16"),
        (["mlm_tiny", "--precision", "fp16", "--device", "cpu"], "task.precision=fp16 needs a GPU"),
        (["mlm_tiny", "--peer", "nobody"], f"--peer nobody is unknown: choose among {', '.join(PEERS)}"),
        (["mlm_tiny", "--out", "/dev/null/results"], "--out /dev/null/results cannot be made"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert message in error_line(capsys, main, "bench", *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_refused(capsys: pytest.CaptureFixture) -> None:
    line = error_line(capsys, main, "bench", "mlm_tiny", "--device", "cuda")
    assert "--device cuda: PyTorch finds no GPU here" in line


def test_fine_tuning_is_measured_with_both_kinds_of_batches(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Random batches of these lengths are mostly padding, and similar ones hardly; both loops have a speed on both."""
    main(["bench", "electra_tiny", "--finetuning", *SMALL[:6], "--device", "cpu", "--out", str(tmp_path)])
    page = capsys.readouterr().out
    assert (tmp_path / "electra_tiny_finetuning.md").read_text() == page
    random, similar = [
        row.split("|") for row in page.splitlines() if row.startswith(("| random |", "| similar lengths |"))
    ]
    paddings = [int(row[2].removesuffix("% ")) for row in (random, similar)]
    assert paddings[0] > 30 > 5 > paddings[1]
    for _, _, _, ours, theirs, ratio, _ in (random, similar):
        assert float(ours.replace(",", "")) > 0 < float(theirs.replace(",", ""))
        median, least, most = map(float, ratio.translate({40: " ", 41: " "}).replace("to", " ").split())
        assert 0 < least <= median <= most


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["electra_tiny", "--peer", "hf"], "--finetuning has one peer and no parts, so --peer cannot apply"),
        (["amos_tiny"], "Hugging Face's ELECTRA has no relative positions"),
        (["electra_tiny", "--precision", "bf16"], "--finetuning measures float32"),
    ],
)
def test_what_cannot_be_measured_of_fine_tuning(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture
) -> None:
    assert reason in error_line(capsys, main, "bench", *arguments, "--finetuning", "--device", "cpu")
