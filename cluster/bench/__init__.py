"""`crossdock bench`: a load generator for any OpenAI endpoint, and the report of what its clients saw."""
