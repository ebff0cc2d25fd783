"""What a throughput means for users and for the bill."""

from __future__ import annotations

from dataclasses import dataclass

_HOUR = 3600.0


@dataclass(frozen=True)
class Costs:
    """Of one throughput."""

    tokens_per_second: float
    ms_per_token: float
    """From one token of a request to its next, in the mean."""
    gpu_seconds_per_1000_tokens: float
    """Of all GPUs that are paid for, idle or not."""

    @classmethod
    def of(cls, tokens_per_second: float, concurrency: int, gpus: int) -> Costs:
        """For so many requests on so many GPUs."""
        return cls(tokens_per_second, 1e3 * concurrency / tokens_per_second, 1e3 * gpus / tokens_per_second)

    def money(self, gpu_hour: float) -> float:
        """Of 1,000,000 tokens, where an hour of one GPU costs `gpu_hour`."""
        return self.gpu_seconds_per_1000_tokens * 1e3 * gpu_hour / _HOUR
