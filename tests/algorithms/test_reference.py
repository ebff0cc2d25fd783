"""The oracle against answers worked out by hand: scripted models that say one letter per position, sure or unsure of it."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipc.messages import Sampling
from models.rng import Purpose, uniform
from tests.algorithms import reference
from tests.algorithms.reference import Decision, Handoff
from tests.algorithms.steps import quick

torch.set_num_threads(1)

PROMPT = [1, 2, 3]
V = 16
EOS = 0


def scripted(tokens, unsure=()):
    """Says tokens[t] at output index t: with probability 1, or, at indices in `unsure`, as one of two with entropy log 2."""

    def logits(ids):
        index = len(ids) - len(PROMPT)
        row = torch.full((V,), -1000.0)
        row[tokens[index]] = 1.0
        if index in unsure:
            row[V - 1] = 0.999
        return row

    return logits


def run(rule, *models, max_tokens=6, max_stall=8, eos=(EOS,), **sampling):
    sampling = {"seed": 3, "temperature": 0.0} | sampling
    return reference.generate(models, rule, PROMPT, Sampling(max_tokens=max_tokens, **sampling), eos, max_stall)


SMALL = [1, 2, 3, 4, 5, 6, 7, 8]
LARGE = [11, 12, 13, 14, 10, 9, 8, 7]


def test_none():
    trace = run(reference.none(), scripted(SMALL), scripted(LARGE))
    assert (trace.tokens, trace.writers) == ([1, 2, 3, 4, 5, 6], [0] * 6)
    assert (trace.handoffs, trace.finish) == ([], "length")


def test_entropy_rewrites_unsure_positions_the_first_one_included():
    trace = run(reference.entropy(0.5), scripted(SMALL, {0, 3}), scripted(LARGE))
    assert trace.tokens == [11, 2, 3, 14, 5, 6]
    assert trace.writers == [1, 0, 0, 1, 0, 0]
    assert trace.handoffs == [
        Handoff(0, 0, 1, 0, 0),  # the peer has the prompt, nothing else exists
        Handoff(0, 1, 0, 1, 1),
        Handoff(3, 0, 1, 2, 3),  # outputs 1 and 2; the peer wrote 0 itself
        Handoff(3, 1, 0, 1, 4),
    ]


@pytest.mark.parametrize(
    ("measure", "threshold", "routed"),
    [
        ("entropy", 0, True),
        ("entropy", 0.7, False),
        ("normalized_entropy", 0.2, True),
        ("normalized_entropy", 0.3, False),
        ("confidence", 0.6, True),
        ("confidence", 0.4, False),
        ("margin", 0.1, True),
        ("margin", 0, False),
    ],
)
def test_entropy_measures(measure, threshold, routed):
    trace = run(reference.entropy(threshold, measure), scripted(SMALL, {0}), scripted(LARGE), max_tokens=1)
    assert trace.writers == [int(routed)]


def test_entropy_peer_that_writes_on_streams_to_the_entry():
    trace = run(reference.entropy(0.5, back="confident"), scripted(SMALL, {1}), scripted(LARGE, {1, 2}))
    assert trace.tokens == [1, 12, 13, 14, 5, 6]
    assert trace.writers == [0, 1, 1, 1, 0, 0]
    assert trace.handoffs == [Handoff(1, 0, 1, 1, 1), Handoff(3, 1, 0, 1, 4)]


def test_rstitch_large_keeps_its_confident_token():
    trace = run(reference.rstitch(0.1), scripted(SMALL, {1, 2, 4}), scripted(LARGE, {1}))
    assert trace.tokens == [1, 12, 13, 4, 10, 6]
    assert trace.writers == [0, 1, 1, 0, 1, 0]
    assert trace.handoffs == [
        Handoff(1, 0, 1, 1, 1),
        Handoff(2, 1, 0, 1, 3),
        Handoff(4, 0, 1, 1, 4),  # output 3 only: the peer knows 1 and 2, and was sent 0
        Handoff(4, 1, 0, 1, 5),
    ]


def test_rstitch_vocab_scales_the_entropy():
    assert run(reference.rstitch(0.2), scripted(SMALL, {0}), scripted(LARGE), max_tokens=1).writers == [1]
    assert run(reference.rstitch(0.2, 1024), scripted(SMALL, {0}), scripted(LARGE), max_tokens=1).writers == [0]


def test_every_n_blocks_of_three_models_hop_directly():
    third = [7] * 8
    trace = run(reference.every_n("block", 2, 3), scripted(SMALL), scripted(LARGE), scripted(third), max_tokens=8)
    assert trace.tokens == [1, 2, 13, 14, 7, 7, 7, 8]
    assert trace.writers == [0, 0, 1, 1, 2, 2, 0, 0]
    assert trace.handoffs == [
        Handoff(1, 0, 1, 2, 2),
        Handoff(3, 1, 2, 4, 4),  # the third model has seen no output yet
        Handoff(5, 2, 0, 1, 6),  # outputs 2 to 4 were streamed to the entry
    ]


def test_every_n_visit():
    trace = run(reference.every_n("visit", 3), scripted(SMALL), scripted(LARGE))
    assert trace.tokens == [1, 2, 13, 4, 5, 9]
    assert trace.handoffs == [
        Handoff(2, 0, 1, 2, 2),
        Handoff(2, 1, 0, 1, 3),
        Handoff(5, 0, 1, 2, 5),  # the last token ends the answer at the peer
    ]
    assert trace.finish == "length"


def test_bernoulli_follows_the_position_keyed_draw():
    trace = run(reference.bernoulli(0.5), scripted(SMALL), scripted(LARGE), max_tokens=8, choice=2)
    assert trace.writers == [int(uniform(3, 2, t, Purpose.ROUTE) < 0.5) for t in range(8)]
    assert 0 < sum(trace.writers) < 8


def test_a_sampled_eos_that_is_routed_away_is_rewritten():
    trace = run(reference.entropy(0.5), scripted([1, EOS, 3, EOS], {1}), scripted(LARGE))
    assert (trace.tokens, trace.writers, trace.finish) == ([1, 12, 3, EOS], [0, 1, 0, 0], "stop")


def test_eos_by_the_peer_ends_the_answer_without_a_hand_off():
    trace = run(reference.entropy(0.5), scripted(SMALL, {2}), scripted([1, 1, EOS]))
    assert (trace.tokens, trace.writers, trace.finish) == ([1, 2, EOS], [0, 0, 1], "stop")
    assert trace.handoffs == [Handoff(2, 0, 1, 2, 2)]


def test_a_finishing_token_of_the_keep_family_hands_nothing_over():
    stopped = run(reference.every_n("block", 2), scripted([1, EOS]), scripted(LARGE))
    assert (stopped.tokens, stopped.handoffs, stopped.finish) == ([1, EOS], [], "stop")
    full = run(reference.every_n("block", 2), scripted(SMALL), scripted(LARGE), max_tokens=2)
    assert (full.tokens, full.handoffs, full.finish) == ([1, 2], [], "length")


def test_stop_ids_and_ignore_eos():
    small = scripted([1, EOS, 3, 4, 5, 6])
    assert run(reference.none(), small, stop_token_ids=(4,), ignore_eos=True).tokens == [1, EOS, 3, 4]
    assert run(reference.none(), small, stop_token_ids=(1,)).tokens == [1]
    assert run(reference.none(), small, ignore_eos=True).finish == "length"


def test_min_tokens_counts_over_all_models():
    def stubborn(token):
        def logits(ids):
            row = torch.zeros(V)
            row[EOS], row[token] = 9.0, 5.0
            return row

        return logits

    trace = run(reference.every_n("block", 2), stubborn(4), stubborn(5), min_tokens=3)
    assert (trace.tokens, trace.finish) == ([4, 4, 5, EOS], "stop")
    drawn = run(reference.none(), stubborn(4), min_tokens=3, temperature=1.0)
    assert EOS not in drawn.tokens[:3]


def test_two_rewriting_sides_are_stopped_after_max_stall():
    def contrary(row):
        return Decision(1 - row.model, keep=False)

    trace = run(contrary, scripted(SMALL), scripted(LARGE), max_tokens=2, max_stall=3)
    assert [handoff.destination for handoff in trace.handoffs] == [1, 0, 1, 0, 1, 0]
    assert [handoff.suffix for handoff in trace.handoffs] == [0] * 6  # output 0 reached the entry when it was committed
    assert (trace.tokens, trace.writers) == ([11, 2], [1, 0])


def test_sampling_is_keyed_by_position_not_by_writer():
    def flat(ids):
        return torch.zeros(V)

    alone = run(reference.none(), flat, temperature=1.0, eos=(), max_tokens=30)
    routed = run(reference.bernoulli(0.5), flat, flat, temperature=1.0, eos=(), max_tokens=30)
    other = run(reference.none(), flat, temperature=1.0, eos=(), max_tokens=30, choice=1)
    assert alone.tokens == routed.tokens
    assert len(set(routed.writers)) == 2
    assert alone.tokens != other.tokens
    assert max(Counter(alone.tokens).values()) < 15


RULES = [
    reference.none(),
    reference.entropy(1.3),
    reference.entropy(0.5, "margin", "confident"),
    reference.rstitch(0.5),
    reference.every_n("block", 3),
    reference.every_n("visit", 1),
    reference.bernoulli(0.4),
]


@pytest.mark.parametrize("rule", RULES)
@quick
@given(seed=st.integers(0, 2**64 - 1), temperature=st.sampled_from([0.0, 1.0]))
def test_invariants_of_a_trace(rule, seed, temperature):
    def model(scale):
        def logits(ids):
            key = sum((n + 1) * token for n, token in enumerate(ids)) + scale
            return torch.tensor([scale * math.sin(key * (v + 1)) for v in range(V)])

        return logits

    trace = run(rule, model(1), model(3), seed=seed, temperature=temperature, max_tokens=12)
    holder, known = 0, [0, 0]
    for handoff in trace.handoffs:
        assert handoff.source == holder != handoff.destination
        assert known[handoff.destination] <= handoff.loc - handoff.suffix <= handoff.loc
        assert handoff.index <= handoff.loc <= len(trace.tokens)
        known[handoff.destination] = handoff.loc
        holder = handoff.destination
    assert trace.writers[-1] == holder
    assert len(trace.tokens) == len(trace.writers) <= 12
    assert (trace.finish == "stop") == (trace.tokens[-1] == EOS)
