"""`specdec bench`: measures acceptance, latency, throughput, servers, kernels and mechanisms; one command a file."""
