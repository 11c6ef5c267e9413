"""Parts of `benchmarks/engines_agree.py`: what is recorded once, one module per engine, the comparison."""
