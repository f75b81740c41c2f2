"""The schedule alone, without threads: any order of visits and fills, and what buffers may hold then."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.plan import Visit
from equipoise.transfer.pulls import PullSchedule
from tests.transfer.windows import random_plan


def open_schedule(plan, rank):
    """A schedule whose layers all have their home weights."""
    schedule = PullSchedule(plan, rank=rank)
    for layer in range(plan.loads.num_layers):
        schedule.open_layers.add(layer)
    return schedule


class Machine:
    """Plays the puller: fills at random moments, and remembers what the buffers really contain."""

    def __init__(self, plan, rank, seed):
        self.plan, self.rank, self.rng = plan, rank, np.random.default_rng(seed)
        self.schedule = open_schedule(plan, rank=rank)
        self.content = [None] * (plan.itinerary.depth + 1)
        self.leased = None

    def turn(self):
        """Begin or end a fill, as the thread would at any moment."""
        filling = self.schedule.filling
        if filling is not None:
            self.content[filling.buffer] = filling.entry
            self.schedule.end()
            return True
        fill = self.schedule.begin_next()
        if fill is None:
            return False
        assert fill.buffer != self.leased or self.is_urgent(fill), "the buffer in use would be overwritten"
        self.content[fill.buffer] = "half"
        return True

    def is_urgent(self, fill):
        return fill.entry == self.wanted

    def visit(self, visit):
        """Announce a visit, let the thread run until it is served, and return whether it was on demand."""
        self.wanted = (visit.micro_step, visit.layer)
        fill, is_on_demand = self.schedule.announce(visit)
        self.leased = fill.buffer if fill.needs else None
        replicas = self.plan.replicas(visit.micro_step, visit.layer)
        assert [need.expert for need in fill.needs] == [r.expert for r in replicas if r.rank == self.rank]
        while fill.needs and not self.schedule.holds(fill):
            assert self.turn(), "a visit is never served"
        assert not fill.needs or self.content[fill.buffer] == self.wanted, "served from a wrong buffer"
        for _ in range(self.rng.integers(0, 4)):
            self.turn()
            assert not fill.needs or self.content[fill.buffer] == self.wanted, "overwritten while in use"
        return is_on_demand


plans = st.builds(
    random_plan,
    st.sampled_from([(0, 0), (0, 0, 0), (0, 1, 0, 1)]),
    seed=st.integers(0, 999),
    layers=st.integers(1, 4),
    micro_steps=st.integers(1, 3),
    slots=st.integers(0, 2),
    depth=st.integers(1, 3),
    stage=st.sampled_from(["update", "recompute"]),
    order=st.sampled_from(["plain", "1f1b"]),
)


@settings(max_examples=60, deadline=None)
@given(plan=plans, seed=st.integers(0, 999))
def test_visits_in_order_are_never_on_demand(plan, seed):
    machine = Machine(plan, 1, seed)
    rng = np.random.default_rng(seed)
    for at in range(len(plan.itinerary)):
        for _ in range(rng.integers(1, 3)):
            assert not machine.visit(plan.itinerary.visits()[at]), f"visit {at} was on demand"


@settings(max_examples=60, deadline=None)
@given(plan=plans, seed=st.integers(0, 999), data=st.data())
def test_any_order_is_served_from_the_right_buffer(plan, seed, data):
    machine = Machine(plan, 0, seed)
    micro_steps, layers = plan.loads.num_micro_steps, plan.loads.num_layers
    one = st.builds(
        Visit,
        st.integers(0, micro_steps - 1),
        st.sampled_from(["forward", "backward"]),
        st.integers(0, layers - 1),
    )
    for visit in data.draw(st.lists(one, max_size=12)):
        machine.visit(visit)


@settings(max_examples=60, deadline=None)
@given(plan=plans, seed=st.integers(0, 999))
def test_nothing_is_filled_before_its_time(plan, seed):
    itinerary, schedule = plan.itinerary, open_schedule(plan, 0)
    for at in range(len(itinerary)):
        filled = set()
        while (fill := schedule.begin_next()) is not None:
            schedule.end()
            filled.add(fill.entry)
        first = max(at - 1, 0)
        due = [
            itinerary.visits()[v]
            for v in range(at, min(at + itinerary.depth, len(itinerary)))
            if itinerary.ready_from_V[v] <= first
        ]
        assert filled <= {(visit.micro_step, visit.layer) for visit in due}
        fill, _ = schedule.announce(itinerary.visits()[at])
        if fill.needs and not schedule.holds(fill):
            assert schedule.begin_next() == fill
            schedule.end()


def test_weights_that_may_have_changed_are_pulled_again():
    plan = random_plan((0, 0), seed=2, slots=1, fewest=1, layers=1, micro_steps=1)
    schedule = open_schedule(plan, 0)
    assert plan.itinerary.resident_V[1], "the backward visit should find its forward visit's replicas"
    schedule.begin_next()
    schedule.end()
    assert schedule.holds(schedule.announce(plan.itinerary.visits()[0])[0])
    schedule.forget()
    again, _ = schedule.announce(plan.itinerary.visits()[1])
    assert again.needs and not schedule.holds(again) and schedule.begin_next() == again


def test_a_fill_that_was_given_up_holds_nothing_and_is_filled_again():
    plan = random_plan((0, 0), seed=5, slots=1, fewest=1)
    schedule = open_schedule(plan, 0)
    schedule.announce(plan.itinerary.visits()[0])
    fill = schedule.begin_next()
    schedule.end(is_filled=False)
    assert not schedule.holds(fill) and schedule.filling is None
    schedule.announce(plan.itinerary.visits()[0])
    assert schedule.begin_next() == fill


@settings(max_examples=60, deadline=None)
@given(plan=plans, seed=st.integers(0, 999))
def test_a_closed_layer_is_not_filled_and_what_was_filled_of_it_is_forgotten(plan, seed):
    schedule, rng, layers = PullSchedule(plan, rank=0), np.random.default_rng(seed), plan.loads.num_layers
    assert schedule.begin_next() is None, "at first all layers are closed"
    for at in range(len(plan.itinerary)):
        changed = int(rng.integers(layers))
        (schedule.open_layers.add if rng.random() < 0.6 else schedule.close)(changed)
        while (fill := schedule.begin_next()) is not None:
            assert fill.entry[1] in schedule.open_layers
            schedule.end()
        assert all(held is None or held[1] in schedule.open_layers for held in schedule._holds)
        visit = plan.itinerary.visits()[at]
        if visit.layer in schedule.open_layers:
            schedule.announce(visit)
