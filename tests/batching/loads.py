"""Deployments that the tests look at, and reference values for them."""

from __future__ import annotations

from dataclasses import dataclass

from trouterd.batching.network import Network, StepTime, keep_commit

_PAIRS = {
    "A": (StepTime.affine(1, 0.01), StepTime.affine(8, 0.05)),
    "H": (StepTime.affine(0.6, 0.01), StepTime.affine(16, 0.1)),
}
_MIDDLES = {"A": StepTime.affine(3, 0.03), "H": StepTime.affine(5, 0.05)}
_MOVES = {"R2R 10%": (1 / 9, 1.0), "R2R 5%": (1 / 19, 1.0), "Co-LLM 20%": (0.25, 1.0), "R-Stitch": (0.15, 0.15)}
"""Probabilities there and back; named by the large model's share of all steps."""


def paper_pair() -> Network:
    """R2R on a 0.6B and a 32B model, the worked case of arXiv 2610.12242, appendix D."""
    return Network.pair((StepTime.affine(6.0e-3), StepTime.affine(27.9e-3)), 0.35)


def load(name: str, times: str, contention: float = 0.0) -> Network:
    """One of REFERENCE; seconds are the fast model's step of set A."""
    fast, slow = _PAIRS[times]
    if name != "ME":
        return Network.pair((fast, slow), *_MOVES[name], contention=(contention,) * 2)
    row = (0.5, 0.3, 0.2)
    return Network((fast, _MIDDLES[times], slow), (row,) * 3, keep_commit(3), (contention,) * 3)


@dataclass(frozen=True)
class Reference:
    """Steps/s that another implementation of the reduction and another simulator (60,000 steps, one seed) found."""

    name: str
    times: str
    contention: float
    concurrency: int
    thresholds: tuple[int, ...]
    model: float
    simulated: float
    simulated_eager: float

    @property
    def network(self) -> Network:
        """What it is about."""
        return load(self.name, self.times, self.contention)


