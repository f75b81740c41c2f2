"""Wire and file formats to `Routes` and back, one reader and writer per form; and the doctor.

    registry.py    all forms, and the verbs: read_routes, stream_routes, stream_recordings, write_routes
    interpret.py   recordings to routes: layer map, unknown rows, last row, turns. The only place that decides
    layer_map.py   LayerMap: the wire's layer axis to global layer numbers
    recording.py   Recording: one sample as decoded, nothing judged
    source.py      Source: files, folders and objects, opened without unpickling
    format.py      Format: the face of a form, and how to add one
    store.py       the native store: chunked, mapped, checksummed
    vllm.py, sglang.py                     rollout engines
    verl.py, slime.py, prime_rl.py, nemo_rl.py, megatron.py    trainers
    doctor/        diagnose: named checks over recordings

All forms in one table: docs/formats.md. Importing this room imports neither torch nor numba.
"""

from equipoise.routes.doctor import diagnose
from equipoise.routes.registry import format_names, read_routes, stream_recordings, stream_routes, write_routes
from equipoise.routes.store import open_store

__all__ = [
    "read_routes",
    "stream_routes",
    "stream_recordings",
    "write_routes",
    "format_names",
    "open_store",
    "diagnose",
]
