"""Layer 2: the paged KV cache. Knows blocks and slots, no models and no tokens' meaning."""
