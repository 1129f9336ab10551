"""Manifests from a configuration, for `ray up`, KubeRay and `serve deploy`."""
