"""Beside layer 6: the trainer of draft heads. Knows the base model, the heads and examples; no requests, no CLI."""
