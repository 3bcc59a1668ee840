"""Where the time of a run goes: profilers, throughput and a table of parameters."""
