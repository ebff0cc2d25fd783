"""The demo: two small models of one family and the task that they were trained for."""

from pathlib import Path

SMALL_DIRECTORY = Path(__file__).parent / "small"
"""Hugging Face directory of the small model."""
LARGE_DIRECTORY = Path(__file__).parent / "large"
"""Hugging Face directory of the large model; its tokenizer and chat template equal the small one's."""