_TABLE = """\
R2R 10%    | A | 0 |  4 | 1,2   |  1.911 |  1.927 |  1.870
R2R 10%    | A | 0 |  8 | 1,2   |  3.673 |  3.654 |  3.624
R2R 10%    | A | 0 | 16 | 1,1   |  7.107 |  7.031 |  7.031
R2R 10%    | A | 0 | 32 | 1,1   | 13.557 | 13.446 | 13.446
R2R 10%    | A | 1 |  4 | 2,3   |  1.686 |  1.694 |  1.018
R2R 10%    | A | 1 |  8 | 4,5   |  3.090 |  3.109 |  1.835
R2R 10%    | A | 1 | 16 | 8,9   |  5.693 |  5.717 |  3.519
R2R 10%    | A | 1 | 32 | 8,25  | 10.366 | 10.459 |  6.723
R2R 10%    | H | 0 |  4 | 1,3   |  1.444 |  1.456 |  1.232
R2R 10%    | H | 0 |  8 | 1,6   |  2.744 |  2.775 |  2.408
R2R 10%    | H | 0 | 16 | 1,12  |  5.172 |  5.212 |  4.722
R2R 10%    | H | 0 | 32 | 1,24  |  9.468 |  9.481 |  8.986
R2R 10%    | H | 1 |  4 | 1,4   |  1.445 |  1.463 |  0.839
R2R 10%    | H | 1 |  8 | 2,7   |  2.674 |  2.687 |  1.479
R2R 10%    | H | 1 | 16 | 4,13  |  4.935 |  4.973 |  2.642
R2R 10%    | H | 1 | 32 | 8,25  |  8.883 |  8.975 |  4.741
R2R 5%     | A | 0 |  4 | 1,1   |  2.604 |  2.597 |  2.597
R2R 5%     | A | 0 |  8 | 1,1   |  4.982 |  4.897 |  4.897
R2R 5%     | A | 0 | 16 | 1,1   |  9.574 |  9.421 |  9.421
R2R 5%     | A | 0 | 32 | 1,1   | 17.927 | 17.639 | 17.639
R2R 5%     | A | 1 |  4 | 2,3   |  2.069 |  2.053 |  1.442
R2R 5%     | A | 1 |  8 | 4,5   |  3.896 |  3.882 |  2.490
R2R 5%     | A | 1 | 16 | 8,9   |  7.268 |  7.257 |  4.716
R2R 5%     | A | 1 | 32 | 16,17 | 13.197 | 13.193 |  8.820
Co-LLM 20% | A | 0 |  4 | 1,3   |  1.321 |  1.316 |  1.162
Co-LLM 20% | A | 0 |  8 | 1,5   |  2.488 |  2.452 |  2.291
Co-LLM 20% | A | 0 | 16 | 1,10  |  4.750 |  4.659 |  4.467
Co-LLM 20% | A | 0 | 32 | 1,17  |  8.817 |  8.578 |  8.568
Co-LLM 20% | A | 1 |  4 | 1,4   |  1.242 |  1.242 |  0.723
Co-LLM 20% | A | 1 |  8 | 2,7   |  2.359 |  2.361 |  1.280
Co-LLM 20% | A | 1 | 16 | 4,13  |  4.439 |  4.428 |  2.331
Co-LLM 20% | A | 1 | 32 | 8,25  |  8.136 |  8.158 |  4.314
Co-LLM 20% | H | 0 |  4 | 1,4   |  0.943 |  0.944 |  0.615
Co-LLM 20% | H | 0 |  8 | 1,7   |  1.729 |  1.735 |  1.221
Co-LLM 20% | H | 0 | 16 | 1,14  |  3.254 |  3.272 |  2.374
Co-LLM 20% | H | 0 | 32 | 1,29  |  5.932 |  5.937 |  4.557
Co-LLM 20% | H | 1 |  4 | 1,4   |  0.943 |  0.944 |  0.509
Co-LLM 20% | H | 1 |  8 | 1,8   |  1.732 |  1.728 |  0.951
Co-LLM 20% | H | 1 | 16 | 2,15  |  3.235 |  3.249 |  1.731
Co-LLM 20% | H | 1 | 32 | 4,29  |  5.865 |  5.857 |  3.130
R-Stitch   | A | 0 |  4 | 1,1   |  0.811 |  0.810 |  0.810
R-Stitch   | A | 0 |  8 | 1,1   |  1.591 |  1.591 |  1.591
R-Stitch   | A | 0 | 16 | 1,1   |  3.066 |  3.096 |  3.096
R-Stitch   | A | 0 | 32 | 1,1   |  5.718 |  5.776 |  5.776
R-Stitch   | A | 1 |  4 | 1,4   |  0.679 |  0.679 |  0.602
R-Stitch   | A | 1 |  8 | 2,7   |  1.234 |  1.245 |  1.023
R-Stitch   | A | 1 | 16 | 4,13  |  2.287 |  2.302 |  1.745
R-Stitch   | A | 1 | 32 | 8,25  |  4.197 |  4.230 |  2.996
R-Stitch   | H | 0 |  4 | 1,3   |  0.430 |  0.431 |  0.426
R-Stitch   | H | 0 |  8 | 1,1   |  0.832 |  0.841 |  0.841
R-Stitch   | H | 0 | 16 | 1,1   |  1.598 |  1.619 |  1.619
R-Stitch   | H | 0 | 32 | 1,1   |  2.960 |  2.978 |  2.978
R-Stitch   | H | 1 |  4 | 1,4   |  0.431 |  0.431 |  0.381
R-Stitch   | H | 1 |  8 | 1,8   |  0.778 |  0.787 |  0.698
R-Stitch   | H | 1 | 16 | 2,15  |  1.441 |  1.453 |  1.233
R-Stitch   | H | 1 | 32 | 4,29  |  2.626 |  2.637 |  2.090
ME         | A | 0 |  4 | 1,1,1 |  1.037 |  1.033 |  1.033
ME         | A | 0 |  8 | 1,1,1 |  1.982 |  1.964 |  1.964
ME         | A | 0 | 16 | 1,1,1 |  3.847 |  3.806 |  3.806
ME         | A | 0 | 32 | 1,1,1 |  7.401 |  7.300 |  7.300
ME         | H | 0 |  4 | 1,1,2 |  0.603 |  0.599 |  0.584
ME         | H | 0 |  8 | 1,1,3 |  1.156 |  1.131 |  1.115
ME         | H | 0 | 16 | 1,1,1 |  2.220 |  2.154 |  2.154
ME         | H | 0 | 32 | 1,1,1 |  4.256 |  4.138 |  4.138
"""


def _parse(line: str) -> Reference:
    name, times, contention, concurrency, thresholds, *rates = (cell.strip() for cell in line.split("|"))
    return Reference(
        name, times, float(contention), int(concurrency), tuple(map(int, thresholds.split(","))), *map(float, rates)
    )


REFERENCE = [_parse(line) for line in _TABLE.splitlines()]
