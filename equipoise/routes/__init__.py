"""Recorded routes: readers of all wire and file formats, the native store, and the doctor.

    registry.py    all formats, and the verbs: read_routes, stream_routes, stream_recordings, write_routes
    source.py      Source: files, folders and objects, opened without unpickling
    interpret.py   Recording, Format, LayerMap; recordings to routes: the only place that decides what rows mean
    store.py       the native store: appended to, mapped, checksummed
    wire.py        payloads and weight versions, shared by the readers of engine formats
    vllm.py, sglang.py                                         rollout engines
    verl.py, slime.py, prime_rl.py, nemo_rl.py, megatron.py    trainers
    doctor/        diagnose: named checks over recordings

docs/formats.md has one table of all formats; `Format` says how to add one. Importing this room imports neither torch
nor numba.
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
