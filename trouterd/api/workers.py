"""What the api knows of the workers' health, told by the supervisor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trouterd.control import PeerState


class WorkerStates:
    """Latest state of every worker; a worker that was never reported is still starting."""

    def __init__(self, names: Iterable[str]) -> None:
        self._states: dict[str, PeerState | None] = dict.fromkeys(names)

    def update(self, state: PeerState) -> bool:
        """Take over a new state; True when the requests that live in this worker are lost.

        A restart may be seen as a higher epoch alone, without a 'down' in between.
        """
        if state.name not in self._states:
            return False
        previous = self._states[state.name]
        self._states[state.name] = state
        return state.state == "down" or (previous is not None and previous.epoch != state.epoch)

    def fault(self, names: Iterable[str]) -> str:
        """Why the first of these workers that is not up cannot serve; '' when all can."""
        for name in names:
            state = self._states[name]
            if state is None:
                return f"worker '{name}' is starting"
            if state.state != "up":
                detail = f" (process state {state.process_state})" if state.process_state else ""
                return f"worker '{name}' is {state.state}{detail}"
        return ""

    def any_fault(self) -> str:
        """`fault` over all workers."""
        return self.fault(self._states)

    def report(self) -> dict[str, dict[str, Any]]:
        """Per worker: state, epoch and pid, as JSON-ready values."""
        return {
            name: {"state": "starting", "epoch": 0, "pid": 0}
            if state is None
            else {"state": state.state, "epoch": state.epoch, "pid": state.pid}
            for name, state in self._states.items()
        }
