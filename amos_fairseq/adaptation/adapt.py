"""Adapt an encoder to a text: import it, encode the text with its tokenizer, train it further with one of three objectives.

OUT/settings.json        what the command was given, with the sha256 of the weights: only the same command continues, with the
                         same weights, once there is a checkpoint
OUT/model/               the imported model with its tokenizer, where MODEL is a folder of Hugging Face
OUT/generator_modelN/    the Nth generator, where it is a folder of Hugging Face
OUT/data/                the text
OUT/generator.yaml       recipe of a new generator for detection, whose run is OUT/generator/
OUT/adapt.yaml           recipe of the training, whose run is OUT/run/; ``amos train OUT/adapt.yaml`` runs it too
                         (on N GPUs with a dataset.batch_size of one Nth)
"""

import dataclasses
import math
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.nn.functional import normalize

import amos_fairseq
from amos_fairseq.adaptation import (
    AMOS,
    DATA,
    ELECTRA,
    MLM,
    NEW,
    OBJECTIVES,
    OTHER_OUT,
    RECIPE,
    RECIPE_OF_GENERATOR,
    SELF,
    Adaptation,
    begin,
    check_settings,
    has_begun,
)
from amos_fairseq.checkpoint_files import (
    DamagedCheckpoint,
    checkpoint_file,
    is_hugging_face,
    num_updates_of,
    read_header,
    settings_in,
)
from amos_fairseq.checkpoints.encoder import Encoder
from amos_fairseq.checkpoints.read import newly_initialized, read_state
from amos_fairseq.data.corpus import open_lines, shard_directories
from amos_fairseq.errors import IN_OUT, UserError, explain_os_errors, handled_signals
from amos_fairseq.files import CORPUS_FILE, TOKENIZER_DIRECTORY, write_text
from amos_fairseq.hugging_face.import_folder import (
    default_arch,
    find_encoder,
    import_folder,
    read_folder,
    report_lines,
    write,
)
from amos_fairseq.models.configuration import DEBERTA, OF_PROCESS, EncoderConfig
from amos_fairseq.models.pretraining import is_fine_tuned
from amos_fairseq.output.terminal import say
from amos_fairseq.recipes import find_recipe
from amos_fairseq.recipes.composition import compose_recipe
from amos_fairseq.recipes.overrides import training_command
from amos_fairseq.run.metrics_file import read_records
from amos_fairseq.setting_checks import check_configuration, model_settings
from amos_fairseq.text.tokenization.tokenizer import BOS, EOS, embedding_symbols
from amos_fairseq.untrusted import read_json

LAST = "checkpoint_last.pt"
OF_NEW_WEIGHTS = {"init_std", "linear_init_std"}
OF_ENCODER = [f.name for f in dataclasses.fields(EncoderConfig) if f.name not in OF_PROCESS | OF_NEW_WEIGHTS]
# Peak rate of trained weights and of new heads (docs/adapting.md), and the share of the updates in which it rises.
RATE, RATE_OF_NEW, WARMUP = 5e-5, 5e-4, 0.1
RATE_OF_GENERATOR = 1e-3
CLIP_NORM = 2.0
LEARNED = 0.5  # nats below the unigram entropy, from which on a generator knows more than frequencies; ours
SHORTEST, LONGEST, NUM_LINES = 8, 64, 100  # pieces of a line that is compared with others; ours
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


