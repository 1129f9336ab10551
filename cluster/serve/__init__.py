"""The Ray Serve application: ingresses, engine deployments, scaler."""
