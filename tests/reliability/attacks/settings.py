"""Random values of settings: of a training through Hydra, and of the flags of other commands."""

import random
import shutil
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from tiny_runs import ROOT

from attacks.commands import Place, amos_harm, command_harm, run_amos, run_command, run_interpreter
from attacks.workplace import COMMANDS, SMALL_RUN

SETTINGS_OF_SECTIONS = {
    "task": "tokens_per_sample mask_prob mask_treatment sample_break_mode _name data divergence_factor precision",
    "model": "_name encoder_layers encoder_embed_dim encoder_attention_heads max_positions dropout layer_norm_eps kernels "
    "relative_position_scheme relative_position_buckets generator_depths mixture gumbel_temperature gumbel_entries",
    "criterion": "_name discriminator_loss_weight",
    "optimizer": "_name adam_betas adam_eps weight_decay bias_correction layer_wise_lr_decay",
    "lr_scheduler": "_name warmup_updates total_num_update end_learning_rate power",
    "optimization": "lr update_freq clip_norm",
    "dataset": "batch_size num_workers",
    "common": "log_interval seed bf16",
    "checkpoint": "save_interval_updates best_checkpoint_metric keep_interval_updates",
}
SETTINGS = [f"{section}.{name}" for section, names in SETTINGS_OF_SECTIONS.items() for name in names.split()]
WHOLE_SECTIONS = ["scoring", "bmuf", "ema", "generation", "distributed_training"]
WHOLE_SECTIONS += ["optimizer", "criterion", "lr_scheduler"]
_NUMBERS = ("0", "-1", "1e-9", "2.5", "nan", "inf", "-inf", "1e21", "1e300")
VALUES = (*_NUMBERS, "null", "true", "x", "''", "[]", "[0]", "[1,2]", "{a:1}", "???", "x" * 300)
TINY_RECIPE = ["--config-dir", str(ROOT / "examples/pretraining/config"), "--config-name", "amos_tiny"]


def settings(place: Place, save_dir: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Give one setting a random value, through Hydra; the run trains, or is refused by one line.

    Whole sections go to ``amos train``: ``fairseq-hydra-train`` reads them before it imports the plugin.
    """
    pairs = [(name, value) for name in (*SETTINGS, *WHOLE_SECTIONS) for value in VALUES]
    draw.shuffle(pairs)
    for name, value in cycle(pairs):
        overrides = [*SMALL_RUN, f"task.data={place.corpus}", f"checkpoint.save_dir={save_dir}", f"{name}={value}"]
        if "." in name:
            code, text = run_command("fairseq_cli.hydra_train", [*TINY_RECIPE, *overrides], ROOT)
        else:
            code, text = run_interpreter([*place.amos, "train", "amos_tiny", *overrides], ROOT, {})
        yield f"{name}={value}", command_harm(code, text, save_dir if save_dir.exists() else None)


NUMBERS = {
    "recipes": ("--vocabulary-size",),
    "flops": ("--vocabulary-size", "--length"),
    "score": ("--batch-tokens",),
    "import": ("--seed",),
    "prepare": [f"--{name}" for name in ("sample-megabytes", "shard-megabytes", "valid-share", "valid-megabytes")]
    + ["--vocab-size", "--workers", "--seed"],
    "probe": ("--updates", "--lr", "--batch-size", "--seeds"),
    "tag": ("--lr", "--epochs", "--batch-size", "--seeds", "--parallel"),
}
_POWERS = ("1e-300", "1e21", "1e23", "1e300", str(2**31), str(2**62), "9" * 400)
NUMBER_VALUES = ("", "0", "-1", "0.5", "nan", "inf", *_POWERS, "x")
# OUT is no flag, but the argument in the folder out.
TEXTS = {
    "flops": ("--set",),
    "score": ("--device", "--format", "OUT"),
    "report": ("--device", "--sentence", "--text", "--figures", "OUT"),
    "import": ("--arch", "--depths", "--tokenizer", "OUT"),
    "export": ("--part", "--depth", "--labels", "--language", "--base-model", "--data-license", "--dataset", "OUT"),
    "prepare": ("--tokenizer", "OUT"),
    "probe": ("--layers", "--part", "--tasks", "--device", "OUT"),
    "tag": ("--recipe", "OUT"),
}
_WORDS = ("null", "true", "x", "a,b", "1,2", "meta", "<b>", "nothing/x", ".", "x" * 300, "a\nb", "\x1b[31m", "\udcff")
_SETTINGS = ("a=b", "scoring=true", "model.encoder_layers=1e9")
TEXT_VALUES = ("", "0", "-1", "1e21", str(2**62), "9" * 400, *_WORDS, *_SETTINGS)


def command_settings(place: Place, folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Give one flag of a command a random value; the command uses or refuses it, in finite time."""
    choices = [(name, flag, NUMBER_VALUES) for name, flags in NUMBERS.items() for flag in flags]
    choices += [(name, flag, TEXT_VALUES) for name, flags in TEXTS.items() for flag in flags]
    while True:
        name, flag, values = draw.choice(choices)
        value = draw.choice(values)
        arguments = [name, *COMMANDS[name], f"{flag}={value}"]
        if flag == "OUT":
            arguments = [f"out/{value}" if part.startswith("out/") else part for part in arguments[:-1]]
        shutil.copytree(place.workplace, folder)
        harm = amos_harm(*run_amos(arguments, folder), folder)
        if not harm and {path.name for path in folder.iterdir()} != {path.name for path in place.workplace.iterdir()}:
            harm = "changed a folder that is not OUT"
        yield f"amos {name} {flag}={value!r:.60}", harm