def adapt(args: Adaptation, out: Path, prepare: Callable[[Path, Path], None]) -> None:
    """Run all steps that are not done yet.

    Args:
        out: an absolute path.
        prepare: encodes the texts with a tokenizer into a directory, unless that is done.
    """
    for path in (str(out), args.model, *args.generator):
        if ":" in path or "${" in path:
            raise UserError(f"{path}: fairseq cannot read paths with a colon or ${{: give another one")
    recipe, run = out / RECIPE, out / "run"
    if not has_begun(args, out):
        with explain_os_errors(f"--out {out} cannot be written", ": permit it, or give another directory"):
            begin(args, out)
        write_recipes(args, out)
    cfg = compose(recipe)
    if is_finished(run, cfg):
        say(f"nothing to do: {run} is finished; as MODEL of another amos adapt it is trained further", "adapt")
    else:
        divide_batch(recipe)  # which may refuse, before anything takes long
        encode_text(args, out, cfg, prepare)
        if (out / RECIPE_OF_GENERATOR).is_file():
            say("the generator is trained first, then the model", "adapt")
            train(out / RECIPE_OF_GENERATOR)
            if reason := why_useless(read_records(out / "generator")):
                say(f"WARNING: {reason}", "adapt")
        train(recipe)
    for line in describe_result(cfg, run):
        say(line, "adapt")


def is_finished(run: Path, cfg: DictConfig) -> bool:
    """Return whether the run has all its updates or has used its minutes. Refuse one that began with other weights."""
    file, start = run / LAST, cfg.task.started_from
    try:
        header = read_header(str(file)) if file.is_file() else None
    except DamagedCheckpoint:  # the training repairs it
        return False
    if header is None:
        return False
    if start and settings_in(header, "task").get("started_from") != start:
        raise UserError(f"{file} is of another run, which did not begin with MODEL: move it away, or {OTHER_OUT}")
    if minutes := cfg.lr_scheduler.minutes:
        return header["optimizer_history"][-1]["lr_scheduler_state"].get("ended_minutes", 0) >= minutes
    return num_updates_of(str(file), header) >= cfg.optimization.max_update


def encode_text(args: Adaptation, out: Path, cfg: DictConfig, prepare: Callable[[Path, Path], None]) -> None:
    """Encode the texts, unless that is done, and say what an update reads of them; refuse less than one update."""
    manifest, tokenizer = (
        out / DATA / CORPUS_FILE,
        Path(cfg.checkpoint.finetune_from_model).parent / TOKENIZER_DIRECTORY,
    )
    if not manifest.is_file() or all(Path(text).exists() for text in args.texts):  # once encoded, they may be removed
        prepare(out / DATA, tokenizer)
    length = cfg.task.tokens_per_sample
    if length < args.length:
        say(f"blocks of {length} tokens instead of {args.length}: MODEL takes no longer ones", "adapt")
    num_tokens = read_json(manifest, OTHER_OUT)["train"]["tokens"]
    if num_tokens < (needed := text_of_update(cfg)):
        advice = "give a smaller --batch-size or --length, or more text with another --out"
        raise UserError(f"TEXT has {num_tokens:,} tokens to train on, an update reads {needed:,}: {advice}")
    say(describe_training(cfg, num_tokens), "adapt")


def text_of_update(cfg: DictConfig) -> int:
    """Return the tokens of text that an update reads, without the ``<s>`` of a block."""
    return cfg.dataset.batch_size * cfg.optimization.update_freq[0] * (cfg.task.tokens_per_sample - 1)


def describe_training(cfg: DictConfig, num_tokens: int) -> str:
    """Return with which rates a text of ``num_tokens`` is read, and how often, where the settings say it."""
    rate, scale, minutes = cfg.optimization.lr[0], cfg.model.encoder_lr_scale, cfg.lr_scheduler.minutes
    head_rate = f", of the new head {rate:g}" if scale != 1 else ""
    rates = f"peak of the learning rate {rate * scale:g}{head_rate}"
    if minutes:
        return rates
    epochs = cfg.optimization.max_update * text_of_update(cfg) / num_tokens
    often = f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
    return f"{cfg.optimization.max_update:,} updates, which read the text {often} times; {rates}"


def why_useless(records: list[dict[str, Any]]) -> str:
    """Return why a discriminator learns little from a generator, by the last validation of that; empty if it may learn."""
    if not (verdict := beside_frequencies(records)):
        return ""
    advice = f"{OTHER_OUT} and more text, more --updates, or a trained --generator"
    return f"the generator's loss {verdict}: detecting its samples teaches little; {advice}"


