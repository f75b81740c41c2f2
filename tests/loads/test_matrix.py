"""Loads of a schedule: equal to a token-by-token count, from routes and from histograms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes, Schedule, ScheduleError
from equipoise.loads.count import count_routes
from equipoise.loads.filling import spread_rows
from equipoise.loads.matrix import count_loads, count_step
from equipoise.loads.packing import TokenPolicy, schedule_samples, slice_context, slice_sequence, step_schedules

MODEL = ModelShape(name="tiny", experts=6, top_k=2, layer_numbers=(1, 2, 4), hidden_layers=5, hidden=8, expert_width=4)


def make_routes(lengths: list[int], *, seed: int = 0, last_row: bool = False, holes: bool = False) -> Routes:
    """Random routes with distinct ids; T - 1 rows unless `last_row`, some rows masked with `holes`."""
    rng = np.random.default_rng(seed)
    samples = []
    for b, tokens in enumerate(lengths):
        rows = tokens if last_row else max(tokens - 1, 0)
        ids = rng.random((rows, MODEL.layers, MODEL.experts)).argsort(axis=2)[:, :, : MODEL.top_k]
        known = rng.random((rows, MODEL.layers)) > 0.3 if holes else None
        samples.append(SampleRoutes(name=f"s{b}", ids_TLK=ids, num_tokens=tokens, known_TL=known))
    return Routes.of(samples, model=MODEL)


def count_by_token(routes: Routes, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Rows of real tokens and unknown tokens, one token at a time."""
    shape = (schedule.micro_steps, MODEL.layers, schedule.ranks)
    load, unknown = np.zeros((*shape, MODEL.experts), dtype=int), np.zeros(shape, dtype=int)
    for b, start, stop, m, r in schedule.pieces.tolist():
        sample = routes.samples[b]
        for t in range(start, stop):
            for layer in range(MODEL.layers):
                known = t < sample.num_rows and (sample.known_TL is None or sample.known_TL[t, layer])
                if not known:
                    unknown[m, layer, r] += 1
                    continue
                for e in sample.ids_TLK[t, layer]:
                    load[m, layer, r, e] += 1
    return load, unknown


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 2),
    st.booleans(),
)
def test_fast_equals_a_token_by_token_count(lengths, ranks, cp, sp, holes):
    routes = make_routes(lengths, seed=sum(lengths), holes=holes)
    policy = TokenPolicy(last_token="unknown", padding="unknown", pad_to_multiple=3)
    schedule = schedule_samples(np.array(lengths), ranks=ranks, samples_per_micro_step=2, policy=policy)
    schedule = slice_sequence(slice_context(schedule, cp), sp)
    loads = count_loads(routes, schedule)
    load, unknown = count_by_token(routes, schedule)
    assert loads.load_MLRE.tolist() == load.tolist()
    forwarded = (schedule.num_tokens_MR + schedule.padding_MR)[:, None, :]
    known = schedule.num_tokens_MR[:, None, :] - unknown
    wanted = np.where(forwarded > 0, known / np.maximum(forwarded, 1), 1.0)
    np.testing.assert_allclose(loads.coverage_MLR, wanted, atol=1e-12)


@pytest.mark.parametrize("last_row", [False, True], ids=["T-1 rows", "T rows"])
@pytest.mark.parametrize("last_token", ["spread", "unknown"])
def test_routes_and_histograms_give_the_same_loads_for_whole_samples(last_row, last_token):
    lengths = [5, 1, 9, 4]
    routes = make_routes(lengths, last_row=last_row, holes=False)
    policy = TokenPolicy(last_token=last_token, pad_to_multiple=4)
    schedule = schedule_samples(np.array(lengths), ranks=2, samples_per_micro_step=1, policy=policy)
    assert count_loads(count_routes(routes), schedule) == count_loads(routes, schedule)


def test_histograms_know_that_a_dropped_last_token_had_no_route():
    lengths = [5, 9]
    routes = make_routes(lengths)
    schedule = schedule_samples(np.array(lengths), ranks=2, samples_per_micro_step=1)
    loads = count_loads(count_routes(routes), schedule)
    assert loads == count_loads(routes, schedule)
    assert (loads.coverage_MLR == 1).all()


