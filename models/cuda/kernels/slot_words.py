"""Words of slot records and of a step's headers as Triton constants."""

from __future__ import annotations

import triton.language as tl

from models.slots import MAX_PARAMS, RECORD_WORDS, Field

WORDS = tl.constexpr(RECORD_WORDS)
TOKEN = tl.constexpr(int(Field.TOKEN))
POSITION = tl.constexpr(int(Field.POSITION))
ACTIVE = tl.constexpr(int(Field.ACTIVE))
ROUTABLE = tl.constexpr(int(Field.ROUTABLE))
PROMPT_LENGTH = tl.constexpr(int(Field.PROMPT_LENGTH))
MAX_TOKENS = tl.constexpr(int(Field.MAX_TOKENS))
MIN_TOKENS = tl.constexpr(int(Field.MIN_TOKENS))
STOP_COUNT = tl.constexpr(int(Field.STOP_COUNT))
TEMPERATURE = tl.constexpr(int(Field.TEMPERATURE))
TOP_K = tl.constexpr(int(Field.TOP_K))
TOP_P = tl.constexpr(int(Field.TOP_P))
MIN_P = tl.constexpr(int(Field.MIN_P))
SEED_LOW = tl.constexpr(int(Field.SEED_LOW))
SEED_HIGH = tl.constexpr(int(Field.SEED_HIGH))
CHOICE = tl.constexpr(int(Field.CHOICE))
ROUTE = tl.constexpr(int(Field.ROUTE))
PARAMS = tl.constexpr(int(Field.PARAMS))
PARAM_COUNT = tl.constexpr(MAX_PARAMS)
STOP_IDS = tl.constexpr(int(Field.STOP_IDS))

OWN = tl.constexpr(-1)
"""`models.resident.OWN_TOKEN`."""

# Headers of an inbox entry, see `models.cuda.inbox`.
ROWS = tl.constexpr(0)
WANTED = tl.constexpr(1)
DECIDED = tl.constexpr(2)
CHANGES = tl.constexpr(3)
EPOCH = tl.constexpr(4)
HEADER = tl.constexpr(16)

# The device's clock: turns done, start of the turn in progress in ns, the turn after it.
TURN = tl.constexpr(0)
STARTED = tl.constexpr(1)
NEXT = tl.constexpr(2)

# Headers of a step's record, see `models.records`: 64-bit words.
RECORD_HEADER = tl.constexpr(16)
"""In 32-bit words."""
