"""Package, command and extras of amos_fairseq; tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="amos_fairseq",
    version="0.1.0",
    description="Pretrain text encoders with an adversarial mixture of training signals (AMOS), as a fairseq plugin",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11,<3.12",
    packages=find_packages(include=["amos_fairseq", "amos_fairseq.*"]),
    package_data={
        "amos_fairseq.bench": ["fake_cuda.cpp"],
        "amos_fairseq.finetuning": ["paper_results.yaml", "recipes/*.yaml"],
    },
    entry_points={"console_scripts": ["amos=amos_fairseq.cli.main:main"]},
    install_requires=[
        # The one fairseq that imports on Python 3.11; the original 0.12.2 does not.
        "fairseq-fixed==0.12.3.1",
        # A bare "torch" takes the newest CUDA build whatever is installed; these are the versions whose loader is weights-only.
        "torch>=2.6,<2.14",
        "huggingface_hub",
        "matplotlib",
        "numpy",
        "packaging",
        "protobuf",  # what sentencepiece reads its own model files with
        "PyYAML",
        "rich",
        "safetensors",
        "scikit-learn",
        "scipy",
        "sentencepiece>=0.2.3",  # the first that tells where pieces lie in the text
        "tensorboard",
        "tokenizers",
        "tqdm",
        # transformers 5 imports torchaudio eagerly, which does not load beside a CPU build of torch.
        "transformers>=4.57,<5",
        "zstandard",
    ],
    extras_require={
        "test": [
            "pytest",
            "pytest-xdist",
            "ruff",
            "fastBPE==0.1.0",
            "hydra-submitit-launcher",
            # Clients of what `amos export` writes; each takes the torch and the transformers above as they are.
            "onnx",
            "onnxruntime",
            "onnxscript",  # what torch.onnx.export(..., dynamo=True) writes with
            "sentence-transformers>=5,<6",
        ],
        "wandb": ["wandb"],
        "submitit": ["hydra-submitit-launcher"],
    },
)
