"""Between replicas: the docks of all ranks as one, and the handover of requests with their pages."""
