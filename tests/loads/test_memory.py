"""The memory model: every visit against a ledger that allocates and frees tensor by tensor, and what a plan holds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import ModelShape
from equipoise.core.options import PlanOptions, balance_bytes, row_page_bytes
from equipoise.loads import WindowRows, plan_memory, window_memory
from equipoise.loads.memory import BACKWARD, FORWARD
from equipoise.planner.assemble import visits_of
from tests.layer.cases import random_plan, random_routing, static_plan

MODEL = ModelShape(name="tiny", experts=8, top_k=2, layer_numbers=(0, 1), hidden_layers=2, hidden=40, expert_width=12)


class Ledger:
    """What one rank has allocated, by name, and the most of a visit."""

    def __init__(self):
        self.held, self.most = {}, 0

    def take(self, **sizes):
        self.held |= sizes
        self.most = max(self.most, sum(self.held.values()))

    def drop(self, *names):
        for name in names:
            del self.held[name]

    def visit(self):
        """Begin a visit."""
        self.most = sum(self.held.values())


class RankTape:
    """One rank's visits, tensor by tensor."""

    def __init__(self, rows, rank, activations):
        self.rows, self.rank, self.is_kept = rows, rank, activations == "kept"
        self.ledger = Ledger()

    def sizes(self, m, layer):
        received, sent = (int(a[m, layer, self.rank]) for a in (self.rows.received_MLR, self.rows.sent_MLR))
        hidden, width = MODEL.hidden * 2, MODEL.expert_width * 2
        # int64 tables: per row sent its token, place and id; per row received its place and source; more where mapped.
        tables = 24 * sent + 16 * received + self.rows.is_mapped * (16 * sent + 8 * received)
        return received * hidden, received * width, sent * hidden, -(-sent // MODEL.top_k) * hidden, tables

    def forward(self, m, layer, *, is_saved):
        """What is saved has the visit in its name."""
        r, f, n, t, tables = self.sizes(m, layer)
        at, ledger, is_alone = f"{m}.{layer}", self.ledger, self.rows.received_MLR.shape[2] == 1
        ledger.take(x=t, **{f"tables {at}": tables})
        if self.rows.is_mapped:
            ledger.take(**{f"rows {at}": r})
        else:
            ledger.take(send=n)
            ledger.take(received=0 if is_alone else r)
            ledger.take(**{f"rows {at}": r})
            ledger.drop("send", "received")
        ledger.take(**{f"pre {at}": 2 * f}, act=f, out=r)
        ledger.drop("act", *([] if is_saved else [f"pre {at}"]))
        if self.rows.is_mapped:
            ledger.take(y=t)
            combined = "out"
        else:
            ledger.take(ordered=r)
            ledger.take(returned=0 if is_alone else n, y=t)
            ledger.drop("out")
            combined = "ordered" if is_alone else "returned"
            ledger.drop("returned" if is_alone else "ordered")
        if is_saved:
            ledger.held[f"combine {at}"] = ledger.held[combined]
        else:
            ledger.drop(f"rows {at}", f"tables {at}")
        ledger.drop(combined, "x", "y")

    def backward(self, m, layer):
        r, f, n, t, tables = self.sizes(m, layer)
        at, ledger = f"{m}.{layer}", self.ledger
        ledger.take(grad=t, **{f"tables {at}": tables})
        ledger.take(d_combine=r if self.rows.is_mapped else n)
        ledger.drop("d_combine", f"combine {at}")
        weights = (self.rows.home_slots + int(self.rows.replicas_MLR[m, layer, self.rank])) * MODEL.expert_bytes
        ledger.take(d_out=r, d_act=f, act=f, d_pre=2 * f, d_rows=r, weights=weights)
        ledger.drop("d_out", "d_act", "act", "d_pre", "d_rows", "weights", f"rows {at}", f"pre {at}", f"tables {at}")
        ledger.drop("grad")

    def run(self, visits_V3):
        """The most of each (phase, micro-step, layer)."""
        found, ledger = {}, self.ledger
        for m, phase, layer in visits_V3.tolist():
            ledger.visit()
            is_update = self.rows.stage == "update"
            if phase == FORWARD:
                self.forward(m, layer, is_saved=self.is_kept and is_update)
                if is_update and not self.is_kept:
                    ledger.held[f"input {m}.{layer}"] = self.sizes(m, layer)[3]
            else:
                if not self.is_kept:
                    # The input that was kept is the one that is recomputed from, beside the output's gradient.
                    own = ledger.held.pop(f"input {m}.{layer}")
                    ledger.take(d_y=own)
                    self.forward(m, layer, is_saved=True)
                self.backward(m, layer)
                if not self.is_kept:
                    ledger.held[f"input {m}.{layer}"] = own
                    ledger.drop("d_y", *([f"input {m}.{n}" for n in range(2)] if layer == 0 else []))
            found[phase, m, layer] = ledger.most
        assert not ledger.held
        return found


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    ranks=st.sampled_from([1, 2, 3]),
    way=st.sampled_from(["kept", "recomputed"]),
    stage=st.sampled_from(["update", "recompute"]),
    is_mapped=st.booleans(),
    pipeline=st.sampled_from([(0, 1), (0, 3), (1, 2)]),
)
def test_every_visit_is_what_a_ledger_of_its_tensors_holds(seed, ranks, way, stage, is_mapped, pipeline):
    rng = np.random.default_rng(seed)
    shape = (4, 2, ranks)
    sent = rng.integers(0, 60, shape)
    rows = WindowRows(
        stage=stage,
        # One rank receives what it sends.
        received_MLR=sent if ranks == 1 else rng.integers(0, 90, shape) * rng.integers(0, 2, shape),
        sent_MLR=sent,
        home_slots=3,
        replicas_MLR=rng.integers(0, 3, shape),
        is_mapped=is_mapped and ranks > 1,
    )
    order = PlanOptions(order="1f1b", pipeline_stage=pipeline[0], pipeline_stages=pipeline[1])
    visits_V3 = visits_of(stage, *shape[:2], order)
    memory = window_memory(rows, MODEL, activations=way, visits_V3=visits_V3)
    for rank in range(ranks):
        found = RankTape(rows, rank, way).run(visits_V3)
        phases = (FORWARD, BACKWARD) if stage == "update" else (FORWARD,)
        for m, layer in np.ndindex(shape[:2]):
            assert memory.total_MLR[m, layer, rank] == max(found[phase, m, layer] for phase in phases)
        m, layer, at = memory.place(rank)
        assert at == rank and memory.total_MLR[m, layer, rank] == memory.peak_R[rank] == max(found.values())
        assert sum(memory.parts((m, layer, rank)).values()) == memory.peak_R[rank]


