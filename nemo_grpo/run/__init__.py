"""One kernel under both engines: checks, run folder, continuation, signals, samples, demonstrations."""
