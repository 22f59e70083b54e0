"""The recipes of ``amos adapt``: that of the training, and that of a new generator."""

import dataclasses
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from amos_fairseq.adaptation.command import (
    AMOS,
    DATA,
    ELECTRA,
    MLM,
    NEW,
    OBJECTIVES,
    RECIPE,
    RECIPE_OF_GENERATOR,
    SELF,
    Adaptation,
    check_settings,
)
from amos_fairseq.checkpoint_files import checkpoint_file
from amos_fairseq.checkpoints.read import newly_initialized, read_state
from amos_fairseq.errors import UserError
from amos_fairseq.files import write_text
from amos_fairseq.hugging_face.config import CONFIG_FILE
from amos_fairseq.hugging_face.import_folder import default_arch, find_encoder, import_folder, read_folder
from amos_fairseq.hugging_face.imported import report_lines, write
from amos_fairseq.models.configuration import OF_PROCESS, EncoderConfig
from amos_fairseq.models.pretrained_encoder import is_fine_tuned
from amos_fairseq.output.terminal import say
from amos_fairseq.setting_checks import model_settings

LAST = "checkpoint_last.pt"
OF_NEW_WEIGHTS = {"init_std", "linear_init_std"}
OF_ENCODER = [f.name for f in dataclasses.fields(EncoderConfig) if f.name not in OF_PROCESS | OF_NEW_WEIGHTS]
# Peak rate of trained weights and of new heads (docs/adapting.md), and the share of the updates in which it rises.
RATE, RATE_OF_NEW, WARMUP = 5e-5, 5e-4, 0.1
RATE_OF_GENERATOR = 1e-3
CLIP_NORM = 2.0
GENERATORS = {512: "mlm_modern_mini", math.inf: "mlm_modern_small"}  # by the widest encoder for which it is new


@dataclass(frozen=True)
class Start:
    """A checkpoint of this package: ``model`` are its settings; ``is_new``: modules without trained weights."""

    file: Path
    model: dict[str, Any]
    is_new: frozenset[str]

    @property
    def objective(self) -> str:
        return str(self.model["_name"]).partition("_")[0]  # of a run with flags it is the arch


def write_recipes(args: Adaptation, out: Path) -> None:
    """Import what has to be imported, and write the recipe of the training, after that of a new generator."""
    start = read_start(args.model, out / "model", args.objective, args.tokenizer)
    objective = args.objective or start.objective
    generator = args.generator or default_generator(objective, start)
    if reason := why_impossible(objective, generator, start):
        raise UserError(f"{args.model}: {reason}")
    check_settings(args.settings, objective)
    model = settings_of_model(objective, generator, start)
    files = [generator_file(source, start, out, number) for number, source in enumerate(generator, start=1)]
    if files:
        model["generator_checkpoint"] = ":".join(map(str, files))
    head = "mlm_head" if objective == MLM else "detection_head"
    rate = RATE if start.objective == objective and head not in start.is_new else RATE_OF_NEW
    model["encoder_lr_scale"] = RATE / rate
    if NEW in generator:  # an MLM that is trained on the same text, to be the frozen generator
        name = next(name for widest, name in GENERATORS.items() if model["encoder_embed_dim"] <= widest)
        positions = {"max_positions": model["max_positions"]}
        write_recipe(out / RECIPE_OF_GENERATOR, name, args, positions, RATE_OF_GENERATOR, out / "generator", start=None)
    write_recipe(out / RECIPE, f"{objective}_base", args, model, rate, out / "run", start.file)


def default_generator(objective: str, start: Start) -> list[str]:
    """Return the generator without ``--generator``: a new one, unless MODEL has its own or the objective needs none."""
    has_own = start.objective == objective and not start.is_new & {"generator", "generators"}
    return [] if objective == MLM or has_own else [NEW]


def why_impossible(objective: str, generator: list[str], start: Start) -> str | None:
    """Return why MODEL cannot be trained with the objective and the generators; None if it can."""
    if objective not in OBJECTIVES or (objective == MLM and start.objective != MLM):
        others = f"--objective {start.objective}" if start.objective in OBJECTIVES else "another model"
        return f"it was trained as {start.objective} and cannot begin as {objective}: give {others}"
    if objective == MLM and generator:
        return "--generator is for the objectives that detect replaced tokens: give --objective electra or amos"
    if objective != AMOS and len(generator) > 1:
        return "--generator can be given several times for the mixture of --objective amos alone"
    if objective == AMOS and set(generator) in ({NEW}, {SELF}):
        advice = "give --generator PATH of an amos run or of several checkpoints, or --objective electra"
        return f"a mixture needs MLM heads at several depths: {advice}"
    return None