def test_a_plan_holds_slots_pages_and_the_gradients_of_its_replicas():
    routing = random_routing(3, ranks=4)
    plan = random_plan(routing, 1, slots=2)
    assert len(plan.replica_table)
    memory, rows = plan_memory(plan), WindowRows.of(plan)
    assert memory.slots_bytes == balance_bytes(plan.model, cluster=plan.cluster, slots=2, stage="update")
    assert memory.page_bytes == row_page_bytes(plan) > 0 and rows.is_mapped
    held = [[[sum(r == rank for _, r in plan.replicas(m, n)) for rank in range(4)] for n in range(2)] for m in range(2)]
    assert rows.replicas_MLR.tolist() == held
    assert (memory.gradients_MLR.max(axis=(0, 1)) <= (2 + 2) * plan.model.expert_bytes).all()
    # Rows between nodes are exchanged; without a balancer nothing is held for one.
    assert plan_memory(random_plan(routing, 1, slots=2, nodes=2)).page_bytes == 0
    static = plan_memory(static_plan(routing))
    assert (static.slots_bytes, static.page_bytes) == (0, 0)


def test_a_hotter_rank_and_an_update_need_more_and_recomputing_needs_less():
    routing = random_routing(5, ranks=4, micro_steps=2, layers=4, tokens=200)
    plan = static_plan(routing)
    kept, recomputed = (plan_memory(plan, activations=way) for way in ("kept", "recomputed"))
    hottest = int(plan.rank_load_MLR.sum(axis=(0, 1)).argmax())
    assert kept.place()[2] == hottest == int(kept.peak_R.argmax())
    assert (recomputed.peak_R < kept.peak_R).all()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_place_is_asked_for_one_rank_or_for_the_fullest(rank):
    memory = plan_memory(static_plan(random_routing(5, ranks=4)))
    assert memory.place(rank)[2] == rank
    assert memory.total_MLR[memory.place()] == memory.total_MLR.max()
