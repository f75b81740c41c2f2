"""`plan.explain`: the figures of one entry, and what binds it."""

import numpy as np
import pytest

from equipoise.core import LoadMatrix
from tests.core.plans import plan_of, table_of

ENTRY = (0, 0)


def explained(load_E, *replicas, **changed):
    """Explain an entry in which expert e has `load_E[e]` rows and `replicas` (expert, rank, rows) stand."""
    load = np.zeros((2, 2, 4, 8), dtype=np.int64)
    load[0, 0, 0] = load_E
    table = table_of(*((0, 0, *replica) for replica in replicas))
    return plan_of(loads=LoadMatrix(load), replica_table=table, **changed).explain(*ENTRY)


# Homes are at their owners: rank r has experts 2r and 2r + 1; ranks 0 and 1 are node 0.
CASES = {
    "level to the row": ([5, 5, 5, 5, 5, 5, 5, 5], [], {}, "nothing", "not needed"),
    "level but for a remainder": ([5, 5, 5, 5, 5, 5, 5, 4], [], {}, "nothing", "not needed"),
    "no row at all": ([0] * 8, [], {}, "nothing", "not needed"),
    "level by a replica": ([9, 5, 5, 1, 5, 5, 5, 5], [(0, 1, 4)], {}, "nothing", "open"),
    "a node has more": ([9, 9, 9, 9, 1, 1, 1, 1], [], {}, "node", "not needed"),
    "a node has more, and is filled": ([14, 9, 9, 4, 1, 1, 1, 1], [(0, 1, 5)], {}, "node", "open"),
    "no slots": ([9, 5, 5, 1, 5, 5, 5, 5], [], {"slots": 0}, "slots", "no slots"),
    "slots are full": ([99, 1, 3, 1, 50, 0, 50, 0], [(1, 1, 1)], {}, "slots", "open"),
    "the gate is closed": ([9, 5, 5, 1, 5, 5, 5, 5], [], {}, "gate", "closed"),
    "nothing left to share": ([99, 1, 3, 1, 50, 0, 50, 0], [(1, 1, 1)], {"slots": 2}, "homes", "open"),
    "replicas may cross nodes": ([9, 9, 9, 9, 1, 1, 1, 1], [], {"cross_node": True}, "gate", "closed"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_binds_and_what_the_gate_said(name):
    load_E, replicas, changed, binds, gate = CASES[name]
    found = explained(load_E, *replicas, **changed)
    assert (found.binds, found.gate) == (binds, gate)


def test_figures_by_rank():
    home_LE = np.stack([np.array([1, 0, 0, 1, 2, 2, 3, 3]), np.arange(8) // 2])
    found = explained([14, 9, 9, 4, 1, 1, 1, 1], (0, 0, 2), home_LE=home_LE)
    assert found.static_R.tolist() == [23, 13, 2, 2]
    assert found.home_R.tolist() == [18, 18, 2, 2]
    assert found.plan_R.tolist() == [20, 16, 2, 2]
    assert found.bound == 18
    assert found.replicas == ((0, 1, 0, 2),)
    assert (found.ns, found.closed_ns) == (90, 100)


def test_the_table_says_it_all():
    text = str(explained([99, 1, 3, 1, 50, 0, 50, 0], (1, 1, 1)))
    lines = text.splitlines()
    assert lines[0].startswith("Micro-step 0, layer index 0 (layer 0) of qwen3-30b-a3b, update: 4 ranks on 2 nodes")
    assert "experts at their owners       100     51.0  1.9608" in text
    assert "planned                        99     51.0  1.9412" in text
    assert "bound of these homes           52     51.0  1.0196" in text
    assert "Replicas: 1; gate open." in text
    assert "What binds: slots (every rank that could take more rows has its replica slots full)." in text
    assert lines[-3].split() == ["1", "0", "4", "4", "5", *["expert", "1", "of", "rank", "0:", "1", "rows"]]
    assert len([line for line in lines if line[:5].strip().isdigit()]) == 4
    assert "estimated" not in text
    # Its tables fit into 50 columns but for what is said of replicas.
    assert max(len(line.partition("  expert")[0]) for line in [*lines[2:7], *lines[-5:]]) <= 50


def test_estimated_rows_are_mentioned():
    assert "12.5% of the window's rows are estimated" in str(explained([1] * 8, estimated_share=0.125))


def test_layer_numbers_are_the_models():
    loads = LoadMatrix(np.ones((2, 2, 4, 8), dtype=np.int64), layer_numbers_L=np.array([3, 11]))
    assert "layer index 1 (layer 11)" in str(plan_of(loads=loads, replica_table=table_of()).explain(0, 1))
