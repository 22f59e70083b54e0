"""Everything that a run of ``amos bench`` found, as plain values."""

import dataclasses
import datetime
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from amos_fairseq.bench.made_up_text import MadeUpText
from amos_fairseq.bench.settings import BenchSettings, Setup
from amos_fairseq.bench.timing import Spread, speed_ratio, tokens_per_second


@dataclass(frozen=True)
class Row:
    """A contestant.

    Attributes:
        unequal_work: empty where its work equals ours, else how it differs.
        seconds: of each measured step.
        flops_per_token: forward and backward, today's convention of ``amos flops``, for the plain definitions of the
            model: what a kernel computes twice counts once.
        held_bytes: weights, gradients, master weights and moments, which stay between steps.
        peak_bytes: the most during a step, these included; None where compiled code on a CPU hides its tensors.
    """

    name: str
    description: str
    is_ours: bool
    unequal_work: str
    num_parameters: int
    seconds: list[float]
    tokens_per_step: int
    flops_per_token: float
    held_bytes: int
    peak_bytes: int | None

    @property
    def tokens_per_second(self) -> Spread:
        return tokens_per_second(self.seconds, self.tokens_per_step)

    @property
    def flops_per_second(self) -> float:
        return self.flops_per_token * self.tokens_per_second.median


@dataclass(frozen=True)
class PieceTime:
    """A piece of the step by itself.

    Attributes:
        seconds: by way of computing it.
        flops, bytes: at least to be computed, and to be read and written.
        floor: seconds that the machine needs for the slower of both at its measured peaks.
    """

    name: str
    sizes: str
    flops: float
    bytes: float
    floor: float
    seconds: dict[str, float]


@dataclass(frozen=True)
class Report:
    """See :func:`as_json` for the meaning of each."""

    settings: BenchSettings
    setup: Setup
    rows: list[Row]
    refusals: dict[str, str]
    text: MadeUpText
    batch_size: int
    num_rows: int
    parts: dict[str, float]
    pieces: list[PieceTime]
    matmul_peak: float
    bandwidth: float
    machine: dict[str, Any]
    versions: dict[str, str]
    time: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc))

    @property
    def best_of_ours(self) -> Row:
        """Ours as it comes, or compiled."""
        return max((row for row in self.rows if row.is_ours), key=lambda row: row.tokens_per_second.median)

    def ratio(self, row: Row) -> Spread | None:
        """How many times as fast our best is, step by step; None for our own rows."""
        return None if row.is_ours else speed_ratio(self.best_of_ours.seconds, row.seconds)

    def fraction_of_peak(self, row: Row) -> float:
        return row.flops_per_second / self.matmul_peak

    @property
    def name(self) -> str:
        """Of its files: date, recipe, length, precision, device."""
        recipe = self.settings.config.rstrip("/").split("/")[-1].removesuffix(".yaml").removesuffix(".pt")
        length = self.setup.cfg.task.tokens_per_sample
        return f"{self.time:%Y-%m-%d_%H%M%S}_{recipe}_T{length}_{self.setup.precision}_{self.setup.device.type}"

    def as_json(self) -> dict[str, Any]:
        """Plain values; bytes, seconds, FLOP/s and tokens/s without prefixes."""
        return {
            "time": self.time.isoformat(timespec="seconds"),
            "settings": dataclasses.asdict(self.settings),
            "work": {
                "objective": self.setup.cfg.criterion._name,
                "sequences": self.batch_size,
                "tokens_per_sequence": self.setup.cfg.task.tokens_per_sample,
                "masked_positions": self.text.masked_per_batch,
                "vocabulary_rows": self.num_rows,
                "precision": self.setup.precision,
                "device": self.setup.device.type,
            },
            "contestants": [self._row_as_json(row) for row in self.rows],
            "not_compiled": self.refusals,
            "matmul_peak": self.matmul_peak,
            "memory_bandwidth": self.bandwidth,
            "parts": self.parts,
            "data": {
                "tokens_per_second": self.text.loaded_tokens_per_second,
                "reads_corpus": self.text.reads_corpus,
                "loader_processes": self.loader_processes,
            },
            "pieces": [dataclasses.asdict(piece) for piece in self.pieces],
            "machine": self.machine,
            "versions": self.versions,
            "config": OmegaConf.to_container(self.setup.cfg, enum_to_str=True),
        }

    @property
    def loader_processes(self) -> int:
        """Loader processes that keep up with our best: its tokens/s over those of one, rounded up."""
        return max(1, -int(-self.best_of_ours.tokens_per_second.median // self.text.loaded_tokens_per_second))

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        ratio = self.ratio(row)
        return {
            "name": row.name,
            "description": row.description,
            "is_ours": row.is_ours,
            "unequal_work": row.unequal_work,
            "parameters": row.num_parameters,
            "seconds": row.seconds,
            "tokens_per_second": row.tokens_per_second.as_json(),
            "flops_per_token": row.flops_per_token,
            "flops_per_second": row.flops_per_second,
            "fraction_of_peak": self.fraction_of_peak(row),
            "held_bytes": row.held_bytes,
            "peak_bytes": row.peak_bytes,
            "ours_is_faster_by": ratio and ratio.as_json(),
        }
