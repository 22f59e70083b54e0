"""The commands of docs/stock_commands.md, at small size: from text that SentencePiece has encoded to an export."""

import os
import re
import stat
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
from tiny_runs import ROOT, environment, run_process

import amos_fairseq
from amos_fairseq.text.tokenization import load_tokenizer

SMALL = (
    "--cpu --num-workers 0 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --log-format simple --no-epoch-checkpoints"
)
# What a command has -> what it has here.
SIZES = {
    "amos_base": "amos_tiny",
    "amos_fairseq ": f"{ROOT / 'amos_fairseq'} ",
    "--tokens-per-sample 512 --max-positions 512 --batch-size 32 --update-freq 64": "--tokens-per-sample 32 "
    f"--max-positions 32 --batch-size 8 {SMALL}",
    "10000 --total-num-update 125000 --max-update 125000": "2 --total-num-update 4 --max-update 4",
    "--max-update 100 --cpu": f"--max-update 4 --tokens-per-sample 32 --max-positions 32 {SMALL}",
    "--workers 8": "--workers 1",
    "--batch-size 32": "--batch-size 8 --cpu",
}
MODULES = {
    "fairseq-preprocess": "fairseq_cli.preprocess",
    "fairseq-train": "fairseq_cli.train",
    "fairseq-validate": "fairseq_cli.validate",
    "amos": "amos_start",
    "torchrun": "torch.distributed.run",
}
SPM_ENCODE = """
import sys, sentencepiece
processor = sentencepiece.SentencePieceProcessor(sys.argv[1].removeprefix("--model="))
for line in sys.stdin:
    print(*processor.encode(line.rstrip("\\n"), out_type=str))
"""


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """Variables with a PATH that has the commands of the page."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "spm_encode.py").write_text(SPM_ENCODE)
    scripts = {name: f'-m {module} "$@"' for name, module in MODULES.items()}
    scripts["spm_encode"] = f'{folder / "spm_encode.py"} "$@"'
    for name, arguments in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\nexec '{sys.executable}' {arguments}\n")
        (folder / name).chmod(0o755 | stat.S_IXUSR)
    return environment({"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)})


def commands_of_page() -> list[str]:
    page = (ROOT / "docs" / "stock_commands.md").read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    return [line for line in lines if not line.startswith("fairseq-hydra-train")]  # tests/recipes/test_hydra_train.py


@pytest.mark.slow
def test_from_encoded_text_to_an_export(corpus_text: Path, commands: dict[str, str], tmp_path: Path) -> None:
    lines = corpus_text.read_text(encoding="utf-8").splitlines()
    (tmp_path / "train.txt").write_text("\n".join(lines[:-30]) + "\n", encoding="utf-8")
    (tmp_path / "valid.txt").write_text("\n".join(lines[-30:]) + "\n", encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "train.txt"),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=220,
        user_defined_symbols=["zork"],
        minloglevel=2,
    )
    printed = {}
    for line in commands_of_page():
        for there, here in SIZES.items():
            line = re.sub(r" +", " ", line).replace(there, here)
        done = run_process(["bash", "-c", line], tmp_path, commands)
        assert done.returncode == 0, (line, done.stderr[-3000:])
        printed[" ".join(line.split()[:2])] = done.stdout + done.stderr
    verified = re.search(r"(\d+) of the (\d+) symbols .* and (\d+) of (\d+) lines of the text", printed["amos verify"])
    assert verified[1] == verified[2]
    assert verified[3] == verified[4] != "0"
    assert "compared with the checkpoint: token ids equal" in printed["amos export"]
    assert "valid on 'valid' subset | loss" in printed["fairseq-validate DATA"]

    processor = sentencepiece.SentencePieceProcessor(str(tmp_path / "spm.model"))
    tokenizer = load_tokenizer(tmp_path / "DATA" / "tokenizer")
    pieces = [tokenizer.encode(line) for line in lines[-30:]]
    assert pieces == [processor.encode(line, out_type=str) for line in lines[-30:]]
    dictionary = (tmp_path / "DATA" / "dict.txt").read_text(encoding="utf-8").splitlines()
    rows = {line.rpartition(" ")[0]: row for row, line in enumerate(dictionary, 4)}
    assert [tokenizer.ids_of(line) for line in pieces] == [[rows.get(piece, 3) for piece in line] for line in pieces]
    all_pieces = [processor.id_to_piece(index) for index in range(3, processor.get_piece_size())]
    absent = [piece for piece in all_pieces if piece not in rows]
    assert "zork" in absent

    from transformers import AutoModel, AutoTokenizer

    exported, tokens = AutoModel.from_pretrained(tmp_path / "HF").eval(), AutoTokenizer.from_pretrained(tmp_path / "HF")
    encoder = amos_fairseq.load(tmp_path / "RUN", tmp_path / "DATA" / "tokenizer")
    for text in (" ".join(lines[-30].split()[:5]), f"a {absent[0].strip('▁')} b"):
        with torch.no_grad():
            theirs = exported(**tokens(text, return_tensors="pt")).last_hidden_state
            torch.testing.assert_close(
                encoder([text]).states, theirs, rtol=0, atol=1e-5
            )  # float32, other order of sums
