"""Every key of trouterd.toml: its type, default, unit, range and whether it can be changed live. Nothing is documented twice."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

LIVE = {"live": True}


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=False):
    """Base of all sections: frozen, unknown keys are errors."""


class Server(Section, frozen=True):
    """The endpoint and its limits."""

    socket: Annotated[str, Meta(description="Unix socket of the HTTP API; '' for none.")] = "trouterd.sock"
    socket_mode: Annotated[
        int,
        Meta(
            ge=0,
            le=0o777,
            description="Permission bits of the API socket from its first instant; control: 0600.",
        ),
    ] = 0o600
    socket_group: Annotated[str, Meta(description="Group that owns the API socket; '' keeps the process's own.")] = ""
    listen: Annotated[str, Meta(description="TCP address of the HTTP API, HOST:PORT; '' for none.")] = ""
    control: Annotated[
        str,
        Meta(description="Control socket of trouterctl; '' = the API socket's path with .ctl in place of its suffix."),
    ] = ""
    api_key_file: Annotated[
        str, Meta(description="File with one bearer key a line; '' = no key asked. Covers all but /health and /ready.")
    ] = ""
    max_active_requests: Annotated[
        int, Meta(ge=1, description="Choices (n per request) in the daemon at once; more are answered 429.", extra=LIVE)
    ] = 1024
    max_body_bytes: Annotated[int, Meta(ge=1024, description="Largest request body, bytes.")] = 16 << 20
    drain_timeout: Annotated[
        float, Meta(ge=0, description="Seconds that running answers get after SIGTERM.", extra=LIVE)
    ] = 30.0
    keepalive_interval: Annotated[
        float,
        Meta(
            ge=0, description="Seconds without a token after which a stream gets an SSE comment; 0 = never.", extra=LIVE
        ),
    ] = 15.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Lowest level that is logged.", extra=LIVE)
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Meta(description="Shape of a log line on standard error.")] = "text"


class Supervision(Section, frozen=True):
    """How the supervisor watches its children."""

    heartbeat_interval: Annotated[float, Meta(ge=0.01, le=60, description="Seconds between two pings of a child.")] = (
        0.5
    )
    peer_stall: Annotated[
        float,
        Meta(
            gt=0, description="Seconds without an answer to a ping after which a process counts as stalled.", extra=LIVE
        ),
    ] = 2.0
    stall_after: Annotated[
        float, Meta(gt=0, description="Seconds that one step may take before /ready turns 503.", extra=LIVE)
    ] = 30.0
    restart_backoff: Annotated[
        float, Meta(gt=0, description="Seconds before the first restart of a dead child; doubles up to 30 s.")
    ] = 0.5
    start_timeout: Annotated[
        float,
        Meta(gt=0, description="Seconds that a child may take to become ready; waits for other models do not count."),
    ] = 600.0
    start_attempts: Annotated[
        int, Meta(ge=1, description="Deaths of a child that was never ready after which the daemon gives up.")
    ] = 3


class Rings(Section, frozen=True):
    """The shared-memory rings between processes."""

    capacity: Annotated[int, Meta(ge=1 << 16, le=1 << 30, description="Bytes of one ring, a power of two.")] = 1 << 20
    spill_records: Annotated[int, Meta(ge=1, description="Records that may wait in a sender when a ring is full.")] = (
        4096
    )
    spill_bytes: Annotated[
        int, Meta(ge=1 << 16, description="Bytes that may wait in a sender when a ring is full.")
    ] = 8 << 20
    spin_us: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Microseconds that a process spins on a ring that it has emptied before it sleeps on it.",
        ),
    ] = 0
    watch: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="A worker that waits for hand-offs, or for its turn, stays awake (busy-waits), up to 0.1 s after the last"
            " one: they are seen some 0.1 ms sooner, by a core that has not slept and is occupied meanwhile. 'auto': where there"
            " are four cores for the api and for each worker process."
        ),
    ] = "auto"
    checksum: Annotated[bool, Meta(description="Checksum every record (finds wild writes; costs time).")] = False


class Gpu(Section, frozen=True):
    """How models use and share the GPUs."""

    memory_fraction: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Part of each GPU's memory that its models may take together; KV pools get what weights, graphs"
            " and workspace leave of it.",
        ),
    ] = 0.9
    mps: Annotated[
        Literal["auto", "off"],
        Meta(
            description="'auto' starts CUDA MPS for models that share a GPU, so that their kernels run side by side;"
            " 'off' lets them take turns."
        ),
    ] = "auto"


class Batching(Section, frozen=True):
    """Delayed batching (docs/batching.md): how many ready requests launch a step."""

    mode: Annotated[
        Literal["auto", "eager", "manual"],
        Meta(
            description="'auto' learns thresholds from measured steps and hand-offs; 'eager' launches whatever is ready;"
            " 'manual' goes by models.X.thresholds.",
            extra=LIVE,
        ),
    ] = "auto"
    relax: Annotated[
        bool,
        Meta(
            description="Launch below the threshold when a member of the model's last batch is ready; costs throughput on a"
            " shared GPU.",
            extra=LIVE,
        ),
    ] = False
    overlap: Annotated[
        bool,
        Meta(
            description="Models run side by side; false: they take turns, so that the steps of one model at a time run in the whole"
            " daemon. Models of a GPU that start so can each have the persistent kernel on all of it.",
            extra=LIVE,
        ),
    ] = True
    state: Annotated[
        str,
        Meta(
            description="File that keeps what was learned; '' = batching.json in $STATE_DIRECTORY, or else the control socket's"
            " path with .batching.json in place of its suffix."
        ),
    ] = ""


class Model(Section, frozen=True):
    """One model, served by one worker process."""

    path: Annotated[
        str,
        Meta(
            description="Hugging Face directory, 'builtin:small' or 'builtin:large' of the demo pair, or a script file."
        ),
    ]
    format: Annotated[
        Literal["hf", "script"],
        Meta(description="'script' replays ids from a JSON file: tests and overhead benchmarks."),
    ] = "hf"
    tokenizer: Annotated[str, Meta(description="Directory of the tokenizer; '' = the model's own.")] = ""
    device: Annotated[str, Meta(description="'cpu' or a CUDA device such as 'cuda:0'.")] = "cpu"
    tensor_parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="GPUs that the model is split over, a power of two: `device` and the ones after it.",
        ),
    ] = 1
    backend: Annotated[
        Literal["auto", "torch", "flashinfer"],
        Meta(
            description="'torch' is the reference, 'flashinfer' the fast one for CUDA; 'auto' takes the fast one where"
            " it can run and logs why where it cannot."
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(description="'dummy' makes random weights of the shape in config.json: benchmarks of speed."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(description="Type of weights and KV; 'auto' = bfloat16 on CUDA, float32 on the CPU."),
    ] = "auto"
    threads: Annotated[int, Meta(ge=1, le=1024, description="CPU threads of the worker.")] = 1
    context_length: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 30,
            description="Largest prompt + output, tokens; 0 = the model's own, which can need much memory.",
        ),
    ] = 0
    kv_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 40,
            description="KV pool size in tokens. 0 = CPU: 16 full contexts, capped by kv_bytes; GPU: as many as fit into"
            " gpu.memory_fraction, the same number for all models that share a GPU.",
        ),
    ] = 0
    kv_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            le=1 << 50,
            description="CPU: most bytes that an automatic KV pool takes; one full context must fit.",
        ),
    ] = 1 << 30
    page_size: Annotated[int, Meta(ge=1, le=1 << 16, description="Tokens of one KV page.")] = 16
    prefix_cache: Annotated[
        bool, Meta(description="Keep the KV of finished prompts and answers for later requests.")
    ] = True
    max_requests: Annotated[int, Meta(ge=1, le=1 << 16, description="Requests that may hold KV here at once.")] = 256
    max_batch_tokens: Annotated[
        int, Meta(ge=16, description="Token rows of one step; longer prefills are chunked.", extra=LIVE)
    ] = 512

    thresholds: Annotated[
        list[Annotated[int, Meta(ge=1)]],
        Meta(
            max_length=4096,
            description="Ready requests that launch a step, for 1, 2, ... active requests; the last one holds beyond. [] = 1."
            " In force with batching.mode = 'manual'.",
            extra=LIVE,
        ),
    ] = []
    linger_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=60_000,
            description="Longest time that a ready request waits for others, ms; 0 = four times the longest step of the models"
            " that it shares routes with, as measured.",
            extra=LIVE,
        ),
    ] = 0.0

    graphs: Annotated[bool, Meta(description="GPU: capture steps of common sizes as CUDA graphs at start.")] = True
    extend_graphs: Annotated[
        bool,
        Meta(
            description="GPU: capture also steps that feed several tokens of a request, as those after a hand-off do; false: only"
            " steps of one token each, which is faster to start."
        ),
    ] = True
    depth: Annotated[
        int,
        Meta(ge=1, le=4, description="GPU: decode steps in flight; with 2 the GPU never waits for the CPU."),
    ] = 2
    megakernel: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="GPU: run steps of few rows as one persistent kernel: up to 16; up to 12 on half of the GPU or less. 'auto'"
            " is the smallest model of a GPU whose shape allows it, unless another model there says 'on', or it is one that routes"
            " visit and that shares the GPU. Several can say 'on' with megakernel_percent of 100 in all, or where models take turns"
            " (batching.overlap)."
        ),
    ] = "auto"
    megakernel_percent: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description="Part of the GPU's multiprocessors, or of those that sm_percent leaves, that the persistent kernel takes;"
            " 0 = 40 where models of this daemon share the GPU side by side, else 100. For a GPU that other programs use too,"
            " and for a large model's kernel on a shared one.",
        ),
    ] = 0
    sm_percent: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description="Part of a shared GPU's multiprocessors that the model may use at once, by MPS; 0 = no limit.",
        ),
    ] = 0

    @property
    def tokenizer_folder(self) -> str:
        """Where the tokenizer lies."""
        return self.tokenizer or self.path

    @property
    def gpus(self) -> range:
        """Indices of the GPUs that the model is on; empty on the CPU and for a script."""
        kind, _, index = self.device.partition(":")
        if kind != "cuda" or self.format == "script":
            return range(0)
        first = int(index or 0)
        return range(first, first + self.tensor_parallel)

    @property
    def element_type(self) -> str:
        """'float32' or 'bfloat16': `dtype` with 'auto' resolved."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.device.startswith("cuda") else "float32"

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight."""
        return 2 if self.element_type == "bfloat16" else 4


class Route(Section, frozen=True):
    """A name that clients use as `model`, and who writes its tokens."""

    models: Annotated[list[str], Meta(min_length=1, description="Model names; the first one is the entry.")]
    algorithm: Annotated[
        str,
        Meta(description="Name of a built-in or installed algorithm, or the path of a Python file that defines one."),
    ] = "none"
    params: Annotated[
        dict[str, Any],
        Meta(
            description="The algorithm's parameters (docs/algorithms.md); numbers and lists of numbers are live.",
            extra=LIVE,
        ),
    ] = {}
    on_peer_loss: Annotated[
        Literal["fallback", "fail"],
        Meta(
            description="When a peer is lost or full: the entry goes on alone, or the request fails with 503.",
            extra=LIVE,
        ),
    ] = "fallback"
    max_stall: Annotated[
        int,
        Meta(
            ge=2,
            description="Hand-offs without progress after which the holder must commit its own token. The way back from a visit is"
            " one, so with 1 no token behind a visit could be routed.",
            extra=LIVE,
        ),
    ] = 8


class Config(Section, frozen=True):
    """The whole of trouterd.toml."""

    server: Server = Server()
    supervision: Supervision = Supervision()
    rings: Rings = Rings()
    gpu: Gpu = Gpu()
    batching: Batching = Batching()
    models: Annotated[dict[str, Model], Meta(description="One table per model.")] = {}
    routes: Annotated[
        dict[str, Route], Meta(description="One table per route; every model is also a route of its own.")
    ] = {}

    def all_routes(self) -> dict[str, Route]:
        """Configured routes plus one single-model route per model, by public name."""
        singles = {name: Route(models=[name]) for name in self.models}
        return singles | self.routes

    def sharing(self, gpu: int) -> list[str]:
        """Names of the models on a GPU."""
        return [name for name, model in self.models.items() if gpu in model.gpus]

    @property
    def shared_gpus(self) -> list[int]:
        """GPUs with more than one model."""
        gpus = sorted({gpu for model in self.models.values() for gpu in model.gpus})
        return [gpu for gpu in gpus if len(self.sharing(gpu)) > 1]

    def worker_index(self, model: str) -> int:
        """Index of a model's worker: its place in `models`."""
        return list(self.models).index(model)
