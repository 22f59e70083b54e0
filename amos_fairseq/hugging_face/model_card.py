"""The model card of an exported folder: the facts of the run, in the words of ``model_card.jinja``."""

import html
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.checkpoints.read import LoadedCheckpoint, import_source, parent_of, read_state
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face import custom_code
from amos_fairseq.hugging_face.parts import Part
from amos_fairseq.hugging_face.weights import Head
from amos_fairseq.modules.bert_encoder import BertEncoderConfig
from amos_fairseq.process import version_of
from amos_fairseq.run.metrics_file import read_records

UNKNOWN_LICENSE = "unknown"
_TEMPLATE = Path(__file__).with_name("model_card.jinja")
_LONGEST_CHAIN = 10  # of runs that started from each other
_LIBRARIES = ("amos_fairseq", "fairseq-fixed", "torch", "transformers", "tokenizers")
_POSITIONS = {"none": "absolute", "t5": "absolute, and relative as in T5", "amos": "absolute, and relative as released"}
# Keys of a validation record that describe speed or position in the run.
_NOT_METRICS = ("split", "update", "epoch", "wps", "ups", "wpb", "bsz", "best_loss", "best_num_updates")
# Weights with one row per token of the vocabulary.
_ROW_PER_TOKEN = ("embed_tokens.weight", "mlm_head.bias")


@dataclass(frozen=True)
class CardSettings:
    """Facts that only the user knows; ``base_model`` was imported and trained further. Names are those on the Hub."""

    data_license: str = UNKNOWN_LICENSE
    language: str | None = None
    base_model: str | None = None
    datasets: tuple[str, ...] = ()


def write_card(
    folder: Path, name: str, loaded: LoadedCheckpoint, part: Part, settings: CardSettings, agreement: str | None
) -> None:
    """Write ``README.md`` into ``folder``, which will have the name ``name``; ``agreement`` None: not compared."""
    from huggingface_hub import ModelCard, ModelCardData

    # A truncated last line of the log is skipped, and what the run did after this checkpoint does not count.
    records = [record for record in read_records(loaded.file.parent) if record["update"] <= loaded.num_updates]
    validation = next((record for record in reversed(records) if record.get("split") != "train"), None)
    source, imported, objective = first_source(loaded), loaded.imported_from, objective_of(loaded)
    data = ModelCardData(
        language=settings.language,
        license=settings.data_license,
        base_model=settings.base_model,
        datasets=list(settings.datasets) or None,
        library_name="sentence-transformers" if part.head == Head.POOLED_CLASSIFICATION else "transformers",
        pipeline_tag=part.head.pipeline,
        tags=["amos_fairseq", "fairseq", *filter(None, [objective])],
    )
    card = ModelCard.from_template(
        data,
        str(_TEMPLATE),
        escape=escape_markup,
        name=name,
        objective=objective,
        imported=imported,
        part=part,
        positions=_POSITIONS[part.shape.position_scheme] if isinstance(part.shape, BertEncoderConfig) else "rotary",
        num_parameters=number_of_parameters(loaded, part),
        has_code=custom_code.is_in(folder),
        loaded=loaded,
        task=str(loaded.task.get("_name", "text_pretraining")),
        num_tokens=number_of_tokens(loaded, records),
        validation=validation,
        not_metrics=_NOT_METRICS,
        settings=settings,
        started_from=source,
        source=settings.base_model or source,
        agreement=agreement,
        versions=", ".join(f"{library} {version_of(library)}" for library in _LIBRARIES),
    )
    card.save(folder / "README.md")


def number_of_parameters(loaded: LoadedCheckpoint, part: Part) -> int:
    """Count the parameters of our model, without the rows that only round up the vocabulary."""
    num_tokens = len(loaded.dictionary)
    return sum(
        (tensor[:num_tokens] if key in _ROW_PER_TOKEN else tensor).numel() for key, tensor in part.weights.items()
    )


def number_of_tokens(loaded: LoadedCheckpoint, records: list[dict[str, Any]]) -> float | None:
    """Return updates times the mean number of tokens per update, to three digits; None if it was not logged."""
    tokens = [record["wpb"] for record in records if record.get("split") == "train" and record.get("wpb")]
    return float(f"{sum(tokens) / len(tokens) * loaded.num_updates:.3g}") if tokens else None


def objective_of(loaded: LoadedCheckpoint) -> str:
    """Return the name of the pretraining objective, such as ``amos``; empty for an imported model."""
    settings = loaded.model.cfg
    name = getattr(settings, "arch", None) or getattr(settings, "_name", None) or type(loaded.model).__name__
    return "" if loaded.imported_from else str(name).partition("_")[0].lower()


def first_source(loaded: LoadedCheckpoint) -> str:
    """Return what the first of the runs that led to this one was imported from; empty if it was not, or its file is gone."""
    source, parent = loaded.imported_from, loaded.parent
    for _ in range(_LONGEST_CHAIN):
        if source or not os.path.isfile(parent):  # False also where its folder may not be read
            break
        try:
            cfg = read_state(Path(parent))["cfg"]
        except UserError:  # the file is another one by now
            break
        source, parent = import_source(cfg["task"]), parent_of(cfg)
    return source


def escape_markup(text: str) -> str:
    """Escape HTML, links, code and cells of tables in text from a checkpoint or a log, which a web page may show."""
    return re.sub(r"([\\`|\[\]])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
