"""Outside inference engines: samples with routes from them, new weights and expert placements for them.

client.py      samples over HTTP: what is cut off is continued, what has no routes is explained
connection.py  one server: requests, retries, waiting while it is busy
dialects.py    vLLM's and SGLang's requests and answers, with the versions whose sources were read
weights.py     new weights in the engines' update protocols, over HTTP or through files
locations.py   expert placements as files of SGLang, vLLM-Ascend and Megatron, from plans and back

Recorded answers are read by `equipoise.routes`. A new engine is a new `Dialect` and a reader there.
"""

from equipoise.engines.client import EngineClient
from equipoise.engines.connection import Patience
from equipoise.engines.dialects import Sampling
from equipoise.engines.locations import Placement, read_placement, write_placement
from equipoise.engines.weights import WeightOptions, WeightSender

__all__ = [
    "EngineClient",
    "Patience",
    "Placement",
    "Sampling",
    "WeightOptions",
    "WeightSender",
    "read_placement",
    "write_placement",
]
