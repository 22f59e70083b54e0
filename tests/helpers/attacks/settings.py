"""Random values of settings: of a training through Hydra, and of the flags of other commands."""

import random
import shutil
from collections.abc import Iterator

from tiny_runs import ROOT

from attacks.commands import Attack, Place, amos_harm, command_harm, run_amos, run_command, run_interpreter
from attacks.workplace import COMMANDS, SMALL_RUN

SETTINGS = (
    "task.tokens_per_sample",
    "task.mask_prob",
    "task.mask_treatment",
    "task.sample_break_mode",
    "task._name",
    "task.data",
    "task.divergence_factor",
    "model._name",
    "model.encoder_layers",
    "model.encoder_embed_dim",
    "model.encoder_attention_heads",
    "model.max_positions",
    "model.dropout",
    "model.layer_norm_eps",
    "model.kernels",
    "model.relative_position_scheme",
    "model.relative_position_buckets",
    "model.generator_depths",
    "model.mixture",
    "model.gumbel_temperature",
    "model.gumbel_entries",
    "criterion._name",
    "criterion.discriminator_loss_weight",
    "optimizer._name",
    "optimizer.adam_betas",
    "optimizer.adam_eps",
    "optimizer.weight_decay",
    "optimizer.bias_correction",
    "optimizer.layer_wise_lr_decay",
    "lr_scheduler._name",
    "lr_scheduler.warmup_updates",
    "lr_scheduler.total_num_update",
    "lr_scheduler.end_learning_rate",
    "lr_scheduler.power",
    "optimization.lr",
    "optimization.update_freq",
    "optimization.clip_norm",
    "dataset.batch_size",
    "dataset.num_workers",
    "common.log_interval",
    "common.seed",
    "common.bf16",
    "checkpoint.save_interval_updates",
    "checkpoint.best_checkpoint_metric",
    "checkpoint.keep_interval_updates",
    # Whole sections.
    "scoring",
    "bmuf",
    "ema",
    "generation",
    "distributed_training",
    "optimizer",
    "criterion",
    "lr_scheduler",
)
VALUES = (
    "0",
    "-1",
    "1e-9",
    "2.5",
    "nan",
    "inf",
    "-inf",
    "1e21",
    "1e300",
    "null",
    "true",
    "x",
    "''",
    "[]",
    "[0]",
    "[1,2]",
    "{a:1}",
    "???",
    "x" * 300,
)
TINY_RECIPE = ["--config-dir", str(ROOT / "examples/pretraining/config"), "--config-name", "amos_tiny"]


def settings(place: Place, tries: int, seed: int) -> Iterator[Attack]:
    """Give one setting a random value, through Hydra; the run trains, or is refused by one line.

    Whole sections go to ``amos train``: ``fairseq-hydra-train`` reads them before it imports the plugin.
    """
    draw = random.Random(seed)
    pairs = [(name, value) for name in SETTINGS for value in VALUES]
    draw.shuffle(pairs)
    for name, value in (pairs * (tries // len(pairs) + 1))[:tries]:
        save_dir = place.folder / "settings"
        overrides = [*SMALL_RUN, f"task.data={place.corpus}", f"checkpoint.save_dir={save_dir}", f"{name}={value}"]
        if "." in name:
            code, text = run_command("fairseq_cli.hydra_train", [*TINY_RECIPE, *overrides], ROOT)
        else:
            code, text = run_interpreter([*place.amos, "train", "amos_tiny", *overrides], ROOT, {})
        yield Attack("setting", f"{name}={value}", command_harm(code, text, save_dir if save_dir.exists() else None))
        shutil.rmtree(save_dir, ignore_errors=True)


NUMBERS = {
    "recipes": ("--vocabulary-size",),
    "flops": ("--vocabulary-size", "--length"),
    "inspect": ("--seed", "--mask-prob", "--top"),
    "score": ("--batch-tokens",),
    "report": ("--masked-tokens", "--seed"),
    "import": ("--seed",),
    "prepare": (
        "--sample-megabytes",
        "--shard-megabytes",
        "--valid-share",
        "--valid-megabytes",
        "--vocab-size",
        "--workers",
        "--seed",
    ),
    "probe": ("--updates", "--lr", "--batch-size", "--seeds"),
    "tag": ("--lr", "--epochs", "--batch-size", "--seeds", "--parallel"),
}
NUMBER_VALUES = (
    "",
    "0",
    "-1",
    "0.5",
    "nan",
    "inf",
    "1e-300",
    "1e21",
    "1e23",
    "1e300",
    str(2**31),
    str(2**62),
    "9" * 400,
    "x",
)
# OUT is no flag, but the argument in the folder out.
TEXTS = {
    "flops": ("--set",),
    "inspect": ("--text", "OUT"),
    "score": ("--device", "--format", "OUT"),
    "plot": ("OUT",),
    "report": ("--device", "--sentence", "--text", "OUT"),
    "import": ("--arch", "--depths", "--tokenizer", "OUT"),
    "export": ("--part", "--depth", "--labels", "--language", "--base-model", "--data-license", "--dataset", "OUT"),
    "prepare": ("--tokenizer", "OUT"),
    "probe": ("--layers", "--part", "--tasks", "--device", "OUT"),
    "tag": ("--recipe", "OUT"),
}
TEXT_VALUES = (
    "",
    "0",
    "-1",
    "1e21",
    str(2**62),
    "9" * 400,
    "null",
    "true",
    "x",
    "x" * 300,
    "a,b",
    "1,2",
    "meta",
    "a\nb",
    "\x1b[31m",
    "<b>",
    "\udcff",
    "nothing/here",
    ".",
    "a=b",
    "scoring=true",
    "model.encoder_layers=1e9",
)


def command_settings(place: Place, tries: int, seed: int) -> Iterator[Attack]:
    """Give one flag of a command a random value; the command uses or refuses it, in finite time."""
    draw = random.Random(seed)
    folder = place.folder / "command settings"
    choices = [(name, flag, NUMBER_VALUES) for name, flags in NUMBERS.items() for flag in flags]
    choices += [(name, flag, TEXT_VALUES) for name, flags in TEXTS.items() for flag in flags]
    for _ in range(tries):
        name, flag, values = draw.choice(choices)
        value = draw.choice(values)
        arguments = [name, *COMMANDS[name], f"{flag}={value}"]
        if flag == "OUT":
            arguments = [f"out/{value}" if part.startswith("out/") else part for part in arguments[:-1]]
        shutil.copytree(place.workplace, folder)
        code, text = run_amos(arguments, folder)
        harm = amos_harm(code, text, folder)
        if not harm and {path.name for path in folder.iterdir()} != {path.name for path in place.workplace.iterdir()}:
            harm = "changed a folder that is not OUT"
        yield Attack("setting of a command", f"amos {name} {flag}={value!r:.60}", harm)
        shutil.rmtree(folder)
