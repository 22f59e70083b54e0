"""An exported folder that brings its own code: the released AMOS positions, and the released tokenizer.

The files are those that this package runs itself; only their imports of each other are made relative, so that the folder
needs nothing of ours.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import amos_fairseq
from amos_fairseq.interop.export_parts import Part
from amos_fairseq.interop.hugging_face_config import hugging_face_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# In the folder | in this package.
MODEL_CODE = {
    "modeling_amos.py": "interop/remote_code/modeling_amos.py",
    "relative_position.py": "functional/relative_position.py",
}
TOKENIZER_CODE = {
    "tokenization_amos.py": "interop/remote_code/tokenization_amos.py",
    "microsoft_text.py": "interop/microsoft_text.py",
}
_OUR_IMPORT = re.compile(r"^from amos_fairseq\.[\w.]+?(\w+) import ", re.MULTILINE)


def custom_config(part: Part, num_rows: int, **others: Any) -> "PretrainedConfig":
    """MPNet's configuration for positions that MPNet does not have."""
    from amos_fairseq.interop.remote_code.modeling_amos import AmosConfig

    settings = hugging_face_config("mpnet", part.shape, num_rows, **others).to_diff_dict()
    settings.pop("model_type")
    return AmosConfig(relative_attention_max_distance=part.shape.position_max_distance, **settings)


def write_code(folder: Path, files: dict[str, str]) -> None:
    """Copy ``files`` (name there, path in this package) into ``folder``, each finding the others beside it."""
    package = Path(amos_fairseq.__file__).parent
    for name, source in files.items():
        code = _OUR_IMPORT.sub(r"from .\1 import ", (package / source).read_text(encoding="utf-8"))
        (folder / name).write_text(code, encoding="utf-8")