def beside_frequencies(records: list[dict[str, Any]]) -> str:
    """Return a clause on the loss of masked tokens at the last validation if token frequencies alone nearly reach it, or ""."""
    last = next((record for record in reversed(records) if record["split"] != "train"), {})
    loss = min(
        (value for key, value in last.items() if key.startswith("mlm_loss_") and value is not None), default=None
    )
    entropy = last.get("unigram_entropy")
    if loss is None or entropy is None or loss <= entropy - LEARNED:
        return ""
    return f"on held-out text is {loss:.2f} nats, that of token frequencies alone {entropy:.2f}"


def describe_result(cfg: DictConfig, run: Path) -> Iterator[str]:
    """Yield what MODEL and the result say of held-out text, and the commands that follow."""
    if held_out := describe_held_out(read_records(run), cfg.model.encoder_lr_scale != 1):
        yield held_out
    if not cfg.model.get("generator_checkpoint") and (verdict := beside_frequencies(read_records(run))):
        yield f"WARNING: the loss of masked tokens {verdict}: train longer, or on more text"
    start, device = Path(cfg.checkpoint.finetune_from_model), "cpu"
    if torch.cuda.is_available() and not cfg.common.cpu:
        device = "cuda"
    are_there = start.exists() and Path(cfg.task.data).is_dir()  # of a finished run they may be gone
    lines = unrelated_lines(cfg.task.data, min(LONGEST, cfg.task.tokens_per_sample - 2)) if are_there else []
    if len(lines) > 1:
        before, after = (mean_cosine(amos_fairseq.load(file, device=device), lines) for file in (start, run))
        yield f"mean cosine of {len(lines)} unrelated lines, mean pooling: MODEL {before:.3f}, the result {after:.3f}"
    yield f"done. For Hugging Face: amos export {shlex.quote(str(run))} FOLDER; to compare both on labels of yours:"
    for file, results in ((start, "AS_IT_WAS"), (run, "ADAPTED")):
        yield f"amos classify --checkpoint {shlex.quote(str(file))} --train train.tsv --dev dev.tsv --out {results}"


