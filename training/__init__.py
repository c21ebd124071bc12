"""Beside layer 5: what draft heads are measured by, and where their trainer will stand."""
