"""The OpenAI API over HTTP: request and response bodies, keys, limits, tokenizer, web pages."""