def unrelated_lines(data: str, longest: int = LONGEST) -> list[Tensor]:
    """Return the tokens of up to 100 different lines of the held-out text, no two of which are neighbours there: the first
    ``longest`` of lines of 8 or more, between ``<s>`` and ``</s>``, [L] int64."""
    begin, end = map(embedding_symbols(()).index, (BOS, EOS))
    lines = []
    for document in open_lines(str(Path(shard_directories(data)[0]) / "valid"), OTHER_OUT):
        parts = document.tensor_split((document == end).nonzero().flatten() + 1)
        lines += [tuple(part[part != end][:longest].tolist()) for part in parts if len(part) > SHORTEST]
    different = list(dict.fromkeys(lines))
    return [torch.tensor([begin, *line, end]) for line in different[:: max(2, len(different) // NUM_LINES)][:NUM_LINES]]


def mean_cosine(encoder: Encoder, lines: list[Tensor]) -> float:
    """Return the mean cosine of the vectors of two lines, the means of their states, over all pairs of different lines."""
    states = encoder.encode([(tokens, torch.zeros_like(tokens)) for tokens in lines])
    total, count = normalize(states.pooled().double(), dim=-1).sum(0), len(lines)
    return ((total @ total - count) / (count * (count - 1))).item()


def describe_held_out(records: list[dict[str, Any]], is_new: bool) -> str:
    """Return what the first and the last validation say: the AUC of detection, else the loss of masked tokens. ``is_new``: the
    head of the first was not trained."""
    validations = [record for record in records if record["split"] != "train"]
    keys = [key for record in validations[-1:] for key in record if key == "rtd_auc" or key.startswith("mlm_loss_")]
    key = "rtd_auc" if "rtd_auc" in keys else next(iter(keys), None)
    points = [(record["update"], record[key]) for record in validations if record.get(key) is not None]
    if len(points) < 2:
        return ""
    (first, before), (last, after) = points[0], points[-1]
    unit = "" if key == "rtd_auc" else " nats"
    new = " and a new head (so this does not compare the encoders)" if is_new else ""
    name = f" with MODEL{new}" if first == 0 else f" at update {first:,}"
    unigram = f"unigram entropy: {validations[-1].get('unigram_entropy', math.nan):.2f}"
    beside = unigram if unit else "chance: 0.50; where the generator trains, its samples have changed too"
    now = f"is {after:.2f}{unit} at update {last:,} ({beside})"
    return f"on held-out text, {key} was {before:.2f}{unit}{name} and {now}"


def compose(recipe: Path) -> DictConfig:
    """Return the settings of a recipe; values that a setting does not take are refused."""
    folder, name = find_recipe(str(recipe))
    cfg = compose_recipe(name, (), folder)
    check_configuration(cfg)
    return cfg


def divide_batch(recipe: Path) -> list[str]:
    """Return the settings with which an update on all GPUs has the batch of the recipe."""
    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    num_gpus = 0 if content.get("common", {}).get("cpu") else torch.cuda.device_count()
    num_ranks = content.get("distributed_training", {}).get("distributed_world_size", num_gpus)
    batch_size = content["dataset"]["batch_size"]
    if num_ranks < 2:
        return []
    if batch_size % num_ranks:
        advice = f"set CUDA_VISIBLE_DEVICES, or give another --out and a --batch-size that is a multiple of {num_ranks}"
        raise UserError(f"a batch of {batch_size} blocks cannot be divided among {num_ranks} GPUs: {advice}")
    return [f"dataset.batch_size={batch_size // num_ranks}"]


def train(recipe: Path) -> None:
    """Run ``amos train`` in a process that gets the signals of this one; exit with its code unless it has finished."""
    command, variables = training_command(str(recipe), divide_batch(recipe), with_parent=True)
    # Its own session: a Ctrl-C of the terminal reaches it once, from here.
    process = subprocess.Popen(command, env=variables | IN_OUT, stdin=subprocess.PIPE, start_new_session=True)
    with handled_signals(lambda number, _: process.send_signal(number)):
        code = process.wait()
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


def write_recipes(args: Adaptation, out: Path) -> None:
    """Import what has to be imported, and write the recipe of the training, after that of a new generator."""
    start = read_start(args.model, out / "model", args.objective, args.tokenizer)
    objective = args.objective or start.objective
    has_own = start.objective == objective and not start.is_new & {"generator", "generators"}
    generator = args.generator or ([] if objective == MLM or has_own else [NEW])
    if reason := why_impossible(objective, generator, start):
        raise UserError(f"{args.model}: {reason}")
    check_settings(args.settings, objective)
    if objective == MLM or generator:
        model = {name: start.model[name] for name in OF_ENCODER}
    else:  # a run with its own generator
        model = {name: value for name, value in start.model.items() if name not in ("_name", "max_update")}
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
    # DeBERTaV3's own generator goes with its masks and its weight of the detection loss.
    is_pair = model.get("disentangled_embeddings") and model["encoder"] == DEBERTA
    base = f"{objective}_{DEBERTA}_base" if is_pair else f"{objective}_base"
    write_recipe(out / RECIPE, base, args, model, rate, out / "run", start.file)


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
        | ({"save_interval_minutes": min(30.0, minutes / 10)} if minutes else {})
        | ({"started_from": args.model_sha256} if start else {}),
        "model": model,
        "dataset": {
            "batch_size": args.batch_size,
            "num_workers": 1,
            "validate_interval_updates": min(1000, max(100, tenth)),
        },
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
    is_folder = is_hugging_face(path)
    file = import_model(path, folder, objective, tokenizer) if is_folder else checkpoint_file(path)
    state = read_state(file)
    problem = (
        "is fine-tuned on labels: give the pretrained model that it started from"
        if is_fine_tuned(state["model"])
        else ""
    )
    if tokenizer and not is_folder:
        problem = "has its own tokenizer: leave out --tokenizer, which is for a folder of Hugging Face"
    if problem:
        raise UserError(f"{file} {problem}")
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
