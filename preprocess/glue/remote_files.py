"""Where the official files lie and what they are: sizes and sha256 as published by others, not seen by us.

They are those of ``datasets/glue/dataset_infos.json`` in Hugging Face's ``datasets`` repository, whose ``glue.py``
downloads the same addresses. For MRPC's training file and list of development pairs, and for SST-2, the same hashes are
also known from other copies.
"""

from dataclasses import dataclass
from typing import Dict, Tuple

BASE_URL = "https://dl.fbaipublicfiles.com"


@dataclass(frozen=True)
class RemoteFile:
    """``path`` below the base address."""

    path: str
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


MRPC_TRAIN = RemoteFile(
    "senteval/senteval_data/msr_paraphrase_train.txt",
    1_047_044,
    "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
)
MRPC_TEST = RemoteFile(
    "senteval/senteval_data/msr_paraphrase_test.txt",
    441_275,
    "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784",
)
MRPC_DEV_IDS = RemoteFile(
    "glue/data/mrpc_dev_ids.tsv", 6_222, "971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7"
)


def _archive(name: str, size: int, sha256: str) -> Tuple[RemoteFile, ...]:
    return (RemoteFile(f"glue/data/{name}", size, sha256),)


REMOTE_FILES: Dict[str, Tuple[RemoteFile, ...]] = {
    "CoLA": _archive("CoLA.zip", 376_971, "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff"),
    "SST-2": _archive("SST-2.zip", 7_439_277, "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"),
    "MRPC": (MRPC_TRAIN, MRPC_TEST, MRPC_DEV_IDS),
    "STS-B": _archive("STS-B.zip", 802_872, "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85"),
    "QQP": _archive("QQP-clean.zip", 41_696_084, "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0"),
    "MNLI": _archive("MNLI.zip", 312_783_507, "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633"),
    "QNLI": _archive("QNLIv2.zip", 10_627_589, "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5"),
    "RTE": _archive("RTE.zip", 697_150, "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee"),
    "WNLI": _archive("WNLI.zip", 28_999, "ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46"),
    "AX": _archive("AX.tsv", 222_257, "0e13510b1bb14436ff7e2ee82338f0efb0133ecf2e73507a697dc210db3f05fd"),
}
