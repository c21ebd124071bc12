"""Layer 7: the drop-in for `model.generate`. Knows transformers' arguments and results; the engine does the rest."""
