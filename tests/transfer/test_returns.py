"""Mailboxes that are ordered by the steps of mapped rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.core import TransferError
from equipoise.transfer.returns import BoxTurns


class Rows:
    """Counts steps, as mapped rows do."""

    def __init__(self):
        self.number = 0

    def end(self, *, layer):
        self.number += 1


@given(st.lists(st.sampled_from(["fill", "read", "step"]), max_size=40), st.integers(1, 3))
def test_a_step_lies_between_those_who_fill_a_box_and_those_who_read_it(calls, turns):
    rows, filled, used_at = Rows(), [], {}
    boxes = BoxTurns(rows, [-1] * turns)
    for number, call in enumerate(calls):
        if call == "step":
            rows.end(layer=0)
        elif call == "read" and filled:
            turn = boxes.read(*(entry := filled.pop(0)))
            assert used_at[turn] == (entry, used_at[turn][1]) and used_at[turn][1] < rows.number
            used_at[turn] = (None, rows.number)
        elif call == "fill" and len(filled) < turns:
            turn = boxes.fill(number, 0)
            assert turn not in used_at or (used_at[turn][0] is None and used_at[turn][1] < rows.number)
            used_at[turn] = ((number, 0), rows.number)
            filled.append((number, 0))
    assert list(boxes.filled) == filled


def test_steps_are_added_only_where_none_came_in_between():
    rows = Rows()
    boxes = BoxTurns(rows, [-1])
    for micro_step in range(3):
        boxes.fill(micro_step, 0)
        rows.end(layer=0)
        boxes.read(micro_step, 0)
        rows.end(layer=0)
    assert rows.number == 6


def test_a_box_is_not_filled_while_its_gradient_waits():
    boxes = BoxTurns(Rows(), [-1, -1])
    boxes.fill(0, 1)
    boxes.fill(0, 0)
    with pytest.raises(TransferError, match="micro-step 1, layer index 1: gradients of replicas of 2 layers"):
        boxes.fill(1, 1)
