"""Divides each GPU between the models on it, once all of them have measured what they take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from trouterd.calls import CallError, Refused
from trouterd.config import Config
from trouterd.memory import Card, Claim, FitError, Memory, common_tokens, gib

log = logging.getLogger("trouterd.supervisor")

Measure = Callable[[str], Awaitable[Mapping[int, Memory]]]


class Sizing:
    """KV pool sizes of all models on GPUs: agreed at the first start of everybody, kept for whoever is started again."""

    def __init__(self, config: Config, measure: Measure, on_misfit: Callable[[str], None]) -> None:
        """
        Args:
            config: who is on which GPU.
            measure: asks a model's process for the memory of its GPUs now. Raises CallError.
            on_misfit: called with one line when the models of a GPU do not fit.
        """
        self._config = config
        self._measure = measure
        self._on_misfit = on_misfit
        self._claims: dict[str, Claim] = {}
        self._waiting: dict[str, asyncio.Future[int]] = {}
        self._agreed: dict[str, int] = {}

    def waits(self, name: str) -> bool:
        """Whether a model waits for what others have yet to measure."""
        return name in self._waiting

    async def agree(self, name: str, claim: Claim) -> int:
        """The tokens of a model's KV pool; waits until every model that shares a GPU with it, or with one that does, has asked.

        Raises:
            Refused: they do not fit.
            CallError: they did at the start, but now there is less memory; or a process could not be asked for it.
        """
        if name in self._agreed:
            await self._check_again(name, claim)
            return self._agreed[name]
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._claims[name], self._waiting[name] = claim, answer
        group = self._group(name)
        if group <= self._claims.keys():
            await self._divide(group)
        return await answer

    def forget(self, name: str) -> None:
        """The process is gone: its successor measures anew."""
        self._claims.pop(name, None)
        if answer := self._waiting.pop(name, None):
            answer.cancel()

    def _group(self, name: str) -> frozenset[str]:
        """The models whose sizes depend on each other."""
        found, models = {name}, self._config.models
        while True:
            gpus = {gpu for member in found for gpu in models[member].gpus}
            more = {other for other, model in models.items() if gpus & set(model.gpus)}
            if more <= found:
                return frozenset(found)
            found |= more

    async def _divide(self, group: frozenset[str]) -> None:
        claims = {name: self._claims[name] for name in self._config.models if name in group}
        try:
            cards = await self._cards(claims)
            if any(self._claims.get(name) is not claim for name, claim in claims.items()):
                return  # somebody died meanwhile: the division follows when its successor asks
            common = common_tokens(cards)
        except FitError as error:
            self._on_misfit(str(error))
            self._answer(group, Refused(str(error)))
            return
        except CallError as error:
            if group <= self._claims.keys():
                self._answer(group, error)
            return
        for card in cards:
            _report(card, common)
        for name, claim in claims.items():
            self._agreed[name] = claim.tokens(common)
            self._waiting.pop(name).set_result(self._agreed[name])

    def _answer(self, group: frozenset[str], error: Exception) -> None:
        for name in group:
            self._claims.pop(name)
            self._waiting.pop(name).set_exception(error)

    async def _cards(self, claims: Mapping[str, Claim]) -> list[Card]:
        memory: dict[int, Memory] = {}
        for name in claims:
            memory |= await self._measure(name)
        fraction = self._config.gpu.memory_fraction
        models = self._config.models
        return [
            Card(gpu, memory[gpu], fraction, {name: claims[name] for name in claims if gpu in models[name].gpus})
            for gpu in sorted({gpu for name in claims for gpu in models[name].gpus})
        ]

    async def _check_again(self, name: str, claim: Claim) -> None:
        """A successor gets what its predecessor had, if it is still there."""
        need = claim.footprint.graphs + claim.footprint.workspace
        need += self._agreed[name] * claim.footprint.kv_bytes_per_token
        memory = await self._measure(name)
        for gpu in self._config.models[name].gpus:
            if memory[gpu].free < need:
                raise CallError(
                    f"models.{name}: its KV pool of {self._agreed[name]} tokens, as agreed at start, graphs and workspace take"
                    f" {gib(need)} of GPU {gpu}, of which {gib(memory[gpu].free)} are free now; waiting for others to leave it"
                )


def _report(card: Card, common: int) -> None:
    taken = card.fixed + card.kv_bytes(common)
    log.info(
        "GPU %d: %s of %s for %s, KV pools of %d tokens",
        card.index,
        gib(taken),
        gib(card.memory.total),
        ", ".join(card.claims),
        common,
    )
    if card.reach < card.budget:
        log.warning(
            "GPU %d: others hold memory, so that %s are left of the %s that gpu.memory_fraction allows",
            card.index,
            gib(card.reach),
            gib(card.budget),
        )
