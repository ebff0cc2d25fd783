"""The api's answers to the supervisor's calls."""

from __future__ import annotations

from typing import Any

from trouterd.api.catalog import Catalog
from trouterd.api.engine import EngineClient
from trouterd.api.loading import ParamChecks
from trouterd.api.scores import ScoreError, Scores
from trouterd.child import Control, Refused
from trouterd.config import Config


class Verbs:
    """Handlers by verb."""

    def __init__(self, engine: EngineClient, catalog: Catalog, checks: ParamChecks, scores: Scores) -> None:
        self._engine = engine
        self._catalog = catalog
        self._checks = checks
        self._scores = scores

    def register(self, control: Control) -> None:
        """Answer from now on, and follow the workers' states."""
        control.handlers |= {
            "status": self.status,
            "requests": self.requests,
            "set": self.set,
            "abort": self.abort,
            "drain": self.drain,
        }
        control.on_peer_state(self._engine.on_peer_state)

    async def status(self, args: dict[str, Any]) -> dict[str, Any]:
        """Requests in flight and tokens so far."""
        del args
        engine, metrics = self._engine, self._engine.metrics
        tokens: dict[str, int] = {}
        for (_, writer), count in metrics.route_tokens.items():
            tokens[writer] = tokens.get(writer, 0) + count
        return {
            "active": engine.active,
            "draining": engine.draining,
            "prompt_tokens": metrics.prompt_tokens.total(),
            "generation_tokens": metrics.generation_tokens.total(),
            "tokens_by_model": tokens,
            "loop_lag_seconds": metrics.loop_lag,
        }

    async def requests(self, args: dict[str, Any]) -> list[dict[str, Any]]:
        """Every choice in flight."""
        del args
        return self._engine.report()

    async def set(self, args: dict[str, Any]) -> None:
        """Take over a changed configuration; requests in flight go on.

        Raises:
            Refused: it does not fit a model that scores prompts.
        """
        try:
            self.configure(args["config"])
        except ScoreError as error:
            raise Refused(str(error)) from error

    def configure(self, config: Config) -> None:
        """Go by this configuration's live settings. Raises ScoreError: they do not fit a model that scores prompts."""
        self._scores.check(config)
        self._engine.configure(config)
        self._catalog.configure(config)
        self._checks.configure(config)

    async def abort(self, args: dict[str, Any]) -> dict[str, int]:
        """End requests by id.

        Raises:
            Refused: none has it.
        """
        identifier = str(args["id"])
        aborted = self._engine.abort(identifier)
        if not aborted:
            raise Refused(f"no request has the id {identifier!r}")
        return {"aborted": aborted}

    async def drain(self, args: dict[str, Any]) -> dict[str, int]:
        """Take nothing new and return when all is answered; what still runs after `timeout` seconds ends with an error."""
        return (await self._engine.drain(args.get("timeout")))._asdict()
