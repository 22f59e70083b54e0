"""Checkpoints, Hugging Face folders and raw data of strangers: refused in one line, or read as what they are; no code runs."""

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from damage import HOSTILE_VALUES, TRIES, Bomb, assert_clean_end, attack_json, damage, replace, run_bounded
from hugging_face_folders import TOLERANCE, write_model
from interrupted_run import checkpoint, flags_command
from safetensors.torch import load_file, save_file
from saved_models import small_tokenizer
from synthetic_squad import make_squad
from tiny_runs import ROOT

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.text.tokenization.fast_tokenizer import ABSENT, row_map


def bombs_of_pickle(canary: Path) -> list[Bomb]:
    return [
        Bomb(Path.touch, canary),
        Bomb(os.system, f"touch {canary}"),
        Bomb(os.mkdir, str(canary)),
        Bomb(eval, f"__import__('os').mkdir({str(canary)!r})"),
        Bomb(exec, f"open({str(canary)!r}, 'w')"),
        Bomb(subprocess.call, ["touch", str(canary)]),
        Bomb(open, str(canary), "w"),
    ]


def attack_checkpoint(file: Path, canary: Path, draw: random.Random) -> str:
    """Put an object or a setting that tries to run code into a checkpoint, and return what."""
    state, source = checkpoint(file.parent, file.name), str(canary.parent / "src")
    Path(source).mkdir()
    Path(source, "__init__.py").write_text(f"open({str(canary)!r}, 'w')\n")
    texts = [f"--user-dir={source}", f"--user-dir {source}", source, "${oc.env:HOME}", "../../x", f"$(touch {canary})"]
    texts += [f"tanh; touch {canary}", "{_target_: os.abort}", "!!python/object/apply:os.abort []"]
    texts += ["__import__('os').abort()"]
    circle: list[Any] = []
    circle += [circle, circle]
    values = [*HOSTILE_VALUES, circle, argparse.Namespace(a=circle)]
    place = draw.choice(["bomb", "setting", "setting", "key", "task state", "value", "value", "section", "missing"])
    parts = {name: vars(part) if isinstance(part, argparse.Namespace) else part for name, part in state["cfg"].items()}
    sections = sorted(name for name, part in parts.items() if isinstance(part, dict) and part)
    section = draw.choice(["model", "model", "task", "criterion"] if place in ("setting", "value") else sections)
    key = draw.choice(sorted(parts[section]))
    if place == "bomb":
        state[draw.choice([*state, "more"])] = draw.choice(bombs_of_pickle(canary))
    elif place in ("setting", "value"):
        parts[section][key] = draw.choice(texts if place == "setting" else values)
    elif place == "section":
        as_namespace = argparse.Namespace(**parts[section])
        state["cfg"][section] = draw.choice([as_namespace, {"_name": "unknown"}, *values])
    elif place == "missing":
        part, key = draw.choice([(state["cfg"], section), (parts[section], key)])
        del part[key]
    elif place == "key":
        parts["model"][draw.choice(texts)] = draw.choice(texts)
    else:
        state["task_state"] = draw.choice([*texts, {"tokenizer_sha256": draw.choice(texts)}])
    torch.save(state, file, _use_new_zipfile_serialization=draw.random() < 0.8)
    return f"{place} {section}.{key}"


@pytest.mark.parametrize("number", range(TRIES))
def test_checkpoints_execute_nothing(number: int, binarized_corpus: Path, uninterrupted, tmp_path: Path) -> None:
    draw, folder, reference = random.Random(number), tmp_path / "work", uninterrupted()
    run, canary = folder / "run", folder / "executed"
    shutil.copytree(reference / "tokenizer", run / "tokenizer")
    shutil.copy(reference / "checkpoint_last.pt", run)
    how = attack_checkpoint(run / "checkpoint_last.pt", canary, draw)
    command = draw.choice(["export run out --no-check", "report run --out page.html", "flops run", ""])
    module, arguments, cwd = "amos_start", shlex.split(command), folder
    if not command:
        _, _, module, *arguments = flags_command(binarized_corpus, run)
        cwd = ROOT
    code, text = run_bounded(module, arguments, cwd)
    assert not canary.exists(), how
    assert_clean_end(code, text, folder)


# A raw file, and the command that reads it.
READ_BY = {
    "squad.json": "prepare squad squad.json squad.json tokenizer out",
    "trees.conllu": "prepare probing --treebank trees.conllu trees.conllu trees.conllu --out out",
    "table.jsonl": "prepare table.jsonl --tokenizer tokenizer --out out --workers 1",
}


@pytest.mark.parametrize("number", range(TRIES))
def test_raw_files(number: int, tmp_path: Path) -> None:
    """Damaged questions, trees or tables; nothing is left of a refusal."""
    draw, folder = random.Random(number), tmp_path / "work"
    small_tokenizer().save(folder / "tokenizer")
    (folder / "squad.json").write_text(json.dumps(make_squad()))
    rows = ("1\tthe\t_\tDET\t_\t_\t2\tdet\t_\t_\n", "2\tfox\t_\tNOUN\t_\t_\t0\troot\t_\t_\n\n")
    (folder / "trees.conllu").write_text("".join(rows) * 40)
    (folder / "table.jsonl").write_text("".join(f'{{"text": "{"the fox " * n}", "id": {n}}}\n' for n in range(1, 60)))
    path = folder / draw.choice(list(READ_BY))
    (attack_json if path.suffix == ".json" else damage)(path, draw)
    code, text = run_bounded("amos_start", READ_BY[path.name].split(), folder)
    assert_clean_end(code, text, folder)
    assert (folder / "out").exists() == (code == 0)


