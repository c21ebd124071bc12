"""Layer 4: token trees and the rules that accept a path of them. Knows logits and trees, no models, no requests."""
