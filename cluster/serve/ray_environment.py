"""What the environment of Ray's processes must say before they start, on whichever machine."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray would run the engine at nice 15
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 << 20),  # bytes; a long prompt is more than gRPC's 4 MiB
}
