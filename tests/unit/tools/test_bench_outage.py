"""The figures of `kvtier bench outage`; the run itself needs the real engine."""

from kvtier.tools.bench_outage import OutageBench, figures, rows

FROZEN = {"ttft_ratio": 1.02, "first_late_s": 1.01}
KILLED = {"ttft_ratio": 1.05, "first_late_s": 0.2}


def test_the_headlines_are_the_worst():
    """Of both ways to stop a server the worse counts, beside what a request may wait."""
    options = OutageBench(load_deadline_s=1.5, lookup_deadline_s=0.25)
    result = figures({"frozen": FROZEN, "killed": KILLED}, options)
    assert (result["ttft_ratio"], result["first_late_s"]) == (1.05, 1.01)
    assert result["deadline_s"] == 1.75
    assert [row["Redis is"] for row in rows(result)] == ["frozen", "killed"]
