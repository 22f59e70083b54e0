"""``comparison.json``, ``comparison.md`` and the figures, from whatever is finished."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comparison import NAME, Comparison
from comparison_figures import draw_all
from comparison_results import entry_results, findings_beside_ours, ordering
from comparison_tables import all_tables
from pretraining_runs import threads

from amos_fairseq.files import whole_file
from amos_fairseq.finetuning.runs import write_json


def write_report(comparison: Comparison) -> list[Path]:
    """Write and print them; returns their paths."""
    content = content_of(comparison)
    summary = comparison.out / f"{NAME}.json"
    write_json(summary, content)
    tables = all_tables(content)
    page = comparison.out / f"{NAME}.md"
    with whole_file(str(page)) as unfinished:
        Path(unfinished).write_text("\n".join(table.as_markdown() for table in tables), encoding="utf-8")
    for table in tables:
        table.print()
    return [summary, page, *draw_all(content, comparison.paper, comparison.out)]


def content_of(comparison: Comparison) -> dict[str, Any]:
    """Of ``comparison.json``: setup, entries with their points, the order found, the papers' findings beside it."""
    options = comparison.options
    entries = {}
    for pretraining in comparison.pretrainings:
        fine_tunings = {share: comparison.fine_tuning(pretraining, share) for share in options.fine_tune_at}
        name = pretraining.entry.name
        entries[name] = entry_results(pretraining, comparison.costs[name], fine_tunings)
    device = device_name(comparison.device)
    return {
        "setup": {
            "size": options.size,
            "budget": str(comparison.budget),
            "tasks": list(options.tasks),
            "seeds": options.seeds,
            "fine_tune_at": options.fine_tune_at,
            "fine_tuning": comparison.fine_tuning_settings,
            "device": device,
            "shared": comparison.shared,
        },
        "entries": entries,
        "ordering": ordering(entries),
        "findings": findings_beside_ours(comparison.paper["findings"], entries),
        "notes": [*setting_notes(comparison, device), *dict.fromkeys(data_notes(comparison))],
    }


def device_name(device: str) -> str:
    if device == "cpu":
        return f"CPU, number of threads: {threads()}"
    import torch

    return torch.cuda.get_device_name(0)


def setting_notes(comparison: Comparison, device: str) -> Iterator[str]:
    """How the numbers came about."""
    shared, options = comparison.shared, comparison.options
    width = shared["model.embedding_dim"] or shared["model.encoder_embed_dim"]
    yield (
        f"all entries: the same text, vocabulary, order of blocks and optimizer; blocks of {shared['task.tokens_per_sample']} "
        f"tokens, {shared['dataset.batch_size']} a batch; encoder of {shared['model.encoder_layers']} layers and width "
        f"{shared['model.encoder_embed_dim']}, token embeddings of width {width}; relative positions: "
        f"{shared['model.relative_position_scheme']}; seed {shared['common.seed']}"
    )
    yield (
        "FLOPs: thesis 5.2.2 (backward = forward, dense look-ups, element-wise operations); matmul FLOPs: matrix products "
        "of forward and backward alone"
    )
    yield f"hours: on {device}, validation and saving included; tokens/s: median over the logged intervals"
    flags = ", ".join(f"{name} {value}" for name, value in comparison.fine_tuning_settings.items())
    heads = {p.entry.label: str(p.cfg.model.pooler_activation_fn) for p in comparison.pretrainings}
    yield (
        f"fine-tuning: amos glue with {flags}; medians ± standard deviation, number of seeds: {options.seeds}; AVG: the mean "
        "of the medians ± the deviation of the seeds' own averages"
    )
    if len(set(heads.values())) > 1:
        listed = ", ".join(f"{label} {activation}" for label, activation in heads.items())
        yield f"the classification head's activation is that of each paper: {listed}"
    yield (
        "one pretraining an entry: another seed of pretraining alone can move a small task by 2 to 5 points (AMOS "
        "Appendix E)"
    )


def data_notes(comparison: Comparison) -> Iterator[str]:
    """What ``amos glue`` says about training sets that are not the official ones."""
    for pretraining in comparison.pretrainings:
        for share in comparison.options.fine_tune_at:
            for result in comparison.fine_tuning(pretraining, share).results:
                yield from result.notes
