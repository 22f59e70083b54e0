"""``examples/hugging_face/continue.sh``: import, corpus and training of a released model by one command."""

from pathlib import Path

import pytest
import torch
from hugging_face_folders import LINES, write_electra
from shell_scripts import run_script

from amos_fairseq.checkpoints.read import read_state

SCRIPT = "examples/hugging_face/continue.sh"
FLAGS = ("2", "--tokens-per-sample", "32", "--batch-size", "4", "--num-workers", "0")
FLOAT32 = ("--precision", "float32")


@pytest.mark.slow
def test_both_networks_are_trained_and_the_same_command_does_nothing(tmp_path: Path) -> None:
    write_electra(tmp_path)
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("\n\n".join(LINES * 4), encoding="utf-8")
    arguments = (SCRIPT, tmp_path, tmp_path / "discriminator", text, out, *FLAGS)
    # An import that was interrupted, by this command and by another one.
    (out / "imported").mkdir(parents=True)
    (out / "imported" / "model.pt").write_text("a part of a file", encoding="utf-8")
    refused = run_script(*arguments, *FLOAT32, GENERATOR=str(tmp_path / "generator"))
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].endswith("imported is not from this command: give another OUT")
    (out / "imported" / "flags.new").touch()

    done = run_script(*arguments, *FLOAT32, GENERATOR=str(tmp_path / "generator"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    last = out / "run" / "checkpoint_last.pt"
    trained, imported = (read_state(file)["model"] for file in (last, out / "imported" / "model.pt"))
    assert trained.keys() == imported.keys()
    for network in ("discriminator.", "generator."):
        name = f"{network}layers.0.ffn_in.weight"
        change = (trained[name] - imported[name]).abs().max()
        assert 0 < change < 1e-3, name  # two updates at a rate of 5e-5 and less
    assert not torch.equal(trained["embed_tokens.weight"], imported["embed_tokens.weight"])

    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*.pt")} | {last: last.stat().st_mtime_ns}
    again = run_script(*arguments)
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-2000:]
    assert f"precision: float32 (auto: as in {last})" in again.stdout + again.stderr  # the script's own flag
    assert before == {path: path.stat().st_mtime_ns for path in before}
