"""The api's own metrics."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from trouterd import metrics
from trouterd.metrics import Family, Histogram

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""Upper bounds of length buckets, tokens."""

LAG_SAMPLES = 50
"""Looks at the event loop's delay that the gauge covers."""


class ApiMetrics:
    """Counters and histograms that the engine client and the handlers update; label `model` is the public name."""

    def __init__(self) -> None:
        self.finished: Counter[tuple[str, str]] = Counter()
        """(finish reason, model) -> choices."""
        self.refused: Counter[str] = Counter()
        """Error code -> requests."""
        self.prompt_tokens: Counter[str] = Counter()
        self.generation_tokens: Counter[str] = Counter()
        self.route_tokens: Counter[tuple[str, str]] = Counter()
        """(public name, model that wrote) -> tokens."""
        self.stale_updates = 0
        self.unknown_fields = 0
        self.lags: deque[float] = deque([0.0], maxlen=LAG_SAMPLES)
        """How late the event loop was at its last looks, seconds."""
        self.time_to_first_token: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.inter_token: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.end_to_end: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.prompt_length: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(TOKENS))
        self.output_length: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(TOKENS))

    @property
    def loop_lag(self) -> float:
        """The largest of the last looks, seconds."""
        return max(self.lags)

    def families(self, active: int) -> list[Family]:
        """Everything, for one scrape; `active` = requests at the workers now."""
        return [
            metrics.gauge("api_requests_active", "Requests that the api has at the workers.", [({}, active)]),
            metrics.gauge("loop_lag_seconds", "How late the event loop was.", [({"task": "api"}, self.loop_lag)]),
            metrics.counter(
                "request_success",
                "Finished choices by reason.",
                [({"finished_reason": why, "model": model}, n) for (why, model), n in self.finished.items()],
            ),
            metrics.counter(
                "requests_refused", "Error answers by code.", [({"code": code}, n) for code, n in self.refused.items()]
            ),
            metrics.counter("prompt_tokens", "Prompt tokens accepted.", self._by_model(self.prompt_tokens)),
            metrics.counter("generation_tokens", "Tokens generated.", self._by_model(self.generation_tokens)),
            metrics.counter(
                "route_tokens",
                "Tokens by the model that wrote them.",
                [({"route": route, "model": writer}, n) for (route, writer), n in self.route_tokens.items()],
            ),
            metrics.counter(
                "stale_updates",
                "Token updates dropped: repeated, or of requests that are over.",
                [({}, self.stale_updates)],
            ),
            metrics.counter("unknown_fields", "Request fields that were ignored.", [({}, self.unknown_fields)]),
            *self._histograms(),
        ]

    def _histograms(self) -> list[Family]:
        named = (
            ("time_to_first_token_seconds", "Request to first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Time between tokens of a choice.", self.inter_token),
            ("e2e_request_latency_seconds", "Request to its end.", self.end_to_end),
            ("request_prompt_tokens", "Prompt length.", self.prompt_length),
            ("request_generation_tokens", "Answer length.", self.output_length),
        )
        return [
            metrics.histogram(name, text, [({"model": model}, observed) for model, observed in values.items()])
            for name, text, values in named
        ]

    @staticmethod
    def _by_model(values: Counter[str]) -> list[tuple[dict[str, str], float]]:
        return [({"model": model}, count) for model, count in values.items()]
