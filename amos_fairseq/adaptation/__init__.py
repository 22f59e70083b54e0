"""``amos adapt``: a released encoder, or one of your own, is pretrained further on a text. What the command was given, checked
against its settings and its folder before PyTorch is imported.
"""

import contextlib
import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.checkpoint_files import checkpoint_file, is_hugging_face
from amos_fairseq.errors import UserError
from amos_fairseq.files import check_new_folder, joined_sha256, json_text, write_text
from amos_fairseq.recipes import RECIPES
from amos_fairseq.recipes.overrides import SETTING, check_keys, known_settings
from amos_fairseq.untrusted import read_json

MLM, ELECTRA, AMOS = OBJECTIVES = ("mlm", "electra", "amos")
NEW, SELF = "new", "self"  # values of --generator beside a path
OTHER_OUT = "give another --out"
RECORD, RECIPE, RECIPE_OF_GENERATOR, DATA = "settings.json", "adapt.yaml", "generator.yaml", "data"
# What the command line gives otherwise: with both, one would silently win.
OPTIONS = {
    "checkpoint.finetune_from_model": "MODEL",
    "checkpoint.save_dir": "--out",
    "dataset.batch_size": "--batch-size",
    "lr_scheduler.minutes": "--minutes",
    "model.generator_checkpoint": "--generator",
    "optimization.max_epoch": "--updates",
    "optimization.max_update": "--updates",
    "task.data": "TEXT",
    "task.started_from": "MODEL",
    "task.tokens_per_sample": "--length",
}
OF_WEIGHTS = ("model_sha256", "generator_sha256")
OF_DATA = ("model", "model_sha256", "tokenizer", "texts", "document", "text_column")  # what determines the encoded text


@dataclass(frozen=True)
class Adaptation:
    """What the command was given; its fields are in ``settings.json``.

    Attributes:
        model: folder of Hugging Face, run or checkpoint, as an absolute path.
        objective: empty for that of ``model``, or mlm.
        minutes: of the training; 0 where ``updates`` end it.
        generator: absolute paths, ``new`` or ``self``; empty where none is given.
        settings: ``KEY=VALUE`` of the training; those of common and task are also of a new generator.
        model_sha256, generator_sha256: of the weights at these paths.
    """

    model: str
    texts: list[str]
    document: str
    text_column: str
    objective: str
    generator: list[str]
    tokenizer: str
    updates: int
    minutes: float
    length: int
    batch_size: int
    settings: list[str]
    model_sha256: str
    generator_sha256: str


def weights_sha256(sources: list[str]) -> str:
    """Return the sha256 of the weights in folders of Hugging Face, runs and checkpoints; empty where one is not there."""
    files: list[Path] = []
    for path in map(Path, sources):
        if is_hugging_face(path):
            files += sorted([*path.rglob("*.safetensors"), *path.rglob("pytorch_model*.bin")])
        else:
            with contextlib.suppress(UserError):
                files.append(checkpoint_file(path))
    return joined_sha256(files) if len(files) >= len(sources) else ""


def check_settings(settings: list[str], objective: str) -> None:
    """Refuse what no recipe of the objective has; an empty ``objective``, which MODEL decides, allows those of all."""
    if not settings:
        return
    from omegaconf import OmegaConf  # here, because it takes a tenth of a second to import
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    known: dict[str, Any] = {}
    for name in (objective,) if objective else OBJECTIVES:
        known |= known_settings(RECIPES, f"{name}_base")
    check_keys(settings, known, f"--objective {objective}" if objective else "amos adapt")
    for setting in settings:
        problem = "give KEY=VALUE, such as optimization.lr=[1e-4]" if SETTING.fullmatch(setting) is None else ""
        if option := OPTIONS.get(setting.partition("=")[0]):
            problem = f"give {option} instead"
        try:
            OmegaConf.from_dotlist([setting])
        except (OmegaConfBaseException, YAMLError) as error:
            problem = f"the value cannot be read ({str(error).partition(chr(10))[0]}): correct it, or quote it"
        if problem:
            raise UserError(f"--set {setting}: {problem}")


def has_begun(args: Adaptation, out: Path) -> bool:
    """Return whether the same command has begun in OUT and goes on there. Nothing is written.

    A folder of something else is refused, and one in which another command has trained.
    """
    check_new_folder(out, may_exist=True)
    there, here = read_json(out / RECORD, OTHER_OUT, optional=True), dataclasses.asdict(args)
    for name in OF_WEIGHTS if there else ():
        if not here[name] or not there.get(name):  # gone since, not given, or not recorded yet
            there[name] = here[name]
    if there == here:
        return (out / RECIPE).is_file()  # the recipe is written last
    problem = ""
    if there is None and out.exists() and any(out.iterdir()):
        problem = "is not empty and was not written by amos adapt: give another directory"
    if there is not None and any(out.glob("*/checkpoint*.pt")):
        others = ", ".join(name for name in here if there.get(name) != here[name])
        advice = f"{OTHER_OUT}; {out / 'run'} as MODEL goes on from there"
        problem = f"was trained by another command, or from other weights (different: {others}): {advice}"
    if problem:
        raise UserError(f"--out {out} {problem}")
    return False


def begin(args: Adaptation, out: Path) -> None:
    """Make OUT the folder of this command. Of another one, which has not trained, only the encoded text is kept, if equal."""
    there = read_json(out / RECORD, OTHER_OUT, optional=True) or {}
    for name in (RECIPE, RECIPE_OF_GENERATOR):
        (out / name).unlink(missing_ok=True)
    for folder in (out / "model", *out.glob("generator_model*")):
        shutil.rmtree(folder, ignore_errors=True)
    if any(there.get(name) != getattr(args, name) for name in OF_DATA):
        shutil.rmtree(out / DATA, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / RECORD, json_text(dataclasses.asdict(args)))
