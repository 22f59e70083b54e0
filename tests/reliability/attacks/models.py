"""Models of a stranger: checkpoints and Hugging Face folders that try to run code, or whose contents do not fit."""

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from hugging_face_folders import TOLERANCE, write_model
from interrupted_run import RUN, checkpoint
from safetensors.torch import load_file, save_file

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.text.tokenization.fast_tokenizer import ABSENT, row_map
from attacks.commands import Place, amos_harm, command_harm, run_amos, run_command
from attacks.damage import HOSTILE_VALUES, attack_json, damage, replace
from attacks.runs import FLAGS


class Bomb:
    """An object whose loading creates a file."""

    def __init__(self, canary: Path, call: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = (call, arguments or (str(canary),))

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def bombs_of_pickle(canary: Path) -> list[Bomb]:
    return [
        Bomb(canary, Path.touch, Path(canary)),
        Bomb(canary, os.system, f"touch {canary}"),
        Bomb(canary, os.mkdir),
        Bomb(canary, eval, f"__import__('os').mkdir({str(canary)!r})"),
        Bomb(canary, exec, f"open({str(canary)!r}, 'w')"),
        Bomb(canary, subprocess.call, ["touch", str(canary)]),
        Bomb(canary, open, str(canary), "w"),
    ]


def hostile_states(canary: Path, draw: random.Random, state: dict[str, Any]) -> tuple[Any, str]:
    """Return a checkpoint with an object or a setting that tries to run code, and what that is."""
    (canary.parent / "src").mkdir(exist_ok=True)
    (canary.parent / "src" / "__init__.py").write_text(f"open({str(canary)!r}, 'w')\n")
    source = str(canary.parent / "src")
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
    key, text = draw.choice(sorted(parts[section])), draw.choice(texts)
    if place == "bomb":
        state[draw.choice([*state, "more"])] = draw.choice(bombs_of_pickle(canary))
    elif place in ("setting", "value"):
        parts[section][key] = text if place == "setting" else draw.choice(values)
    elif place == "section":
        given = argparse.Namespace(**parts[section])
        state["cfg"][section] = draw.choice([given, {"_name": "unknown"}, *values])
    elif place == "missing":
        part, key = draw.choice([(state["cfg"], section), (parts[section], key)])
        del part[key]
    elif place == "key":
        parts["model"][text] = draw.choice(texts)
    else:
        state["task_state"] = draw.choice([*texts, {"tokenizer_sha256": text}])
    found = parts[section][key] if place in ("setting", "value") else ""
    return state, f"{place} {section}.{key} {found!r:.30}"


LAST = "checkpoint_last.pt"
OF_RUN = [
    shlex.split(command)
    for command in (
        "export run out --no-check",
        "report run --sentence 'a text' --out out/page.html",
        "flops run",
        "probe --checkpoint run --data probing --out out/probe --part generator --layers 1 --updates 4 --seeds 1",
        "parse --train trees.conllu --dev trees.conllu --unlabeled trees.conllu --views full,forward-forward "
        "--checkpoint run --recipe recipe.yaml --epochs 1 --seeds 1 --cpu --out out/parse",
        "train",
    )
]


def hostile_files(place: Place, folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Give a stranger's checkpoint to the commands that read one; nothing of it is executed, and what fine-tuning does not
    refuse is computed as without the attack.
    """
    original, expected = place.references["float32"], {}
    while True:
        name, *arguments = command = draw.choice(OF_RUN)
        for is_attacked in (False, True) if str(command) not in expected else (True,):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(place.workplace, folder, ignore=shutil.ignore_patterns("run"))
            shutil.copytree(original / "tokenizer", folder / "run" / "tokenizer")
            shutil.copy(original / LAST, folder / "run")
            canary = folder / "executed"
            how = attack_checkpoint(folder / "run" / LAST, canary, draw) if is_attacked else ""
            if name == "train":
                arguments = [str(place.corpus), *RUN, *FLAGS, "--save-dir", str(folder / "run")]
                code, text = run_command("fairseq_cli.train", arguments)
            else:
                code, text = run_command("amos_start", command, folder)
            contents = [path.read_bytes() for path in written_predictions(folder / "out")]
            expected.setdefault(str(command), contents)
        harm = "executed" if canary.exists() else (command_harm if name == "train" else amos_harm)(code, text, folder)
        if not harm and code == 0 and contents != expected[str(command)]:
            harm = "accepted, with another result"
        yield f"amos {name}, {how}", harm


def written_predictions(out: Path) -> list[Path]:
    return sorted([*out.glob("**/*predictions*"), *out.glob("*.conllu")])


def attack_checkpoint(file: Path, canary: Path, draw: random.Random) -> str:
    state, how = hostile_states(canary, draw, checkpoint(file.parent, file.name))
    torch.save(state, file, _use_new_zipfile_serialization=draw.random() < 0.8)
    return how


FAMILIES = {"mpnet": "MPNetForMaskedLM", "electra": "ElectraForPreTraining"}
FAMILIES |= {"bert": "BertModel", "roberta": "RobertaModel"}
JSON_FILES = ("config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
CLASSES = ("Rag", "Marian", "Flaubert", "XLM", "Speech2Text", "Bert", "Evil", 5, ["a"], None)


def imported_folders(place: Place, folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Import an attacked folder: it is refused and nothing is left, or the model computes what transformers computes."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    originals = place.folder / "originals"
    for family, name in FAMILIES.items():
        write_model(originals / family, family, name)
    while True:
        family = draw.choice(list(FAMILIES))
        shutil.copytree(originals / family, folder / "in")
        canary, file = folder / "executed", folder / "out" / "model.pt"
        attack = draw.choice([attack_settings, attack_settings, attack_weights, plant_code])
        how = attack(folder / "in", canary, draw)
        code, text = run_amos(["import", "in", "out/model.pt", "--arch", "amos_tiny"], folder)
        harm = "executed" if canary.exists() else amos_harm(code, text, folder)
        if not harm and code != 0 and file.parent.exists():
            harm = f"left {[path.name for path in file.parent.iterdir()]}"
        if not harm and code == 0:
            harm = other_states(folder / "in", file)
        yield f"{family}, {how}", harm


def attack_settings(folder: Path, canary: Path, draw: random.Random) -> str:
    name = draw.choice(JSON_FILES)
    if not (folder / name).exists():
        (folder / name).write_text('{"cls_token": "[CLS]", "a": {"b": ["c"]}}')
    return f"{name}: {attack_json(folder / name, draw)}"


def attack_weights(folder: Path, canary: Path, draw: random.Random) -> str:
    """Damage the file of the weights, or save a state with a name, tensor or object that does not belong there."""
    file = folder / "model.safetensors"
    how = draw.choice(["damage", "replace", "index", "bomb", "name", "tensor", "tensor", "missing"])
    if how == "damage":
        return f"{file.name}: {damage(file, draw)}"
    if how == "replace":
        return f"{file.name}: {replace(file, draw)}"
    state: dict[Any, Any] = load_file(file)
    key = draw.choice(sorted(state))
    if how == "index":
        file.rename(folder / "part.safetensors")
        named = draw.choice(["part.safetensors", "../../part.safetensors", "/dev/zero", ".", "", "x" * 500, None, 5])
        content = {"weight_map": dict.fromkeys(state, "part.safetensors") | {key: named}}
        (folder / f"{file.name}.index.json").write_text(json.dumps(content))
        return f"index: {key} in {named!r:.30}"
    pickled = draw.random() < 0.5
    if how == "bomb":
        key, pickled = draw.choice([key, "more"]), True
        state[key] = draw.choice(bombs_of_pickle(canary))
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
    return f"{how} of {key:.40}, {'pickled' if pickled else 'safetensors'}"


def plant_code(folder: Path, canary: Path, draw: random.Random) -> str:
    """Add modules, and let the configurations of model and tokenizer name their classes."""
    for name in ("__init__", "evil", "configuration_evil", "tokenization_evil"):
        (folder / f"{name}.py").write_text(f"open({str(canary)!r}, 'w')\n")
    classes = {"AutoConfig": "configuration_evil.C", "AutoModel": "evil.M"}
    entries = {
        "auto_map": classes | {"AutoTokenizer": ["tokenization_evil.T", "evil.F"]},
        "trust_remote_code": True,
        "custom_pipelines": {"x": {"impl": "evil.P", "pt": ["AutoModel"]}},
        "_attn_implementation": "evil",
        "tokenizer_class": draw.choice(CLASSES),
        "_commit_hash": "x",
    }
    changes = {"config.json": {"model_type": "evil", "architectures": ["Evil"]}, "tokenizer_config.json": {}}
    for name, more in changes.items():
        given = {key: entries[key] for key in entries if draw.random() < 0.7}
        content = json.loads((folder / name).read_text()) | given
        if draw.random() < 0.3:
            content |= more
        (folder / name).write_text(json.dumps(content))
    if without := draw.random() < 0.5:  # transformers then builds a tokenizer
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    return f"code, {'without' if without else 'with'} tokenizer.json"


@torch.no_grad()
def other_states(folder: Path, file: Path) -> str:
    """Compare the states of an imported model with those of transformers, which may refuse what has no effect here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = transformers.AutoModel.from_pretrained(folder, trust_remote_code=False).float().eval()
            imported = load_checkpoint(file)
            ids, pad = row_map(imported.tokenizer), imported.dictionary.pad()
            rows = [row for row, foreign in enumerate(ids.tolist()) if foreign != ABSENT and row != pad]
            rows = torch.tensor(rows[:30])
            expected = theirs(input_ids=ids[rows][None]).last_hidden_state
    except Exception:
        return ""
    found = imported.model.extract_features(rows[None])
    close = (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
    return "" if close or not expected.isfinite().all() else "accepted, with other states"
