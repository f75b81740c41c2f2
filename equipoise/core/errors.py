"""The errors users meet, in one small tree.

    EquipoiseError
    |-- RoutesError          a recording is broken, ambiguous, or does not fit the model
    |-- ScheduleError        a schedule names a sample, token, rank or micro-step that does not exist
    |-- LoadsError           a load array has the wrong shape, sign or size
    |-- TopologyError        a cluster or a model shape does not make sense, or the two do not fit
    |-- InfeasiblePlanError  a plan breaks a promise, cannot be made, or its file is damaged
    |-- TransferError        an expert could not be moved in time
    |-- AdapterError         a framework is not what its adapter was checked with
    `-- TrainingError        a setting, a dataset or a checkpoint of a training run is wrong

Every message names the thing, the value, the limit and the fix.
"""


class EquipoiseError(Exception):
    """Base of every error this package raises on purpose."""


class RoutesError(EquipoiseError, ValueError):
    """A recording of routes is broken, ambiguous, or does not fit the model."""


class ScheduleError(EquipoiseError, ValueError):
    """A schedule names something that does not exist, or leaves something out."""


class LoadsError(EquipoiseError, ValueError):
    """A load array has the wrong shape, sign or size."""


class TopologyError(EquipoiseError, ValueError):
    """A cluster or a model shape does not make sense, or the two do not fit."""


class InfeasiblePlanError(EquipoiseError, ValueError):
    """A plan breaks one of its promises, cannot be made, or its file is damaged."""


class TransferError(EquipoiseError, RuntimeError):
    """An expert could not be moved in time."""


class AdapterError(EquipoiseError, RuntimeError):
    """A framework is not what its adapter was checked with."""


class TrainingError(EquipoiseError, ValueError):
    """A setting, a dataset or a checkpoint of a training run is wrong."""
