"""Manifests from a configuration: what `ray up`, KubeRay and `serve deploy` are given."""
