"""Reports on runs: metrics read back (`runs`), curves, and one HTML file (`report`)."""
