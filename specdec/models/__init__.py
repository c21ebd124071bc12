"""Layer 3: models over a packed batch. Knows weights and the cache, no requests."""
