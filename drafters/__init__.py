"""Layer 5: the drafters, one file each. They guess token trees; they know nothing of scheduling."""
