"""New weights for an outside engine, sent in its own update protocol, in buckets of bounded size.

Tensors have the names of the model's Hugging Face checkpoint, one expert each, which both engines' loaders read.
Nothing here needs CUDA or the engine's package; the servers' own fast paths (NCCL groups, CUDA IPC) do.

vLLM 0.22 to 0.32 (sources of 0.22, 0.27.1 and 0.32 read), started with VLLM_SERVER_DEV_MODE=1. Over HTTP it takes no
tensors (/update_weights names them, they go by NCCL or CUDA IPC), so it loads files:
    GET  /is_paused                            absent: not in dev mode
    POST /pause                                requests in flight are aborted, caches cleared
    POST /collective_rpc {method, kwargs}      method reload_weights, kwargs {weights_path}
    POST /update_weight_version {new_version}  0.27 on
    GET  /weight_info {weight_version}         0.27 on
    POST /resume

SGLang 0.5.12 to 0.5.23 (source of 0.5.23 read), tensors over HTTP, or files:
    GET  /server_info {tp_size, dp_size}       before: /get_server_info
    POST /pause_generation {mode}              "abort": requests in flight are aborted
    POST /begin_weight_update {}               0.5.23: opens the session that tensors need
    POST /update_weights_from_tensor           {serialized_named_tensors, flush_cache, weight_version}; dp_size 1 alone
         serialized_named_tensors              base64 of a pickled [(name, tensor)], once per tensor parallel rank
    POST /end_weight_update {}                 0.5.23
    POST /update_weights_from_disk             {model_path, load_format, flush_cache, weight_version}
    GET  /model_info {weight_version}          before: /get_model_info
    POST /continue_generation {}

Loads are sent once: a server that was restarted between two buckets would go on with a part of the weights. An update
that fails leaves the engine paused: it may hold a mixture of old and new weights.
"""

import base64
import pickle
import shutil
import urllib.error
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core.errors import TrainingError
from equipoise.core.value import require_int
from equipoise.engines.connection import Connection, Patience
from equipoise.engines.dialects import EngineName
from equipoise.routes.wire import field

if TYPE_CHECKING:
    from torch import Tensor

Bucket = list[tuple[str, "Tensor"]]
"""Named tensors that are sent together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOptions:
    """How weights reach an engine."""

    folder: Path | None = None
    """A folder that trainer and engine see under the same path; None: over HTTP, which SGLang alone accepts."""
    bucket_bytes: int = 512 * 2**20
    """Most bytes of tensors in one request or file; a larger tensor is sent alone."""

    def __post_init__(self) -> None:
        require_int("WeightOptions.bucket_bytes", self.bucket_bytes, low=1, error=TrainingError)


class WeightSender:
    """Gives new weights to one vLLM or SGLang server."""

    def __init__(
        self, url: str, engine: EngineName, *, options: WeightOptions, patience: Patience | None = None
    ) -> None:
        """Use the server at `url`; nothing is sent yet."""
        self._connection, self._options = Connection(url, patience or Patience()), options
        self._update = _VllmUpdate(self._connection) if engine == "vllm" else _SglangUpdate(self._connection)
        self._written: Path | None = None

    @property
    def url(self) -> str:
        """The server's address."""
        return self._connection.url

    def check(self) -> None:
        """Raise if the server cannot be given weights in the chosen way; changes nothing."""
        if reason := self._update.refusal(over_http=self._options.folder is None):
            raise TrainingError(f"the engine at {self.url} cannot be given new weights: {reason}")

    def send(self, tensors: Iterable[tuple[str, "Tensor"]], version: str) -> Iterator[int]:
        """Pause the engine, load the weights, check that it answers with their version, and let it go on.

        Args:
            tensors: names as in the model's Hugging Face checkpoint; each must stay as it is until the end
            version: a name that the engine has not had before; routes are recorded with it

        Yields: bytes sent, after each bucket; the engine goes on when the iterator ends
        """
        self.check()
        buckets = list(fill_buckets(tensors, self._options.bucket_bytes))
        folder = None if self._options.folder is None else self._options.folder / version
        if folder is not None:
            yield from write_buckets(buckets, folder)
        try:
            self._update.pause()
            if folder is None:
                yield from self._update.load_tensors(buckets, version)
            else:
                self._update.load_folder(folder, version)
            found = self._update.version()
            if found not in (version, None):
                raise TrainingError(f"it says that its weights are {found!r}")
            self._update.resume()
        except TrainingError as error:
            raise TrainingError(
                f"weights {version!r} were not loaded by the engine at {self.url}: {error}. It is not resumed, because "
                "it may hold a mixture of old and new weights: restart it, then resume from the last checkpoint"
            ) from error
        if self._written is not None and self._written != folder:
            shutil.rmtree(self._written, ignore_errors=True)
        self._written = folder


