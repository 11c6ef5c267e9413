"""Parts of `benchmarks/engines_agree.py`: recorded inputs, one module per engine, the comparison."""
