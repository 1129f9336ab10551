"""The Ray Serve application: ingresses, engine deployments, scaler; and `crossdock serve`, which starts it."""
