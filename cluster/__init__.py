"""The whole system: configuration, Ray Serve application, OpenAI API, command line."""
