"""Reports on runs: `runs` reads their metrics, `plots` draws curves, `report` writes one HTML file."""
