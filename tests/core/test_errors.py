"""The errors users meet: one small tree, as its module draws it."""

import inspect

import pytest

from equipoise.core import errors

ALL = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


@pytest.mark.parametrize("error", ALL, ids=lambda e: e.__name__)
def test_every_error_is_ours_and_stands_in_the_drawn_tree(error):
    assert issubclass(error, errors.EquipoiseError)
    assert error.__name__ in errors.__doc__


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.RoutesError, ValueError),
        (errors.ScheduleError, ValueError),
        (errors.LoadsError, ValueError),
        (errors.TopologyError, ValueError),
        (errors.InfeasiblePlanError, ValueError),
        (errors.TransferError, RuntimeError),
        (errors.AdapterError, RuntimeError),
        (errors.TrainingError, ValueError),
    ],
    ids=lambda e: e.__name__,
)
def test_bad_input_is_a_value_error_and_bad_luck_a_runtime_error(error, builtin):
    with pytest.raises(builtin, match="layer 12"):
        raise error("layer 12 is wrong")
