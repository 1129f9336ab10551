"""`crossdock bench`: a load generator for any OpenAI endpoint, and what it makes of what it saw."""
