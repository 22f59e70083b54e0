"""What a checkpoint and the log beside it tell of a model and its training: the numbers of a model card."""

from typing import Any

from amos_fairseq.interop.checkpoint import Pretrained
from amos_fairseq.interop.export_parts import Part
from amos_fairseq.interop.imported_checkpoint import source_of
from amos_fairseq.metrics_file import read_records

PRETRAINING_TASK = "text_pretraining"
_ROW_PER_TOKEN = ("embed_tokens.weight", "mlm_head.bias")


def origin(pretrained: Pretrained) -> str:
    """Whose model it is, in words: nothing was trained here between an import and its export."""
    source = source_of(pretrained.task)
    if source:
        return f"{source}, imported with amos_fairseq and not trained further"
    return "a model trained with amos_fairseq"


def task_of(pretrained: Pretrained) -> str:
    return str(pretrained.task.get("_name", PRETRAINING_TASK))


def objective(pretrained: Pretrained) -> str:
    """The name of the model that was pretrained, such as ``amos``; empty for one that was imported."""
    if source_of(pretrained.task):
        return ""
    settings = pretrained.model.cfg
    name = getattr(settings, "arch", None) or getattr(settings, "_name", None) or type(pretrained.model).__name__
    return str(name).partition("_")[0].lower()


def model_facts(pretrained: Pretrained, part: Part) -> dict[str, str]:
    shape, tokenizer = part.shape, pretrained.tokenizer
    positions = {
        "none": "absolute",
        "t5": "absolute, and relative as in T5",
        "amos": "absolute, and relative as released",
    }
    return {
        "Layers, width, FFN width, heads": f"{shape.num_layers}, {shape.width}, {shape.ffn_width}, {shape.num_heads}",
        "Longest input": f"{shape.max_positions} tokens",
        "Positions": positions[shape.position_scheme],
        "Vocabulary": f"{len(tokenizer):,} pieces, {tokenizer.kind}, {'cased' if tokenizer.cased else 'uncased'}",
        "Parameters": f"{num_parameters(pretrained, part):,}",
    }


def num_parameters(pretrained: Pretrained, part: Part) -> int:
    """Of the part, as our model has it, without the rows that only round up the vocabulary."""
    num_tokens = len(pretrained.dictionary)
    return sum(
        (tensor[:num_tokens] if name in _ROW_PER_TOKEN else tensor).numel() for name, tensor in part.weights.items()
    )


def run_facts(pretrained: Pretrained) -> dict[str, str]:
    """What the checkpoint and the log beside it tell of its training; nothing where it was imported."""
    if source_of(pretrained.task):
        return {}
    task = pretrained.task
    facts = {
        "Objective": objective(pretrained),
        "Task": task_of(pretrained),
        "Updates": f"{pretrained.num_updates:,}",
        "Tokens read": tokens_read(pretrained),
        "Tokens masked": f"{task['mask_prob']:.0%}" if "mask_prob" in task else "",
    }
    return {name: fact for name, fact in facts.items() if fact}


def tokens_read(pretrained: Pretrained) -> str:
    """Updates times the mean number of tokens an update, where the log of the run lies beside the checkpoint."""
    records = [record for record in read_metrics(pretrained) if record.get("split") == "train" and record.get("wpb")]
    if not records:
        return ""
    mean = sum(record["wpb"] for record in records) / len(records)
    return f"about {float(f'{mean * pretrained.num_updates:.3g}'):,.0f}"


def held_out_metrics(pretrained: Pretrained) -> dict[str, str]:
    """The last validation up to the checkpoint's update, without what describes speed."""
    records = [record for record in read_metrics(pretrained) if record.get("split") != "train"]
    if not records:
        return {}
    record = records[-1]
    speed = ("split", "update", "epoch", "wps", "ups", "wpb", "bsz", "best_loss", "best_num_updates")
    values = {name: f"{value:.4g}" for name, value in record.items() if name not in speed and value is not None}
    return {"update": f"{record['update']:,}", **values}


def read_metrics(pretrained: Pretrained) -> list[dict[str, Any]]:
    """Return the records up to the checkpoint's update; none where the checkpoint has no metrics file beside it."""
    return [record for record in read_records(pretrained.file.parent) if record["update"] <= pretrained.num_updates]
