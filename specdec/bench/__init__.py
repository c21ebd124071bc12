"""Layer 8: measures acceptance, speed and exactness. Knows engines and peers; nothing of command lines."""
