"""The commands of docs/stock_commands.md, at small size: from text that SentencePiece has encoded to an export."""

import re
import shlex
from pathlib import Path

import pytest
import sentencepiece
import torch
from forked_command import run_main, run_module
from tiny_runs import ROOT

import amos_fairseq
from amos_fairseq.cli.main import main
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
    "torchrun": "torch.distributed.run",
}


def run_line(line: str, folder: Path) -> str:
    """Run a command of the page in ``folder``; what it prints. spm_encode, which has no Python module, is written out."""
    program, *words = shlex.split(line)
    if program == "spm_encode":
        model, _, source, _, target = words
        processor = sentencepiece.SentencePieceProcessor(str(folder / model.removeprefix("--model=")))
        lines = (folder / source).read_text(encoding="utf-8").splitlines()
        pieces = "".join(" ".join(processor.encode(line, out_type=str)) + "\n" for line in lines)
        (folder / target).write_text(pieces, encoding="utf-8")
        return ""
    done = run_main(main, *words) if program == "amos" else run_module(MODULES[program], words, folder)
    assert done.returncode == 0, (line, done.stderr[-3000:])
    return done.stdout + done.stderr


def commands_of_page() -> list[str]:
    page = (ROOT / "docs" / "stock_commands.md").read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    return [line for line in lines if not line.startswith("fairseq-hydra-train")]  # tests/recipes/test_hydra_train.py


@pytest.mark.slow
def test_from_encoded_text_to_an_export(corpus_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
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
        printed[" ".join(line.split()[:2])] = run_line(line, tmp_path)
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
            ours = encoder([text]).states
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)  # float32, other order of sums
