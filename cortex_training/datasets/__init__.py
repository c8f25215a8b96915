"""Rows of a table become packed, hashed training data, and training data becomes the frames of a run.

Building needs the extra `datasets` (tokenizers, and jinja2 for chat templates); opening a dataset and making frames
needs numpy and safetensors only.
"""

from cortex_training.datasets.batches import FRAME_VERSION, Batches, Dataset
from cortex_training.datasets.build import build_dataset
from cortex_training.datasets.manifest import Manifest, Shard, check_window
from cortex_training.datasets.tokenizer import tokenizer_sha256

__all__ = [
    "FRAME_VERSION",
    "Batches",
    "Dataset",
    "Manifest",
    "Shard",
    "build_dataset",
    "check_window",
    "tokenizer_sha256",
]
