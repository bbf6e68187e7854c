"""Distribution metadata of shardstack. The import name is the folder's: ``core``."""

from pathlib import Path

from setuptools import find_packages, setup

# What only some users need. `core` itself imports with torch and numpy alone; each of these is imported where
# it is used, and its absence is an error that names the extra.
EXTRAS = {
    "train": [
        "cyclopts>=5",
        "docstring-parser>=0.15",
        "tqdm>=4.66",
        "tokenizers>=0.20",
        "zstandard>=0.22",
        "tensorboard>=2.16",
        "matplotlib>=3.8",
        "safetensors>=0.4.3",
    ],
    "trackers": [
        "tqdm>=4.66",
        "matplotlib>=3.8",
        "tensorboard>=2.16",
        "wandb>=0.20",
        "mlflow-skinny>=3",
        "trackio>=0.20",
    ],
    "hf": [
        "transformers>=5.23,<6",
        "accelerate>=1.15,<2",
        "peft>=0.15",
        "safetensors>=0.4.3",
        "tokenizers>=0.20",
        "pyyaml>=6",
    ],
    "lightning": ["lightning>=2.6,<2.7"],
    "ray": ["ray[train]>=2.50"],
    "megatron": ["megatron-core>=0.16,<0.21"],
    "titan": ["torchtitan>=0.3,<0.4"],
    "test": ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.7", "hypothesis>=6.100", "pyyaml>=6"],
    "docs": ["mkdocs-material>=9.7", "mkdocstrings[python]>=1", "ruff>=0.9"],
    "dev": ["ruff>=0.9", "mypy>=1.14", "import-linter>=2.16", "types-tqdm"],
}

# No upper bound: CI takes the newest torch. Where torch has renamed what is read of FSDP2's private state, wrapping raises
# an error that names it.
TORCH = "torch>=2.11"

setup(
    name="shardstack",
    version="0.1.0",
    description="Data parallelism for large transformer stacks: DDP, ZeRO and FSDP2 behind one wrapper contract",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["core", "core.*"]),
    package_data={
        "core": ["py.typed"],
        "core.adapters.bridge": ["foreign_settings.json"],
        "core.base": ["hardware.json", "megatron_names.json"],
        "core.distributed.plan": ["not_of_fsdp2.json"],
        "core.distributed.report": ["page.html"],
        "core.models.gpt": ["hf_layouts.json"],
        "core.optimizer.muon": ["muon_coefficients.json"],
        "core.planner": ["nccl.json"],
        "core.process_groups": ["group_kinds.json"],
        "core.training.config": ["flags.json"],
        "core.training.launch": ["flags.json"],
        "core.verify": ["flags.json", "wrappers.json"],
    },
    install_requires=[TORCH, "numpy>=1.26", "filelock>=3.12", "jinja2>=3"],  # torch needs the last two too
    extras_require=EXTRAS,
)
