"""Environment variables that Ray's processes need before they start, on every machine; and whether Ray starts here."""

import os

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray would run the engine at nice 15
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 << 20),  # bytes; a long prompt exceeds gRPC's 4 MiB
    # glibc returns large buffers at once, a prompt's logits say: by default it comes to keep those of up to 32 MiB.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 20),
}
ON_ONE_MACHINE = {  # not RAY_AUTH_MODE: `ray.init` asks for a token by itself, and has read the variable already
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # "no": Ray then listens on loopback alone, on Linux too
    # Not ten attempts a second apart: the raylet often asks its own object store a moment too early.
    "RAY_raylet_client_num_connect_attempts": "5000",
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    # A worker that has become none in time is killed, and starts again. Its imports, seconds of an idle machine, take
    # a slow and busy one longer than Ray's own minute. The same holds for Ray's first process, and its 30 s.
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_gcs_server_port_wait_time_s": "120",
}


def is_local() -> bool:
    """Return whether Ray starts on this machine; else RAY_ADDRESS names a cluster to join, and models are there."""
    return os.environ.get("RAY_ADDRESS", "") in ("", "local")
