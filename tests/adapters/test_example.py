"""The example of a loop of one's own runs as it says; `tests/test_examples.py` starts one as users do."""

import pytest

from tests.adapters.windowed import run_example


def check_lines(lines):
    """Three windows, in each of which replicas were pulled and every row was replayed."""
    assert [line.split(":")[0] for line in lines] == ["window 0", "window 1", "window 2"]
    for number, line in enumerate(lines):
        assert ", 0 replicas pulled" not in line
        rows = 512 * (number + 1)
        assert line.endswith(f"{rows} of {rows} rows replayed so far")


@pytest.mark.dist(2)
def test_the_loop_replays_every_row_and_moves_experts_in_every_window(pool):
    for lines in pool.run(run_example, 2, "transformers_loop.py"):
        check_lines(lines)