def fill_buckets(tensors: Iterable[tuple[str, "Tensor"]], limit: int) -> Iterator[Bucket]:
    """Group tensors, in order, so that each group has at most `limit` bytes; a larger tensor is alone."""
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def write_buckets(buckets: list[Bucket], folder: Path) -> Iterator[int]:
    """Write one safetensors file per bucket, as both engines' loaders find them; yield the bytes of each."""
    from safetensors.torch import save_file

    for number, bucket in enumerate(buckets, start=1):
        path = folder / f"model-{number:05d}-of-{len(buckets):05d}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(dict(_own_memory(bucket)), path, metadata={"format": "pt"})
        except OSError as error:
            raise TrainingError(f"weights cannot be written to {path} ({error}); make room there") from error
        yield _size(bucket)


class _VllmUpdate:
    """vLLM's protocol."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def refusal(self, *, over_http: bool) -> str:
        if over_http:
            return "vLLM takes no tensors over HTTP; give a folder that it can read as well (setting rollout.weights)"
        if self._connection.get("/is_paused") is None:
            return "it has no /is_paused; start vLLM with VLLM_SERVER_DEV_MODE=1"
        return ""

    def pause(self) -> None:
        self._connection.post("/pause", {})

    def load_folder(self, folder: Path, version: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._connection.post("/collective_rpc", body, once=True)
        # Up to 0.26 there are no versions: neither here nor in the answers.
        if self.version() is not None:
            self._connection.post("/update_weight_version", {"new_version": version})

    def load_tensors(self, buckets: list[Bucket], version: str) -> Iterator[int]:
        raise AssertionError("`refusal` has refused it")

    def version(self) -> str | None:
        info = self._connection.get("/weight_info")
        return None if info is None else str(field(info, "weight_version"))

    def resume(self) -> None:
        self._connection.post("/resume", {})


class _SglangUpdate:
    """SGLang's protocol."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def refusal(self, *, over_http: bool) -> str:
        if (replicas := self._parallelism("dp_size")) > 1 and over_http:
            return (
                f"its dp_size is {replicas}, and SGLang takes tensors over HTTP with 1 alone; give a folder that it "
                "can read as well (setting rollout.weights)"
            )
        return ""

    def pause(self) -> None:
        self._connection.post("/pause_generation", {"mode": "abort"})

    def load_folder(self, folder: Path, version: str) -> None:
        # With its own load format a server that was started with dummy weights would load dummy weights.
        body = {"model_path": str(folder), "load_format": "auto", "flush_cache": True, "weight_version": version}
        self._post("/update_weights_from_disk", body)

    def load_tensors(self, buckets: list[Bucket], version: str) -> Iterator[int]:
        ranks, has_session = self._parallelism("tp_size"), self._begin()
        for number, bucket in enumerate(buckets, start=1):
            # Plain pickle holds the numbers themselves; SGLang's own serializer would hold a name of shared memory.
            payload = base64.b64encode(pickle.dumps(list(_own_memory(bucket)))).decode()
            body: dict[str, Any] = {"serialized_named_tensors": [payload] * ranks, "flush_cache": False}
            if number == len(buckets):
                body |= {"flush_cache": True, "weight_version": version}
            self._post("/update_weights_from_tensor", body)
            yield _size(bucket)
        if has_session:
            self._post("/end_weight_update", {})

    def version(self) -> str | None:
        info = self._connection.get("/model_info") or self._connection.get("/get_model_info")
        return str(field(info, "weight_version"))

    def resume(self) -> None:
        self._connection.post("/continue_generation", {})

    def _begin(self) -> bool:
        """Open a session; False where the version has none."""
        try:
            self._post("/begin_weight_update", {})
        except TrainingError as error:
            cause = error.__cause__
            if isinstance(cause, urllib.error.HTTPError) and cause.code == 404:
                return False
            # A trainer that died in an update left its session open.
            if "already open" not in str(error):
                raise
            self._post("/end_weight_update", {})
            self._post("/begin_weight_update", {})
        return True

    def _parallelism(self, name: str) -> int:
        info = self._connection.get("/server_info") or self._connection.get("/get_server_info")
        found = field(info, name)
        if not isinstance(found, int):
            raise TrainingError(
                f"the engine at {self._connection.url} does not say its {name} (/server_info); is it an SGLang server "
                "(setting rollout.engine)?"
            )
        return found

    def _post(self, path: str, body: dict[str, Any]) -> None:
        answer = self._connection.post(path, body, once=True)
        if field(answer, "success") is not True:
            raise TrainingError(f"{path} answered {str(answer)[:300]}")


def _own_memory(bucket: Bucket) -> Iterator[tuple[str, "Tensor"]]:
    """Yield the tensors on the host, each with memory of its own: of a view, all of its storage would be written."""
    for name, tensor in bucket:
        yield name, tensor.detach().to("cpu", copy=True).contiguous()


def _size(bucket: Bucket) -> int:
    return sum(tensor.nbytes for _, tensor in bucket)
