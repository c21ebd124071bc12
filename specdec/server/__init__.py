"""Layer 8: the OpenAI-compatible server. Knows HTTP; asks the engine through `AsyncEngine` alone."""