def settings_of_model(objective: str, generator: list[str], start: Start) -> dict[str, Any]:
    """Return the settings of the encoder; of a run with its own generator all settings."""
    if objective == MLM or generator:
        return {name: start.model[name] for name in OF_ENCODER}
    return {name: value for name, value in start.model.items() if name not in ("_name", "max_update")}


def generator_file(source: str, start: Start, out: Path, number: int) -> Path:
    """Return the checkpoint of the generator ``source``, a value of ``--generator``; a folder of Hugging Face is imported."""
    if source == NEW:
        return out / "generator" / LAST
    used = start if source == SELF else read_start(source, out / f"generator_model{number}", MLM)
    if used.is_new & {"mlm_head", "mlm_heads"}:
        raise UserError(f"{used.file} has no trained MLM head and cannot be a generator: give --generator new")
    return used.file


def write_recipe(
    file: Path, base: str, args: Adaptation, model: dict[str, Any], rate: float, run: Path, start: Path | None
) -> None:
    """Write a YAML file that changes the packaged recipe ``base``; ``start`` is None for a new generator."""
    checkpoint = {"save_dir": str(run), "save_interval_updates": 1000, "keep_interval_updates": 1}
    minutes = args.minutes if start else 0.0
    tenth = math.inf if minutes else math.ceil(args.updates / 10)
    content = {
        "defaults": ["/fairseq/defaults@_global_", f"/{base}", "_self_"],
        "checkpoint": checkpoint | ({"finetune_from_model": str(start)} if start else {}),
        "common": {"log_interval": min(100, tenth)},
        "task": {"data": str(file.parent / DATA), "tokens_per_sample": min(args.length, model["max_positions"])}
        | ({"save_interval_minutes": min(30.0, minutes / 10)} if minutes else {}),
        "model": model,
        "dataset": {"batch_size": args.batch_size, "num_workers": 1, "validate_interval_updates": min(1000, tenth)},
        "optimization": {"max_update": args.updates, "update_freq": [1], "lr": [rate], "clip_norm": CLIP_NORM},
        "lr_scheduler": {"warmup_updates": math.ceil(WARMUP * args.updates)}
        | ({"minutes": minutes} if minutes else {}),
    }
    settings = [setting for setting in args.settings if start or setting.startswith(("common.", "task."))]
    content = OmegaConf.to_container(OmegaConf.merge(content, OmegaConf.from_dotlist(settings)))
    command = shlex.join(["torchrun", "--nproc-per-node", "N", "--no-python", "amos", "train", str(file)])
    head = "# @package _global_\n# Written by amos adapt. On N ranks, with a batch_size of one Nth:\n"
    write_text(file, f"{head}# {command}\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)}")


def read_start(source: str, folder: Path, objective: str, tokenizer: str = "") -> Start:
    """Return a checkpoint of this package; a folder of Hugging Face becomes one in ``folder``."""
    path = Path(source)
    is_folder = (find_encoder(path)[0] / CONFIG_FILE).is_file()
    if tokenizer and not is_folder:
        raise UserError(f"--tokenizer is for a folder of Hugging Face; {source} has its own: leave it out")
    file = import_model(path, folder, objective, tokenizer) if is_folder else checkpoint_file(path)
    state = read_state(file)
    if is_fine_tuned(state["model"]):
        raise UserError(f"{file} is fine-tuned on labels: give the pretrained model that it started from")
    model = OmegaConf.to_container(model_settings(file, state["cfg"]["model"]), enum_to_str=True)
    return Start(file.resolve(), model, newly_initialized(state))


def import_model(path: Path, folder: Path, objective: str, tokenizer: str) -> Path:
    """Import a folder of Hugging Face as an MLM; ELECTRA's discriminator with its head unless ``objective`` is mlm."""
    file = folder / "model.pt"
    file.unlink(missing_ok=True)  # from an interrupted start
    arch = default_arch(read_folder(find_encoder(path)[0]))
    if not (arch.startswith(ELECTRA) and objective != MLM):
        arch = f"{MLM}_{arch.partition('_')[2]}"
    imported = import_folder(path, arch, tokenizer=Path(tokenizer) if tokenizer else None)
    write(imported, file)
    for line in report_lines(imported, file)[:-2]:
        say(line, "adapt")
    return file
