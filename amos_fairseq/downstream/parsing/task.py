"""Fine-tuning on dependency trees (thesis, section 4.2.3)."""

from dataclasses import dataclass, field

from fairseq.tasks import register_task
from omegaconf import MISSING

from amos_fairseq.downstream.parsing.dataset import ParsedSentences
from amos_fairseq.downstream.parsing.model import TREES, ParsingModel
from amos_fairseq.downstream.tagging.task import Column, SequenceTaggingConfig, SequenceTaggingTask
from amos_fairseq.downstream.views import PARSING_VIEWS


@dataclass
class DependencyParsingConfig(SequenceTaggingConfig):
    data: str = field(default=MISSING, metadata={"help": "OUT/data/parsing of amos parse"})


@register_task("dependency_parsing", dataclass=DependencyParsingConfig)
class DependencyParsingTask(SequenceTaggingTask):
    """Every sentence is an example; its labels are relations. Words beyond the model's length are cut, and in validation
    wrong."""

    model_class = ParsingModel
    head_for = "dependency trees"
    data_set = ParsedSentences
    known_views = PARSING_VIEWS

    @staticmethod
    def head_name(column: Column) -> str:
        return TREES

    @property
    def relations(self) -> list[str]:
        return self.columns[TREES].labels

    def add_head(self, model: ParsingModel) -> None:
        model.register_parsing_head(len(self.relations))
