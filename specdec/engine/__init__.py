"""Layer 6: scheduler, batches, the step. Knows requests; knows drafters and rules only by protocol."""
