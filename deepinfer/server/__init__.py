"""The HTTP server: OpenAI's Chat Completions and Completions over the engine."""
