from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ipc.rings import CORES, Ring


@pytest.fixture(params=CORES)
def ring(request: pytest.FixtureRequest) -> Iterator[Ring]:
    """A small ring with the checksum on, both ends of the same core."""
    ring = Ring(producer=request.param, consumer=request.param)
    yield ring
    ring.close()