@pytest.mark.parametrize(
    ("piece", "last_row"), [((0, 0, 3, 0, 0), False), ((0, 1, 6, 0, 0), False), ((0, 0, 5, 0, 0), True)]
)
def test_histograms_refuse_a_part_of_a_sample(piece, last_row):
    counts = count_routes(make_routes([6], last_row=last_row))
    with pytest.raises(ScheduleError, match=r"'s0'.*only its histogram was kept.*count from the routes"):
        count_loads(counts, Schedule.of([piece], ranks=1, last_token="unknown"))


def test_a_last_token_without_a_route_is_an_error_under_drop():
    routes = make_routes([6])
    with pytest.raises(ScheduleError, match=r"'s0'.*last token, which has no route.*forward 5 tokens"):
        count_loads(routes, Schedule.of([(0, 0, 6, 0, 0)], ranks=1))


def test_a_recorded_last_token_counts_like_any_other():
    routes = make_routes([6], last_row=True)
    loads = count_loads(routes, Schedule.of([(0, 0, 6, 0, 0)], ranks=1))
    assert loads.load_MLRE.sum() == 6 * MODEL.top_k * MODEL.layers


def test_a_spread_last_token_goes_to_the_least_loaded_experts_and_completes_coverage():
    routes = make_routes([6])
    drop = count_loads(routes, Schedule.of([(0, 0, 5, 0, 0)], ranks=1))
    spread = count_loads(routes, Schedule.of([(0, 0, 6, 0, 0)], ranks=1, last_token="spread"))
    added = (spread.load_MLRE - drop.load_MLRE)[0, :, 0]
    assert added.tolist() == spread_rows(drop.load_MLRE[0, :, 0], np.array([1]), MODEL.top_k)[:, 0].tolist()
    assert (spread.coverage_MLR == 1).all()
    assert spread.padding_MLRE is None
    assert drop.filled_MLR is None and (spread.filled_MLR == MODEL.top_k).all()


def test_an_unknown_last_token_lowers_coverage():
    loads = count_loads(make_routes([6]), Schedule.of([(0, 0, 6, 0, 0)], ranks=1, last_token="unknown"))
    np.testing.assert_allclose(loads.coverage_MLR, 5 / 6)


@pytest.mark.parametrize("policy", ["first", "arange"])
def test_padding_rows_are_load_and_stand_beside_it(policy):
    routes = make_routes([6])
    plain = count_loads(routes, Schedule.of([(0, 0, 5, 0, 0)], ranks=1))
    schedule = Schedule.of([(0, 0, 5, 0, 0)], ranks=1, padding_MR=np.array([[3]]), padding_policy=policy)
    loads = count_loads(routes, schedule)
    if policy == "first":
        wanted = [[3, 3, 0, 0, 0, 0]] * MODEL.layers
    else:
        # Layers 1, 2 and 4 of five; token p starts at ((5 p + layer) x 2) mod 6.
        running = (np.arange(3 * 5 * 2).reshape(3, 5, 2) % 6)[:, [1, 2, 4]]
        wanted = [np.bincount(running[:, i].ravel(), minlength=6).tolist() for i in range(3)]
    assert loads.padding_MLRE[0, :, 0].tolist() == wanted
    assert (loads.load_MLRE - loads.padding_MLRE == plain.load_MLRE).all()


def test_unknown_padding_is_not_counted_but_lowers_coverage():
    schedule = Schedule.of([(0, 0, 5, 0, 0)], ranks=1, padding_MR=np.array([[3]]), padding_policy="unknown")
    loads = count_loads(make_routes([6]), schedule)
    assert loads.padding_MLRE is None
    np.testing.assert_allclose(loads.coverage_MLR, 5 / 8)


def test_spread_padding_levels_each_ep_group_by_itself():
    routes = make_routes([9, 9, 9, 9], seed=3)
    pieces = [(b, 0, 8, 0, b) for b in range(4)]
    schedule = Schedule.of(pieces, ranks=4, padding_MR=np.array([[2, 2, 2, 2]]))
    loads = count_loads(routes, schedule, ep=2)
    real = loads.load_MLRE - loads.padding_MLRE
    for cut in (slice(0, 2), slice(2, 4)):
        wanted = spread_rows(real[0, :, cut].sum(axis=1), np.array([2, 2]), MODEL.top_k)
        assert loads.padding_MLRE[0, :, cut].tolist() == wanted.tolist()
    with pytest.raises(ScheduleError, match="4 ranks do not divide into EP groups of 3"):
        count_loads(routes, schedule, ep=3)


