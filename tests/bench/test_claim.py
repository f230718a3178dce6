"""A claim's verdict is its figure against its target, on the side that is better."""

import pytest
from bench.claim import Better, Claim, Verdict


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        (Claim("over", 5.1, 5.0), Verdict.MET),
        (Claim("on the target", 5.0, 5.0), Verdict.MET),
        (Claim("under", 4.9, 5.0), Verdict.MISSED),
        (Claim("small enough", 14.0, 15.0, Better.LESS, "KB"), Verdict.MET),
        (Claim("too big", 16.0, 15.0, Better.LESS, "KB"), Verdict.MISSED),
        (Claim("no peer", None, 5.0, detail="apt-get install it"), Verdict.NOT_RUN),
        (Claim("only shown", 4.9, None), Verdict.NO_TARGET),
    ],
    ids=lambda value: value.name if isinstance(value, Claim) else value.value,
)
def test_verdict(claim: Claim, verdict: Verdict) -> None:
    assert claim.verdict is verdict
