"""The tokenizer that all cases share."""

from __future__ import annotations

import pytest

from models.tokenizer import Tokenizer
from tests.models.tiny import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """ByteTok."""
    return Tokenizer.load(byte_tokenizer(tmp_path_factory.mktemp("bytetok")))
