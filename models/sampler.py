"""Next-token sampling by Gumbel-max with noise keyed by position, so that a draw depends on its own row alone.

Order of operations, as in the OpenAI-compatible servers: repetition penalty and biases on the raw logits, temperature,
top_k, top_p (over what top_k left), min_p (relative to the likeliest token). A greedy row (temperature 0) takes the
largest logit after penalty and biases; the lowest id wins a tie, at every cut as well. top_p counts in the integers of
`models.mass`, so that every device cuts at the same id.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from models import rng
from models.mass import mass, share

_NEVER = float("-inf")


@dataclass(slots=True)
class Edits:
    """Sparse changes of logits: entry j concerns vocabulary id `ids[j]` of row `rows[j]`; no (row, id) occurs twice."""

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


@dataclass(slots=True)
class SamplingRows:
    """Sampling parameters of R rows, one array entry per row."""

    temperature: npt.NDArray[np.float32]
    """[R] 0 = greedy."""
    top_k: npt.NDArray[np.int64]
    """[R] 0 = off."""
    top_p: npt.NDArray[np.float32]
    """[R] 1 = off."""
    min_p: npt.NDArray[np.float32]
    """[R] 0 = off."""
    seed: npt.NDArray[np.uint64]
    """[R] the request's seed."""
    choice: npt.NDArray[np.int64]
    """[R] which of the request's n answers the row belongs to."""
    output_index: npt.NDArray[np.int64]
    """[R] output index of the token to draw."""
    bias: Edits | None = None
    """Added to the raw logits: logit_bias, presence and frequency penalties; -inf bans an id, as EOS by min_tokens."""
    repetition: Edits | None = None
    """Repetition penalty: a positive logit is divided by the value, a negative one multiplied."""
    purpose: int = field(default=rng.Purpose.SAMPLE)

    def __len__(self) -> int:
        return len(self.temperature)

    @classmethod
    def greedy(cls, count: int) -> SamplingRows:
        """Rows that take the largest logit."""
        zeros = np.zeros(count, np.int64)
        return cls(
            temperature=np.zeros(count, np.float32),
            top_k=zeros,
            top_p=np.ones(count, np.float32),
            min_p=np.zeros(count, np.float32),
            seed=np.zeros(count, np.uint64),
            choice=zeros,
            output_index=zeros,
        )


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Draw one token per row.

    Args:
        logits: [R, V] float32, raw; not modified.
        rows: parameters of the R rows.

    Returns:
        [R] int64 token ids on the logits' device.
    """
    edited = edit(logits, rows)
    tokens = edited.argmax(dim=-1)
    drawn = np.flatnonzero(rows.temperature > 0)
    if drawn.size:
        index = torch.from_numpy(drawn).to(logits.device)
        keys = _row_keys(rows, drawn, logits.device)
        tokens[index] = gumbel_argmax(_filtered(edited[index], rows, drawn), keys)
    return tokens


def processed(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """[R, V] logits after every operation, -inf where a filter cut: the law that `sample` draws from.

    Greedy rows are left at temperature 1 and unfiltered.
    """
    result = edit(logits, rows)
    drawn = np.flatnonzero(rows.temperature > 0)
    if drawn.size == 0:
        return result.clone() if result is logits else result
    index = torch.from_numpy(drawn).to(logits.device)
    return result.index_copy(0, index, _filtered(result[index], rows, drawn))


def edit(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Logits with penalty and biases applied; the very tensor that was given when there are none."""
    if rows.bias is None and rows.repetition is None:
        return logits
    result = logits.clone()
    if rows.repetition is not None:
        where, values = _placed(rows.repetition, logits.device)
        old = result[where]
        result[where] = torch.where(old > 0, old / values, old * values)
    if rows.bias is not None:
        where, values = _placed(rows.bias, logits.device)
        result[where] = result[where] + values
    return result


def gumbel_argmax(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[R] int64 draws from softmax(logits), [R, V], under [R] int64 keys of `rng.key_tensor`.

    The exponential-race form, argmin E_v / p_v with E_v = -log(1 - u_v): small E decide, and there u_v is finest.
    """
    items = torch.arange(logits.shape[-1], device=logits.device)
    unit = rng.unit_tensor(rng.item_bits_tensor(keys[:, None], items)).add_(2.0**-54)
    noise = unit.neg_().log1p_().neg_().log_()
    return (logits - noise).argmax(dim=-1)


def _row_keys(rows: SamplingRows, chosen: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    keys = rng.key_array(rows.seed[chosen], rows.choice[chosen], rows.output_index[chosen], rows.purpose)
    return torch.from_numpy(keys.view(np.int64)).to(device)


def _placed(edits: Edits, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    rows, ids, values = (torch.from_numpy(part).to(device) for part in (edits.rows, edits.ids, edits.values))
    return (rows, ids), values


def _filtered(logits: torch.Tensor, rows: SamplingRows, chosen: npt.NDArray[np.int64]) -> torch.Tensor:
    """Temperature and filters of the chosen rows over their own [n, V] logits."""
    device = logits.device
    # Measured from the largest logit, so that no temperature, however small, can overflow.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    logits /= torch.from_numpy(rows.temperature[chosen]).to(device)[:, None]
    cut = np.flatnonzero((rows.top_k[chosen] > 0) | (rows.top_p[chosen] < 1))
    if cut.size:
        top_k = torch.from_numpy(rows.top_k[chosen][cut]).to(device)[:, None]
        top_p = torch.from_numpy(rows.top_p[chosen][cut]).to(device)[:, None]
        index = torch.from_numpy(cut).to(device)
        logits = logits.index_copy(0, index, _cut_tail(logits[index], top_k, top_p))
    if rows.min_p[chosen].any():
        # log 0 = -inf: a row without min_p keeps everything.
        margin = torch.from_numpy(rows.min_p[chosen]).to(device).double().log().float()[:, None]
        logits = logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + margin, _NEVER)
    return logits


def _cut_tail(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[n, V] with -inf outside the top_k likeliest ids and outside the smallest set of mass >= top_p among those."""
    ranked, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ranked = ranked.masked_fill((top_k > 0) & (rank >= top_k), _NEVER)
    if (top_p < 1).any():
        masses = mass(ranked)
        before = masses.cumsum(dim=-1).sub_(masses)
        drop = (before >= share(top_p, masses.sum(dim=-1, keepdim=True))) & (top_p < 1) & (rank > 0)
        ranked = ranked.masked_fill(drop, _NEVER)
    return torch.full_like(logits, _NEVER).scatter_(1, ids, ranked)
