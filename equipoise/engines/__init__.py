"""Outside inference engines: asking them for samples with routes.

client.py      samples over HTTP: what is cut off is continued, what has no routes is explained
connection.py  one server: requests, retries, waiting while it is busy
dialects.py    vLLM's and SGLang's requests and answers, with the versions whose sources were read

Recorded answers are read by `equipoise.routes`. A new engine is a new `Dialect` and a reader there.
"""

from equipoise.engines.client import EngineClient
from equipoise.engines.connection import Patience
from equipoise.engines.dialects import Sampling

__all__ = ["EngineClient", "Patience", "Sampling"]