def test_recorded_padding_rows_count_as_padding():
    ids = np.array([[[0, 1]], [[2, 3]], [[4, 5]]]).repeat(3, axis=1)
    sample = SampleRoutes(name="p", ids_TLK=ids, num_tokens=2, padding_T=np.array([True, False, False]))
    loads = count_loads(Routes.of([sample], model=MODEL), Schedule.of([(0, 0, 2, 0, 0)], ranks=1))
    assert loads.load_MLRE[0, 0, 0].tolist() == [1, 1, 1, 1, 1, 1]
    assert loads.padding_MLRE[0, 0, 0].tolist() == [1, 1, 0, 0, 0, 0]


def test_slicing_never_changes_the_rows_of_real_tokens():
    lengths = [7, 12, 5]
    routes = make_routes(lengths)
    schedule = schedule_samples(np.array(lengths), ranks=1, samples_per_micro_step=3)
    sliced = slice_sequence(slice_context(schedule, 2), 3)
    before, after = count_loads(routes, schedule), count_loads(routes, sliced).without_padding()
    assert (after.total_MLE() == before.total_MLE()).all()
    assert after.num_ranks == 6


class CountedReads(list):
    """A list of samples that notes which were asked for."""

    def __init__(self, samples):
        super().__init__(samples)
        self.reads = []

    def __getitem__(self, index):
        self.reads.append(index)
        return super().__getitem__(index)


def test_a_step_reads_every_sample_once_and_equals_its_windows():
    lengths = [5, 8, 3, 9, 6]
    routes = make_routes(lengths)
    windows = step_schedules(np.array(lengths), ranks=2, mini_batches=2, samples_per_micro_step=1)
    samples = CountedReads(routes.samples)
    seen = []
    step = count_step(
        Routes(model=MODEL, samples=samples, layer_numbers=routes.layer_numbers),
        windows,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert samples.reads == [0, 1, 2, 3, 4]
    assert seen[-1] == (5, 5)
    assert step == tuple(count_loads(routes, window) for window in windows)
    assert [m.stage for m in step] == ["recompute", "update", "update"]
    assert step[0].layer_numbers_L.tolist() == [1, 2, 4]
    assert step[0].load_MLRE.sum() == step[1].load_MLRE.sum() + step[2].load_MLRE.sum()


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        pytest.param((3, 0, 2, 0, 0), "does not exist; there are samples 0..1", id="sample"),
        pytest.param((1, 0, 9, 0, 0), "token 8 of sample 's1', which has tokens 0..3", id="token"),
    ],
)
@pytest.mark.parametrize("counted", [False, True], ids=["routes", "histograms"])
def test_a_schedule_that_names_nothing_is_refused(piece, message, counted):
    routes = make_routes([5, 4])
    with pytest.raises(ScheduleError, match=message):
        count_loads(count_routes(routes) if counted else routes, Schedule.of([piece], ranks=1))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (
            ("x", Schedule.of([(0, 0, 2, 0, 0)], ranks=1)),
            RoutesError,
            "routes is a str; it must be a Routes or a Route",
        ),
        ((make_routes([5]), "y"), ScheduleError, "schedule is a str; it must be a Schedule"),
        ((make_routes([5]), ()), ScheduleError, "schedule is a tuple; it must be a Schedule"),
    ],
    ids=["routes", "schedule", "step"],
)
def test_what_is_of_another_kind_is_refused_by_name(given, error, words):
    with pytest.raises(error, match=words):
        count_loads(*given)


def test_an_ep_that_is_no_number_is_refused():
    with pytest.raises(ScheduleError, match="ep must be a whole number, got 'a' of type str"):
        count_loads(make_routes([5]), Schedule.of([(0, 0, 2, 0, 0)], ranks=1), ep="a")
