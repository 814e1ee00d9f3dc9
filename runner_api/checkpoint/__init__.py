"""Model files in, NumPy arrays out: `load_checkpoint(path)` for Hugging Face folders and GGUF files.

Not imported by `runner_api` itself; the libraries that know the formats are imported when a file is opened.
"""

from runner_api.checkpoint.checkpoint import Checkpoint, load_checkpoint
from runner_api.checkpoint.config import ModelConfig, expected_shapes, model_config_from_hf
from runner_api.checkpoint.rope import RopeConfig, inverse_frequencies
from runner_api.checkpoint.smollm2 import resolve_model, smollm2_path

__all__ = [
    "Checkpoint", "ModelConfig", "RopeConfig", "expected_shapes", "inverse_frequencies", "load_checkpoint",
    "model_config_from_hf", "resolve_model", "smollm2_path",
]  # fmt: skip