FAMILIES = {"mpnet": "MPNetForMaskedLM", "electra": "ElectraForPreTraining"}
FAMILIES |= {"bert": "BertModel", "roberta": "RobertaModel"}
JSON_FILES = ("config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@pytest.mark.parametrize("number", range(5 * TRIES))
def test_hugging_face_folders(number: int, tmp_path: Path) -> None:
    """Refused, or the model computes what transformers computes."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    draw, folder = random.Random(number), tmp_path / "work"
    family = draw.choice(list(FAMILIES))
    write_model(folder / "in", family, FAMILIES[family])
    canary, file = folder / "executed", folder / "out" / "model.pt"
    attack = draw.choice([attack_settings, attack_settings, attack_weights, plant_code])
    attack(folder / "in", canary, draw)
    code, text = run_bounded("amos_start", ["import", "in", "out/model.pt", "--arch", "amos_tiny"], folder)
    assert not canary.exists()
    assert_clean_end(code, text, folder)
    if code == 0:
        assert_same_states(folder / "in", file)
    else:
        assert not file.parent.exists()


def attack_settings(folder: Path, canary: Path, draw: random.Random) -> None:
    file = folder / draw.choice(JSON_FILES)
    if not file.exists():
        file.write_text('{"cls_token": "[CLS]", "a": {"b": ["c"]}}')
    draw.choice([damage, replace, attack_json, attack_json, attack_json])(file, draw)


def attack_weights(folder: Path, canary: Path, draw: random.Random) -> None:
    """Damage the file of the weights, or save a state with a name, tensor or object that does not belong there."""
    file = folder / "model.safetensors"
    how = draw.choice([damage, replace, "index", "bomb", "name", "tensor", "tensor", "missing"])
    if callable(how):
        how(file, draw)
        return
    state: dict[Any, Any] = load_file(file)
    key, pickled = draw.choice(sorted(state)), draw.random() < 0.5
    if how == "index":
        file.rename(folder / "part.safetensors")
        named = draw.choice(["part.safetensors", "../../part.safetensors", "/dev/zero", ".", "", "x" * 500, None, 5])
        content = {"weight_map": dict.fromkeys(state, "part.safetensors") | {key: named}}
        (folder / f"{file.name}.index.json").write_text(json.dumps(content))
        return
    if how == "bomb":
        pickled = True
        state[draw.choice([key, "more"])] = draw.choice(bombs_of_pickle(canary))
    elif how == "name":
        name = draw.choice(["x" * 5000, "a\x1b[31m", key + ".\0", key.upper(), "encoder.layer.999.x", key + "2"])
        state[name] = state.pop(key)
    elif how == "missing":
        del state[key]
    else:
        tensor = state[key]
        changed = [tensor.half(), tensor.to(torch.int32), tensor.flatten(), tensor[:0], tensor[:1], torch.tensor(1.0)]
        odd = [tensor.to(torch.complex64), tensor.to("meta"), tensor.to_sparse(), torch.ones(1).expand(2**40)]
        state[key] = draw.choice([*changed, *odd] if pickled else changed)
    file.unlink()
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, file, metadata={"format": "pt"})


def plant_code(folder: Path, canary: Path, draw: random.Random) -> None:
    """Add modules, and let the configurations of model and tokenizer name their classes."""
    for name in ("__init__", "evil", "configuration_evil", "tokenization_evil"):
        (folder / f"{name}.py").write_text(f"open({str(canary)!r}, 'w')\n")
    classes = {"AutoConfig": "configuration_evil.C", "AutoModel": "evil.M"}
    entries = {
        "auto_map": classes | {"AutoTokenizer": ["tokenization_evil.T", "evil.F"]},
        "trust_remote_code": True,
        "custom_pipelines": {"x": {"impl": "evil.P", "pt": ["AutoModel"]}},
        "_attn_implementation": "evil",
        "tokenizer_class": draw.choice(["Rag", "Marian", "XLM", "Speech2Text", "Bert", "Evil", 5, ["a"], None]),
        "_commit_hash": "x",
    }
    changes = {"config.json": {"model_type": "evil", "architectures": ["Evil"]}, "tokenizer_config.json": {}}
    for name, more in changes.items():
        content = json.loads((folder / name).read_text())
        content |= {key: entries[key] for key in entries if draw.random() < 0.7}
        (folder / name).write_text(json.dumps(content | (more if draw.random() < 0.3 else {})))
    if draw.random() < 0.5:  # transformers then builds a tokenizer
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))


@torch.no_grad()
def assert_same_states(folder: Path, file: Path) -> None:
    """Of an imported model and of transformers, which may refuse what has no effect here."""
    imported = load_checkpoint(file)
    ids, pad = row_map(imported.tokenizer), imported.dictionary.pad()
    rows = torch.tensor([row for row, foreign in enumerate(ids.tolist()) if foreign != ABSENT and row != pad][:30])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = transformers.AutoModel.from_pretrained(folder, trust_remote_code=False).float().eval()
            expected = theirs(input_ids=ids[rows][None]).last_hidden_state
    except Exception:
        return
    states = imported.model.extract_features(rows[None])
    assert (states - expected).abs().max() <= TOLERANCE * expected.abs().max() or not expected.isfinite().all()
