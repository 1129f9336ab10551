"""From an ingress to the replicas: follow each request from its placement to its last token."""
