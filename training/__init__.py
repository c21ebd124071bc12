"""Beside layer 5: where the trainer of draft heads will stand. Empty so far."""
